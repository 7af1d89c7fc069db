"""What happened in this process, counted where it happens: proofs, operations, requests, samples, the last events.

A journal holds totals and histograms by name and label values and knows nothing of Prometheus; :mod:`memreclaim.rank`
copies it into each snapshot.
"""

from __future__ import annotations

import threading
import time
from bisect import bisect_left
from collections import Counter, deque
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from memreclaim.errors import NotExact

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from memreclaim.kvpool import PoolChange
    from memreclaim.snapshot import FreedBytes, Report

EVENTS_KEPT: Final = 64
"""Events that a status page can show; a boot of 43 layers leaves about 50."""
BOUNDS: Final[Mapping[str, tuple[float, ...]]] = {
    "proof_duration_seconds": (0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5),
    "operation_duration_seconds": (0.01, 0.05, 0.1, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 300.0),
    "kernel_duration_seconds": tuple(2e-6 * 2 ** (k / 2) for k in range(26)),
    "http_request_duration_seconds": (0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.5, 1.0, 5.0),
}
"""Upper ends of the buckets of each histogram, in seconds; the last bucket, without end, is not named."""
TRIGGERS: Final = ("startup", "http", "timer", "api")
HOLDING: Final = ("reclaim", "restore", "update")
"""Operations that hold the engine at a safe point."""
OPERATIONS: Final = ("reclaim", "restore", "audit", "update")
RESULTS: Final = ("ok", "mismatch", "error")
_trigger: ContextVar[str] = ContextVar("memreclaim_trigger", default="api")

Key = tuple[str, ...]
"""Metric name, then its label values."""


@dataclass(frozen=True)
class Histogram:
    """How often a value fell in each bucket."""

    bounds: tuple[float, ...]
    counts: tuple[int, ...]
    """Per bucket, not cumulative; one more than ``bounds``."""
    total: float
    """Sum of the values."""

    @property
    def count(self) -> int:
        """How many values there were."""
        return sum(self.counts)

    @property
    def mean(self) -> float | None:
        """Mean value, None when there was none."""
        return self.total / self.count if self.count else None


@dataclass(frozen=True)
class Event:
    """One line of the log, for people who look at the status page."""

    time: float
    """Seconds since the epoch."""
    level: str
    event: str
    fields: Mapping[str, Any]

    def to_dict(self) -> dict[str, Any]:
        """JSON-ready."""
        return {"time": self.time, "level": self.level, "event": self.event, **self.fields}


@dataclass(frozen=True)
class Measured:
    """What the last reclaim of one component measured, and how much of it came back since."""

    freed: FreedBytes
    peak_extra_bytes: int | None


class Journal:
    """Thread-safe; an entry costs about 0.5 us, so it must not be written for every kernel launch."""

    def __init__(self) -> None:
        """Start empty."""
        self._lock = threading.Lock()
        self._counts: Counter[Key] = Counter()
        self._buckets: dict[Key, list[int]] = {}
        self._sums: dict[Key, float] = {}
        self._events: deque[Event] = deque(maxlen=EVENTS_KEPT)
        self._measured: dict[str, Measured] = {}
        self._pool: PoolChange | None = None
        self._running: Counter[str] = Counter()

    def add(self, metric: str, *labels: str, by: int = 1) -> None:
        """Count ``by`` more."""
        with self._lock:
            self._counts[metric, *labels] += by

    def observe(self, metric: str, value: float, *labels: str) -> None:
        """Note one value of a histogram that :data:`BOUNDS` names."""
        bounds, key = BOUNDS[metric], (metric, *labels)
        with self._lock:
            buckets = self._buckets.setdefault(key, [0] * (len(bounds) + 1))
            buckets[bisect_left(bounds, value)] += 1
            self._sums[key] = self._sums.get(key, 0.0) + value

    def note(self, level: str, event: str, fields: Mapping[str, Any]) -> None:
        """Keep one event; it is a listener of :mod:`memreclaim.events`."""
        with self._lock:
            self._events.append(Event(time.time(), level, event, dict(fields)))

    @contextmanager
    def proof(self) -> Iterator[None]:
        """Time the proof of one layer and count how it ended."""
        started, result = time.perf_counter(), "error"
        try:
            yield
            result = "exact"
        except NotExact:
            result = "mismatch"
            raise
        finally:
            self.add("proofs_total", result)
            self.observe("proof_duration_seconds", time.perf_counter() - started)

    @contextmanager
    def operation(self, name: str) -> Iterator[Outcome]:
        """Time an operation and count how it ended.

        ``name`` is one of :data:`OPERATIONS`; the block sets ``result`` when it ended badly and raised nothing.
        """
        outcome, started = Outcome(), time.perf_counter()
        with self._lock:
            self._running[name] += 1
        try:
            yield outcome
        except BaseException:
            outcome.result = "error"
            raise
        finally:
            with self._lock:
                self._running[name] -= 1
            labels = (name, _trigger.get(), outcome.result)
            self.add("operations_total", *labels)
            self.observe("operation_duration_seconds", time.perf_counter() - started, *labels)

    def measured(self, component: str, report: Report) -> None:
        """Keep the figures of a reclaim; a later one of the same component adds to what it freed before."""
        before = self._measured.get(component)
        freed = report.freed if before is None else _both(before.freed, report.freed)
        earlier = None if before is None else before.peak_extra_bytes
        peaks = [peak for peak in (report.peak_extra_bytes, earlier) if peak is not None]
        with self._lock:
            self._measured[component] = Measured(freed, max(peaks, default=None))
        if report.pool is not None:
            self.pool_changed(report.pool)

    def pool_changed(self, change: PoolChange) -> None:
        """Keep what a pool did; adapters of engines that size their pool after the reclaim call it themselves."""
        with self._lock:
            self._pool = change if self._pool is None else _since(self._pool, change)

    @property
    def running(self) -> str | None:
        """The operation that runs now: one that holds the engine, before an audit, which may run beside it."""
        with self._lock:
            return next((name for name in (*HOLDING, "audit") if self._running[name]), None)

    @property
    def pool(self) -> PoolChange | None:
        """Pool before the first reclaim against the last figure that is known."""
        return self._pool

    def measurements(self) -> dict[str, Measured]:
        """By component."""
        with self._lock:
            return dict(self._measured)

    def counts(self) -> dict[Key, int]:
        """All totals, a copy."""
        with self._lock:
            return dict(self._counts)

    def histograms(self) -> dict[Key, Histogram]:
        """All histograms, copies."""
        with self._lock:
            return {
                key: Histogram(BOUNDS[key[0]], tuple(buckets), self._sums[key])
                for key, buckets in self._buckets.items()
            }

    def events(self) -> tuple[Event, ...]:
        """The last events, oldest first."""
        with self._lock:
            return tuple(self._events)


@dataclass
class Outcome:
    """How an operation ended, when it raised nothing."""

    result: str = "ok"


@contextmanager
def triggered_by(trigger: str) -> Iterator[None]:
    """Operations inside the block count as started by ``trigger``, one of :data:`TRIGGERS`."""
    token = _trigger.set(trigger)
    try:
        yield
    finally:
        _trigger.reset(token)


def _both(one: FreedBytes, other: FreedBytes) -> FreedBytes:
    return type(one)(one.nominal + other.nominal, _sum(one.allocator, other.allocator), _sum(one.device, other.device))


def _sum(one: int | None, other: int | None) -> int | None:
    return None if one is None or other is None else one + other


def _since(first: PoolChange, last: PoolChange) -> PoolChange:
    return type(last)(
        first.tokens_before, last.tokens_after, last.bytes_per_token, last.limited_by, last.head_room_bytes
    )
