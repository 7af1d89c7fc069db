"""One rank as it is now: a frozen, versioned snapshot, and the object that takes it.

Metrics, HTTP, the command line and the status page all show the same snapshot, so they can never disagree. Taking one
reads the ledger, the journal and a few memory figures; it starts no kernel and touches no weight.
"""

from __future__ import annotations

import platform
import threading
import time
from dataclasses import asdict, dataclass, field
from enum import StrEnum
from importlib import metadata
from itertools import count
from typing import TYPE_CHECKING, Any

import torch

from memreclaim import counters, events, figures
from memreclaim._version import __version__
from memreclaim.config import Mode
from memreclaim.journal import HOLDING
from memreclaim.snapshot import FreedBytes, LayerReport
from memreclaim.states import State

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from memreclaim.figures import MemoryFigure
    from memreclaim.journal import Event, Histogram, Journal, Key
    from memreclaim.kvpool import KVPool
    from memreclaim.reclaimer import Reclaimer

SCHEMA_VERSION = 1


class RankState(StrEnum):
    """What a rank is doing, for readiness and for the state timeline."""

    OFF = "off"
    """memreclaim is switched off; the engine serves as it always did."""
    STARTING = "starting"
    """Not yet reclaimed."""
    WORKING = "working"
    """An operation holds the engine at a safe point."""
    READY = "ready"
    DEGRADED = "degraded"
    """Serving right answers with less memory: a layer without an exact twin stays in bf16."""
    FAILED = "failed"
    """A served twin changed and could not be rebuilt, or the first reclaim failed: this rank must not serve."""


@dataclass(frozen=True)
class Identity:
    """Labels that every series of a rank carries, named as SGLang names them, so that dashboards can join."""

    model_name: str = "unknown"
    engine_type: str = "unified"
    tp_rank: int = 0
    pp_rank: int = 0
    dp_rank: int = 0
    moe_ep_rank: int = 0

    def labels(self) -> dict[str, str]:
        """Label names and values."""
        return {name: str(value) for name, value in asdict(self).items()}

    @property
    def first(self) -> bool:
        """Whether this is the rank that speaks for the engine where only one should."""
        return not (self.tp_rank or self.pp_rank or self.dp_rank or self.moe_ep_rank)


@dataclass(frozen=True)
class Build:
    """What runs here."""

    version: str
    torch_version: str
    triton_version: str
    device_name: str
    compute_capability: str
    """``9.0`` on an H200, ``none`` without a GPU."""

    @classmethod
    def here(cls, device: torch.device) -> Build:
        """Read it from this process; asks the GPU only when torch uses one already."""
        name, capability = platform.processor() or platform.machine(), "none"
        if device.type == "cuda" and torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
            name = torch.cuda.get_device_name(device)
            capability = ".".join(map(str, torch.cuda.get_device_capability(device)))
        try:
            triton = metadata.version("triton")
        except metadata.PackageNotFoundError:
            triton = "none"
        return cls(__version__, torch.__version__, triton, name, capability)


@dataclass(frozen=True)
class PoolFigures:
    """The KV pool now."""

    n_bytes: Mapping[str, int]
    tokens: int
    gained_tokens: int
    limited_by: str
    bytes_per_token: float
    head_room_bytes: int

    def to_dict(self) -> dict[str, Any]:
        """JSON-ready."""
        fields = {name: value for name, value in vars(self).items() if name != "n_bytes"}
        return {"bytes": dict(self.n_bytes), **fields}


@dataclass(frozen=True)
class AuditFigures:
    """The periodic comparison of twins with their fingerprints."""

    interval_seconds: float = 0.0
    """0 when it is off."""
    last_timestamp: float = 0.0
    """When every twin was last known to be whole, seconds since the epoch; 0 before there was a twin."""
    damaged: Mapping[str, int] = field(default_factory=dict)
    """Elements known to differ, at least, by layer: ``component/name``."""


@dataclass(frozen=True)
class Baselines:
    """Seconds of one call by ``(path, rows)``, path ``stock`` or ``twin``, measured before the weights were dropped."""

    seconds: Mapping[tuple[str, str], float] = field(default_factory=dict)


@dataclass(frozen=True)
class RankSnapshot:
    """Everything that is shown of a rank, as it was at one moment."""

    version: int
    """Counts up with every snapshot of the same rank."""
    taken_at: float
    identity: Identity
    build: Build
    mode: str
    numerics: str
    state: RankState
    ranks: int
    """Ranks that the engine runs."""
    layers: tuple[LayerReport, ...]
    freed: FreedBytes
    """The gross bytes that are free now, three ways."""
    peak_extra_bytes: int | None
    pool: PoolFigures | None
    memory: tuple[MemoryFigure, ...]
    audit: AuditFigures
    baselines: Baselines
    counts: Mapping[Key, int]
    histograms: Mapping[Key, Histogram]
    running: str | None
    events: tuple[Event, ...]

    @property
    def ready(self) -> bool:
        """Whether the rank gives right answers."""
        return self.state not in (RankState.STARTING, RankState.FAILED)

    def totals(self) -> dict[str, tuple[int, int, int]]:
        """Gross, twin and net bytes by component."""
        sums: dict[str, list[int]] = {}
        for layer in self.layers:
            total = sums.setdefault(layer.component, [0, 0])
            total[0] += layer.gross_bytes
            total[1] += layer.twin_bytes
        return {name: (gross, twin, gross - twin) for name, (gross, twin) in sums.items()}

    def damage(self, layer: LayerReport) -> int:
        """Elements of a served twin that are known to have changed, at least."""
        return self.audit.damaged.get(f"{layer.component}/{layer.name}", 0)

    def mismatched(self, layer: LayerReport) -> int:
        """Elements of a layer whose bits differ: of the weight when it is kept, of the twin when it is served.

        At least 1 for a weight that holds a NaN or an infinity.
        """
        least = 1 if layer.is_mismatch else 0
        return max(layer.mismatched_elements, least, self.damage(layer))

    def total(self, metric: str, *labels: str) -> int:
        """Sum of a counter over everything that starts with ``labels``."""
        key = (metric, *labels)
        return sum(value for found, value in self.counts.items() if found[: len(key)] == key)


