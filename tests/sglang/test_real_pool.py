"""The KV pool's figures, from the engine's own V4 configurator."""

from __future__ import annotations

import importlib
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest
import torch

from memreclaim.engines.sglang import pool
from memreclaim.engines.sglang.pool import RankMemory
from memreclaim.kvpool import KVPool

if TYPE_CHECKING:
    from collections.abc import Callable

    from sglang_engine import Engine

    from memreclaim.engines.sglang.session import Session

pytestmark = pytest.mark.cpu
PAGE = 256
BUDGET = 80 << 30
NET = 360_400_000
"""What 43 layers free on a TP4 rank."""


@pytest.fixture
def runner(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> Any:
    """A runner whose pool was sized from :data:`BUDGET` by the real ``DSV4PoolConfigurator``."""
    configurators = importlib.import_module("sglang.srt.model_executor.pool_configurator")
    config = engine.config(compress_ratios=[4, 128] * 20 + [0, 0], num_hidden_layers=42)
    model_config = SimpleNamespace(
        qk_nope_head_dim=448,
        qk_rope_head_dim=64,
        index_head_dim=128,
        context_len=65536,
        compress_ratios=config.compress_ratios,
        window_size=128,
        hf_config=config,
    )
    kvc = SimpleNamespace(
        kv_cache_dtype_str="auto",
        model_config=model_config,
        spec_algorithm=SimpleNamespace(is_dspark=lambda: False),
        layer_info=SimpleNamespace(start_layer=0, end_layer=42),
        pp_size=1,
        sliding_window_size=128,
        page_size=PAGE,
        attn_dp_size=1,
        is_hybrid_swa=True,
    )
    monkeypatch.setattr(configurators, "is_deepseek_v4", lambda _config: True)
    schedule = SimpleNamespace(page_size=PAGE, max_total_tokens=None)
    monkeypatch.setattr(pool, "_schedule", lambda: schedule)
    made = SimpleNamespace(
        kv_cache_configurator=kvc, page_size=PAGE, token_to_kv_pool=object(), memory_pool_config=None, schedule=schedule
    )
    made.max_total_num_tokens = pool.tokens_for(made, BUDGET)
    return made


def ranks(*free_and_net: tuple[int, int]) -> list[RankMemory]:
    """Memories of ranks 0, 1, ..."""
    return [RankMemory(str(rank), free, net) for rank, (free, net) in enumerate(free_and_net)]


def test_the_gain_is_what_the_engines_configurator_makes_of_the_bytes(runner: Any) -> None:
    """Tokens before are those of the budget without the freed bytes; the engine aligns to pages."""
    change = pool.change(runner, BUDGET, ranks((BUDGET, NET)), "0")

    assert change.tokens_before == pool.tokens_for(runner, BUDGET - NET)
    assert change.tokens_after == runner.max_total_num_tokens
    assert change.tokens_gained > 0
    assert abs(change.tokens_gained - NET / change.bytes_per_token) <= 2 * PAGE
    assert change.limited_by == "memory"


def test_a_budget_without_which_the_engine_would_not_start_counts_as_no_tokens(runner: Any) -> None:
    """The configurator refuses budgets that hold no request."""
    assert pool.change(runner, BUDGET, ranks((BUDGET, BUDGET)), "0").tokens_before == 0


def test_the_engines_figure_of_bytes_per_token_is_used(runner: Any) -> None:
    """It is its configurator's, before any division of ours."""
    configurator = pool._configurator(runner.kv_cache_configurator)

    assert pool.SGLangPool(runner).bytes_per_token == configurator.bytes_per_full_token


def test_a_pinned_pool_gains_nothing_and_the_bytes_are_head_room(runner: Any) -> None:
    """``--max-total-tokens`` bounds it both ways."""
    runner.schedule.max_total_tokens = runner.max_total_num_tokens = 100 * PAGE

    change = pool.change(runner, BUDGET, ranks((BUDGET, NET)), "0")

    assert (change.tokens_gained, change.limited_by, change.head_room_bytes) == (0, "pin", NET)


def test_the_rank_with_the_least_memory_limits_the_others(runner: Any) -> None:
    """Rank 1 has 200 MB less than the others; it says memory, they name it."""
    memories = ranks((BUDGET, NET), (BUDGET - 200_000_000, NET), (BUDGET, NET))

    assert [pool.change(runner, BUDGET, memories, str(rank)).limited_by for rank in range(3)] == [
        "rank 1",
        "memory",
        "rank 1",
    ]


def test_a_rank_that_saves_more_has_head_room(runner: Any) -> None:
    """Three ranks, one saves twice as much: the pool grows by what the others saved."""
    memories = ranks((BUDGET, NET), (BUDGET + NET, 2 * NET), (BUDGET, NET))

    change = pool.change(runner, BUDGET, memories, "1")

    assert change.tokens_before == pool.tokens_for(runner, BUDGET - NET)
    assert change.limited_by == "rank 0"
    assert change.head_room_bytes >= NET - 2 * PAGE * change.bytes_per_token


def test_pool_bytes_are_summed_from_its_tensors(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nested buffers count once, views do not count again."""

    class Nested:
        def __init__(self, buffer: torch.Tensor) -> None:
            self.buffers = [buffer, buffer[:2], {"more": torch.zeros(10, dtype=torch.uint8)}]
            self.me = self

    monkeypatch.setattr(Nested, "__module__", "sglang.srt.mem_cache.deepseek_v4_memory_pool")

    assert pool.pool_bytes(Nested(torch.zeros(8, 4, dtype=torch.float32))) == 8 * 4 * 4 + 10


def test_the_pool_is_one_for_the_core(runner: Any) -> None:
    """It has the protocol's methods and refuses to move."""
    found = pool.SGLangPool(runner)

    assert isinstance(found, KVPool)
    assert (found.grow(1 << 30), found.shrink(1 << 30)) == (0, 0)


def test_the_session_notes_the_pool_when_the_engine_has_sized_it(
    engine: Engine,
    start: Callable[..., Session],
    load: Callable[..., Any],
    runner: Any,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Through the real hooks of ``_profile_available_bytes`` and ``alloc_memory_pool``."""
    here = start()
    loaded = load(engine.target())
    configurator = importlib.import_module("sglang.srt.mem_cache.kv_cache_configurator")
    monkeypatch.setattr(configurator, "get_available_gpu_memory", lambda *_args, **_kwargs: BUDGET / (1 << 30))
    monkeypatch.setattr(pool, "free_bytes", lambda _configurator: BUDGET)
    shares = SimpleNamespace(mem_fraction_static=0.9, prefill_max_requests=None, max_mamba_cache_size=None)
    monkeypatch.setattr(configurator, "get_schedule", lambda: shares)
    prefill = SimpleNamespace(full_prefill_max_req=None, backend=None)
    graphs = SimpleNamespace(cuda_graph_config=SimpleNamespace(prefill=prefill))
    monkeypatch.setattr(configurator, "get_exec", lambda: SimpleNamespace(graph=graphs))
    profile = configurator.KVCacheConfigurator._profile_available_bytes
    fake = SimpleNamespace(
        device="cpu",
        gpu_id=0,
        mambaish_config=None,
        post_capture_kv_active=False,
        model_config=SimpleNamespace(is_multimodal=False),
    )
    budget = profile(fake, pre_model_load_memory=1)
    result = SimpleNamespace(**dict.fromkeys(_RESULT), max_total_num_tokens=runner.max_total_num_tokens)
    result.token_to_kv_pool = object()
    loaded.kv_cache_configurator = runner.kv_cache_configurator
    loaded.kv_cache_configurator.configure = lambda **_: result
    for name in ("init_kv_cache_configurator", "_init_post_memory_pool_components"):
        monkeypatch.setattr(type(loaded), name, lambda *_args, **_kwargs: None)
    for name, value in {
        "memory_pool_config": None,
        "pre_model_load_memory": 1,
        "is_hybrid_swa": False,
        "page_size": PAGE,
    }.items():
        monkeypatch.setattr(loaded, name, value, raising=False)

    loaded.alloc_memory_pool()

    assert here.budget is not None
    assert here.budget.n_bytes == budget
    change = here.reclaimer.journal.pool
    assert change is not None
    assert change.tokens_after == runner.max_total_num_tokens


_RESULT = (
    "max_running_requests",
    "req_to_token_pool",
    "token_to_kv_pool",
    "token_to_kv_pool_allocator",
    "memory_pool_config",
    "unified_memory_pool",
)
