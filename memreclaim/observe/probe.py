"""Latency on the side: how long one projection takes from bf16 and from the twin.

Calls inside a captured CUDA graph cannot be seen from Python, and observing every launch would cost as much as the
launch. So a probe runs a projection of its own now and then: stock and twin for each row bucket before the weights
are dropped, where the engine lets it, and the twin afterwards at a low fixed rate. It asks for the plan that the
engine's calls get. On a GPU it is timed by events on a stream of its own.
"""

from __future__ import annotations

import time
from itertools import count
from typing import TYPE_CHECKING, Final

import torch

from memreclaim.rank_snapshot import Baselines
from memreclaim.states import Phase
from memreclaim.twin import build_twin
from memreclaim_kernels import ops, reference

if TYPE_CHECKING:
    from collections.abc import Callable

    from memreclaim.rank import Rank
    from memreclaim.twin import Twin
    from memreclaim_kernels.plan import Numerics, Plan, Stock

    Projection = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]

BUCKETS: Final = (
    ("1", 1, Phase.DECODE),
    ("2..8", 6, Phase.VERIFY),
    ("9..192", 64, Phase.VERIFY),
    (">192", 512, Phase.PREFILL),
)
"""Label, rows measured, phase. 6 rows are one request's draft of 5 and its token."""
_REPEATS: Final = 5
"""The median of so many calls is a baseline."""
_SLOW_SECONDS: Final = 0.25
"""A call that takes longer (512 rows on a CPU) is timed once, and larger row buckets are left out."""
SHARE: Final = 0.004
"""Most of its time that a probe may be busy: a bucket whose call would take longer is not sampled."""


class Probe:
    """Measures one rank; all methods are called in a thread that may use the device."""

    def __init__(self, rank: Rank, interval_seconds: float, stock: Stock = "bmm") -> None:
        """Write baselines and samples to ``rank``; :meth:`sample` is called every ``interval_seconds``.

        ``stock`` says whose bits the engine's own calls keep, as in :func:`memreclaim.serve.grouped_projection`.
        """
        self._rank, self.stock = rank, stock
        self._seconds: dict[str, float] = {}
        """By bucket: what a call was found to take, where there is no baseline."""
        self._longest = SHARE * interval_seconds
        self._turn = count()
        self._stream: torch.cuda.Stream | None = None

    def baseline(self, weight: torch.Tensor, groups: int, project: Projection = reference.grouped_projection) -> None:
        """Time stock and twin on ``weight`` bf16 ``[G*R, D]`` or ``[G, R, D]``, before it is dropped.

        ``project`` is what the engine itself runs on ``o [T, G, D]`` and ``weight [G, R, D]``. Peak extra memory: one
        twin and the rows' activations; raises :class:`memreclaim.errors.NotExact` for a weight without a twin.
        """
        twin = build_twin(weight, groups=groups)
        grouped = weight.detach().view(twin.shape)
        numerics: Numerics = self._rank.reclaimer.settings.numerics.value
        seconds: dict[tuple[str, str], float] = {}
        for label, rows, phase in BUCKETS:
            o = _activations(twin, rows)
            chosen = self._plan(o, twin, phase, numerics)
            seconds["stock", label] = self._median(lambda o=o: project(o, grouped))  # type: ignore[misc]
            seconds["twin", label] = self._median(lambda o=o, chosen=chosen: _serve(o, twin, chosen))  # type: ignore[misc]
            if max(seconds["stock", label], seconds["twin", label]) > _SLOW_SECONDS:
                break
        self._rank.baselines = Baselines(seconds)

    def sample(self) -> None:
        """Time one twin once: the layers and row buckets take turns.

        A bucket whose cost is not known is timed before it is judged, the fewest rows first; buckets of more rows than
        one that costs too much are left alone.
        """
        served = [
            (twin, entry.backing.numerics)
            for entry in self._rank.reclaimer.ledger.entries()
            if entry.backing is not None and (twin := entry.backing.twin) is not None
        ]
        if not served:
            return
        affordable = []
        for bucket in BUCKETS:
            cost = self._cost(bucket[0])
            if cost is None:
                self._sample(bucket, *served[0], first=True)
                return
            if cost > self._longest:
                break
            affordable.append(bucket)
        if affordable:
            turn = next(self._turn)
            layer = turn // len(affordable) % len(served)
            self._sample(affordable[turn % len(affordable)], *served[layer], first=False)

    def _sample(self, bucket: tuple[str, int, Phase], twin: Twin, numerics: Numerics, *, first: bool) -> None:
        label, rows, phase = bucket
        o = _activations(twin, rows)
        chosen = self._plan(o, twin, phase, numerics)
        seconds = self._time(lambda: _serve(o, twin, chosen))
        if first:
            if seconds <= _SLOW_SECONDS or self._rank.device.type == "cuda":  # that call may have compiled
                seconds = self._time(lambda: _serve(o, twin, chosen))
            self._seconds[label] = seconds
        self._rank.journal.observe("kernel_duration_seconds", seconds, chosen.path, label)

    def _cost(self, label: str) -> float | None:
        """Seconds of a call of the twin, None when nobody has measured it."""
        return self._rank.baselines.seconds.get(("twin", label), self._seconds.get(label))

    def _plan(self, o: torch.Tensor, twin: Twin, phase: Phase, numerics: Numerics) -> Plan:
        return ops.plan_for(o, twin.packed, phase=phase.value, numerics=numerics, stock=self.stock)

    def _median(self, call: Callable[[], object]) -> float:
        first = self._time(call)  # chooses a plan and may compile
        if first > _SLOW_SECONDS and self._rank.device.type == "cpu":
            return first
        return sorted(self._time(call) for _ in range(_REPEATS))[_REPEATS // 2]

    def _time(self, call: Callable[[], object]) -> float:
        if self._rank.device.type != "cuda":
            started = time.perf_counter()
            call()
            return time.perf_counter() - started
        if self._stream is None:
            self._stream = torch.cuda.Stream(self._rank.device)  # type: ignore[no-untyped-call]
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
        with torch.cuda.stream(self._stream):
            begin.record()
            call()
            end.record()
        end.synchronize()
        return float(begin.elapsed_time(end)) / 1e3


def _activations(twin: Twin, rows: int) -> torch.Tensor:
    return torch.ones((rows, twin.shape.groups, twin.shape.depth), dtype=torch.bfloat16, device=twin.device)


def _serve(o: torch.Tensor, twin: Twin, chosen: Plan) -> torch.Tensor:
    return ops.project(o, twin.packed, twin.exponents, chosen)