class Rank:
    """Takes snapshots of one rank; thread-safe."""

    def __init__(
        self,
        reclaimer: Reclaimer,
        identity: Identity | None = None,
        *,
        device: torch.device | str = "cpu",
        ranks: int = 1,
        pool: Callable[[], KVPool | None] | None = None,
    ) -> None:
        """Look at ``reclaimer``; ``pool`` is asked for the live pool each time (default: the reclaimer's own)."""
        self.reclaimer = reclaimer
        self.identity = identity or Identity()
        self.ranks = ranks
        self.device = torch.device(device)
        self.started = False
        """Set once the first reclaim was tried."""
        self.failure: str | None = None
        """Why this rank must not serve."""
        self.audit = AuditFigures()
        self.baselines = Baselines()
        self._pool = pool or (lambda: reclaimer.pool)
        self._versions = count(1)
        self._build = Build.here(self.device)
        self._lock = threading.Lock()
        self._stop_listening: Callable[[], None] | None = events.listen(self.journal.note)

    @property
    def journal(self) -> Journal:
        """What happened here."""
        return self.reclaimer.journal

    def close(self) -> None:
        """Stop listening to events; snapshots can still be taken."""
        with self._lock:
            if self._stop_listening is not None:
                self._stop_listening()
                self._stop_listening = None

    def snapshot(self) -> RankSnapshot:
        """The rank as it is now."""
        journal, settings = self.journal, self.reclaimer.settings
        layers = self.reclaimer.ledger.layers()
        audit = self.audit
        freed, peak = self._freed(layers)
        return RankSnapshot(
            version=next(self._versions),
            taken_at=time.time(),
            identity=self.identity,
            build=self._build,
            mode=settings.mode.value,
            numerics=settings.numerics.value,
            state=self._state(layers, audit),
            ranks=self.ranks,
            layers=layers,
            freed=freed,
            peak_extra_bytes=peak,
            pool=self._pool_figures(),
            memory=figures.memory(self.device),
            audit=audit,
            baselines=self.baselines,
            counts=journal.counts() | _tallies(),
            histograms=journal.histograms(),
            running=journal.running,
            events=journal.events(),
        )

    def _state(self, layers: tuple[LayerReport, ...], audit: AuditFigures) -> RankState:
        if self.failure is not None or audit.damaged:
            return RankState.FAILED
        if self.reclaimer.settings.mode is Mode.OFF:
            return RankState.OFF
        running = self.journal.running
        if not self.started and (running is not None or not layers):
            return RankState.STARTING
        if running in HOLDING:
            return RankState.WORKING
        return RankState.DEGRADED if any(layer.is_mismatch for layer in layers) else RankState.READY

    def _freed(self, layers: tuple[LayerReport, ...]) -> tuple[FreedBytes, int | None]:
        """What was measured when it was freed, less what came back since."""
        live = sum(layer.gross_bytes for layer in layers if layer.state is State.RECLAIMED)
        found = tuple(self.journal.measurements().values())
        returned = max(0, sum(one.freed.nominal for one in found) - live)

        def left(measured: list[int | None]) -> int | None:
            known = [one for one in measured if one is not None]
            return max(0, sum(known) - returned) if known and len(known) == len(measured) else None

        freed = FreedBytes(
            live, left([one.freed.allocator for one in found]), left([one.freed.device for one in found])
        )
        peaks = [one.peak_extra_bytes for one in found if one.peak_extra_bytes is not None]
        return freed, max(peaks, default=None)

    def _pool_figures(self) -> PoolFigures | None:
        pool, change = self._pool(), self.journal.pool
        if pool is None:
            return None
        tokens = pool.capacity_tokens
        return PoolFigures(
            n_bytes=figures.pool_bytes(pool),
            tokens=tokens,
            gained_tokens=0 if change is None else tokens - change.tokens_before,
            limited_by=pool.limited_by,
            bytes_per_token=pool.bytes_per_token,
            head_room_bytes=0 if change is None else change.head_room_bytes,
        )


def _tallies() -> dict[Key, int]:
    """What is counted where tags are read and projections are routed, under the names of metrics."""
    tallies = {
        "calls_total": counters.calls,
        "materializations_total": counters.materializations,
        "tag_refusals_total": counters.refusals,
    }
    return {(name, *key): n for name, tally in tallies.items() for key, n in tally.snapshot().items()}
