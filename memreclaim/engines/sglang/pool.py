"""The engine's KV pool: what it holds, what bounds it, and what it would have held without the reclaim.

The engine sizes its pool once, from the memory that it finds free after the weights are loaded and reclaimed. So
nothing is handed over: the figures come from the engine's own configurator, asked once more with the budget that it
would have had.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from memreclaim.kvpool import MEMORY, PIN, PoolChange

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

_CONFIGURATORS = "sglang.srt.model_executor.pool_configurator"


class SGLangPool:
    """A :class:`memreclaim.kvpool.KVPool` over a runner's pool: it can be read, but neither grown nor shrunk."""

    def __init__(self, runner: Any) -> None:  # noqa: ANN401
        """``runner`` has allocated its pool."""
        self._runner = runner

    @property
    def capacity_tokens(self) -> int:
        """Tokens that the pool holds when it is full."""
        return int(self._runner.max_total_num_tokens)

    @property
    def bytes_per_token(self) -> float:
        """As the engine's configurator counts, else from the pool's tensors."""
        configured = bytes_per_token(self._runner.kv_cache_configurator)
        return configured or pool_bytes(self._runner.token_to_kv_pool) / max(1, self.capacity_tokens)

    @property
    def limited_by(self) -> str:
        """``pin`` when the operator fixed the size and it is reached, else ``memory``."""
        pin = token_cap()
        return PIN if pin is not None and self.capacity_tokens >= _aligned(pin, self._runner) else MEMORY

    def grow(self, n_bytes: int) -> int:
        """The engine sizes its pool itself, and cannot grow it after graphs are captured."""
        del n_bytes
        return 0

    def shrink(self, n_bytes: int) -> int:
        """See :meth:`grow`."""
        del n_bytes
        return 0


@dataclass(frozen=True)
class RankMemory:
    """What one rank had when the pool was sized."""

    rank: str
    free_bytes: int
    net_bytes: int
    """What the reclaim had freed there by then."""


def change(runner: Any, budget_bytes: int, ranks: Sequence[RankMemory], rank: str) -> PoolChange:  # noqa: ANN401
    """What the engine did with the freed bytes, as it computes pools itself.

    ``budget_bytes`` is what it sized the pool from: the least free memory of all ranks, less its slack. Without the
    reclaim the least would have been that of ``free - net``, perhaps another rank's.
    """
    pool = SGLangPool(runner)
    after = pool.capacity_tokens
    least = min(one.free_bytes for one in ranks)
    gained_bytes = least - min(one.free_bytes - one.net_bytes for one in ranks)
    mine = next(one for one in ranks if one.rank == rank)
    try:
        before = min(after, tokens_for(runner, budget_bytes - gained_bytes))
    except (ValueError, RuntimeError, AssertionError):
        before = 0  # the engine refuses such a budget: without the reclaim it would not have started
    if pool.limited_by == PIN:
        return PoolChange(before, after, pool.bytes_per_token, PIN, mine.net_bytes - _took(before, after, pool))
    scarce = min(ranks, key=lambda one: one.free_bytes)
    # A difference under one percent of what was freed is noise of the driver, no other rank's doing.
    other = scarce.rank != rank and mine.free_bytes - scarce.free_bytes > mine.net_bytes // 100
    limited = f"rank {scarce.rank}" if other else MEMORY
    head_room = max(0, mine.net_bytes - _took(before, after, pool))
    return PoolChange(before, after, pool.bytes_per_token, limited, head_room)


def _took(before: int, after: int, pool: SGLangPool) -> int:
    return int((after - before) * pool.bytes_per_token)


def tokens_for(runner: Any, budget_bytes: int) -> int:  # noqa: ANN401
    """Tokens that the engine's configurator gives for a budget, the operator's cap applied; allocates nothing.

    It leaves out the step that ranks of a pipeline take together: a collective that only some of them enter would hang.
    """
    configurator = _configurator(runner.kv_cache_configurator)
    config = configurator.calculate_pool_sizes(max(0, budget_bytes), _schedule().page_size)
    sized = getattr(runner, "memory_pool_config", None)
    running = getattr(sized, "max_running_requests", None)
    if running is not None and hasattr(configurator, "finalize_with_max_running_requests"):
        config.max_running_requests = running
        config = configurator.finalize_with_max_running_requests(config)
    cap = token_cap()
    return int(config.max_total_num_tokens if cap is None else min(config.max_total_num_tokens, cap))


def bytes_per_token(kv_cache_configurator: Any) -> float | None:  # noqa: ANN401
    """Bytes of one token on this rank over all layers, as the engine's configurator counts; None where it does not."""
    counted = getattr(_configurator(kv_cache_configurator), "bytes_per_full_token", None)
    return None if counted is None else float(counted)


def _configurator(kv_cache_configurator: Any) -> Any:  # noqa: ANN401
    return sys.modules[_CONFIGURATORS].create_memory_pool_configurator(kv_cache_configurator)


def token_cap() -> int | None:
    """``--max-total-tokens``, None when the operator left it to the engine."""
    cap = _schedule().max_total_tokens
    return None if cap is None else int(cap)


def _aligned(tokens: int, runner: Any) -> int:  # noqa: ANN401
    page = int(getattr(runner, "page_size", None) or 1)
    return tokens // page * page


def _schedule() -> Any:  # noqa: ANN401
    return sys.modules["sglang.srt.runtime_context"].get_schedule()


def pool_bytes(pool: object) -> int:
    """Bytes of every tensor that a pool holds, each storage once. The engine's own ``mem_usage`` reads 0 for V4."""
    storages = {
        tensor.untyped_storage().data_ptr(): tensor.untyped_storage().nbytes() for tensor in _tensors(pool, set())
    }
    return sum(storages.values())


def _tensors(holder: object, seen: set[int]) -> Iterable[torch.Tensor]:
    if id(holder) in seen:
        return
    seen.add(id(holder))
    if isinstance(holder, torch.Tensor):
        yield holder
    elif isinstance(holder, dict):
        for value in holder.values():
            yield from _tensors(value, seen)
    elif isinstance(holder, (list, tuple)):
        for value in holder:
            yield from _tensors(value, seen)
    elif ".mem_cache." in f".{type(holder).__module__}.":
        yield from _tensors(getattr(holder, "__dict__", {}), seen)


def free_bytes(kv_cache_configurator: Any) -> int:  # noqa: ANN401
    """What is free on this rank alone, as the engine measures it, in bytes."""
    measure = sys.modules[type(kv_cache_configurator).__module__].get_available_gpu_memory
    return int(measure(kv_cache_configurator.device, kv_cache_configurator.gpu_id) * (1 << 30))
