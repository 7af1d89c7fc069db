"""One rank as it was at one moment: a frozen, versioned snapshot, taken by :class:`memreclaim.rank.Rank`."""

from __future__ import annotations

import platform
from dataclasses import asdict, dataclass, field
from enum import StrEnum
from importlib import metadata
from typing import TYPE_CHECKING, Any

import torch

from memreclaim._version import __version__

if TYPE_CHECKING:
    from collections.abc import Mapping

    from memreclaim.figures import MemoryFigure
    from memreclaim.journal import Event, Histogram, Key
    from memreclaim.snapshot import FreedBytes, LayerReport

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
