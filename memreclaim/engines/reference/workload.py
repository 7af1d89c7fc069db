"""A fixed workload in which every row range of every phase really occurs, and the comparison of two runs of it."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from memreclaim.engines.reference.server import Server
from memreclaim.errors import PoolError
from memreclaim.states import Phase

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from memreclaim.engines.reference.config import ModelConfig
    from memreclaim.engines.reference.model import ReferenceModel
    from memreclaim.engines.reference.pool import PagedPool
    from memreclaim.engines.reference.request import Request

Prompt = tuple[int, ...]
ROW_RANGES = ((1, "1"), (8, "2..8"), (192, "9..192"))
"""Upper end and name of each row range that has kernels of its own; what is above is ``>192``."""
_BEYOND = ">192"


@dataclass(frozen=True)
class Scenario:
    """Requests that arrive together and are served together."""

    name: str
    prompts: tuple[Prompt, ...]
    max_new_tokens: int
    draft_tokens: int = 0

    def tokens_needed(self, page_tokens: int) -> int:
        """Tokens that the pool must have free, in whole pages."""
        lengths = (len(prompt) + self.max_new_tokens + self.draft_tokens for prompt in self.prompts)
        return sum(-(-length // page_tokens) * page_tokens for length in lengths)


@dataclass(frozen=True)
class Workload:
    """Scenarios, one after another."""

    scenarios: tuple[Scenario, ...]

    def tokens_needed(self, page_tokens: int) -> int:
        """Free tokens with which the batches are the same in every run."""
        return max(scenario.tokens_needed(page_tokens) for scenario in self.scenarios)

    @property
    def requests(self) -> int:
        """Requests over all scenarios."""
        return sum(len(scenario.prompts) for scenario in self.scenarios)


@dataclass(frozen=True, eq=False)
class ServedRun:
    """What one run of a workload produced, request by request."""

    outputs: tuple[tuple[int, ...], ...]
    """Tokens."""
    logits: tuple[torch.Tensor, ...]
    """Scores that each token was chosen by, fp32 ``[tokens, vocab]``."""
    rows: Mapping[Phase, Mapping[int, int]]
    """How often the model was called with how many rows."""

    def row_ranges(self) -> dict[Phase, dict[str, int]]:
        """Calls by phase and row range, ranges in ascending order."""
        ranges: dict[Phase, dict[str, int]] = {}
        for phase, calls in self.rows.items():
            counted = Counter[str]()
            for rows in sorted(calls):
                counted[row_range(rows)] += calls[rows]
            ranges[phase] = dict(counted)
        return ranges

    def first_difference(self, other: ServedRun) -> str | None:
        """Where ``other`` first differs in a token or in a bit of a score, as a sentence; None when nothing does."""
        if len(self.outputs) != len(other.outputs):
            return f"{len(self.outputs)} requests against {len(other.outputs)}"
        for index, (mine, theirs) in enumerate(zip(self.logits, other.logits, strict=True)):
            if self.outputs[index] != other.outputs[index] and mine.shape != theirs.shape:
                return f"request {index} gave {len(mine)} tokens against {len(theirs)}"
            differs = (mine.view(torch.int32) != theirs.view(torch.int32)).nonzero()
            if len(differs):
                step, token = differs[0].tolist()
                values = f"{float(mine[step, token])!r} against {float(theirs[step, token])!r}"
                return f"request {index}, token {step}: the score of {token} is {values}"
            if self.outputs[index] != other.outputs[index]:
                return f"request {index} chose other tokens from equal scores"
        return None


def row_range(rows: int) -> str:
    """Name of the range that ``rows`` falls in."""
    return next((name for highest, name in ROW_RANGES if rows <= highest), _BEYOND)


def workload(config: ModelConfig, seed: int = 0) -> Workload:
    """Six scenarios: decode has 1, 2..8 and 9..192 rows, verify and draft 2..8 and 9..192, prefill also more.

    Few tokens each: on two CPU cores a call of 40 rows costs about 0.3 s in the demo's four layers.
    """
    prompts = _Prompts(config, seed)
    return Workload(
        (
            Scenario("one request", prompts.some(1, 20), 6),
            Scenario("one request, speculative", prompts.some(1, 12), 8, draft_tokens=4),
            Scenario("small batch", prompts.some(6, 4), 4),
            Scenario("batch", prompts.some(16, 3), 3),
            Scenario("batch, speculative", prompts.some(8, 4), 6, draft_tokens=4),
            Scenario("long prompt", prompts.some(1, 200), 2),
        )
    )


def burst(config: ModelConfig, count: int, seed: int = 0, length: int = 8) -> tuple[Prompt, ...]:
    """``count`` prompts that arrive at once, to see how many a pool holds."""
    return _Prompts(config, seed).some(count, length)


def serve_workload(
    model: ReferenceModel,
    pool: PagedPool,
    work: Workload,
    *,
    progress: Callable[[int, int], None] | None = None,
    between_steps: Callable[[Server], None] | None = None,
) -> ServedRun:
    """Serve ``work`` from start to end in this thread.

    ``progress`` gets requests done and requests in all after each step; ``between_steps`` gets the server, outside of
    its step, with requests in flight. Raises :class:`PoolError` when the pool has too little free room for a scenario:
    batches, and with them bits, would depend on the pool.
    """
    done: list[Request] = []
    rows: dict[Phase, Counter[int]] = {phase: Counter() for phase in Phase}
    for scenario in work.scenarios:
        if scenario.tokens_needed(pool.page_tokens) > pool.free_tokens:
            needed = scenario.tokens_needed(pool.page_tokens)
            message = f"{scenario.name!r} needs {needed} free tokens, the pool has {pool.free_tokens}"
            raise PoolError(message)
        server = Server(model, pool, draft_tokens=scenario.draft_tokens, max_running=len(scenario.prompts))
        requests = [server.submit(prompt, scenario.max_new_tokens) for prompt in scenario.prompts]
        while server.step():
            if progress is not None:
                progress(len(done) + sum(request.done for request in requests), work.requests)
            if between_steps is not None:
                between_steps(server)
        done += requests
        for phase, calls in server.rows.items():
            rows[phase] += calls
    outputs = tuple(request.result(0) for request in done)
    return ServedRun(outputs, tuple(torch.stack(request.logits) for request in done), rows)


class _Prompts:
    """Random prompts of one vocabulary; the same seed gives the same ones."""

    def __init__(self, config: ModelConfig, seed: int) -> None:
        self._vocabulary = config.vocab_size
        self._random = torch.Generator().manual_seed(seed)

    def some(self, count: int, length: int) -> tuple[Prompt, ...]:
        """``count`` prompts of ``length`` tokens."""
        drawn = torch.randint(self._vocabulary, (count, length), generator=self._random)
        return tuple(tuple(row) for row in drawn.tolist())
