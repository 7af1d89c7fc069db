"""Frozen views of what memreclaim did: the one thing that metrics, HTTP, CLI and reports read.

``gross``, ``twin`` and ``net`` overlap (net = gross - twin) and must not be added. ``freed`` gives the same gross in
three measures; they are alternatives as well.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from memreclaim.kvpool import PoolChange
    from memreclaim.proof import Mismatch
    from memreclaim.states import Reason, State

SCHEMA_VERSION = 1


@dataclass(frozen=True)
class LayerReport:
    """One layer as it is now."""

    name: str
    component: str
    """Which model it belongs to: ``target`` or ``draft``."""
    state: State
    reason: Reason | None
    """Why it is kept, or why it is restored; None while it is reclaimed."""
    weight_bytes: int
    """Size of the bf16 weight."""
    gross_bytes: int
    """bf16 bytes released now."""
    twin_bytes: int
    """Bytes that its twin costs now."""
    mismatched_elements: int = 0
    first_mismatch: Mismatch | None = None

    @property
    def is_mismatch(self) -> bool:
        """Whether it is kept because of the weight's values."""
        return self.reason is not None and self.reason.is_mismatch

    def to_dict(self) -> dict[str, Any]:
        """JSON-ready."""
        first = self.first_mismatch
        return {
            "name": self.name,
            "component": self.component,
            "state": self.state.value,
            "reason": self.reason.value if self.reason else None,
            "weight_bytes": self.weight_bytes,
            "gross_bytes": self.gross_bytes,
            "twin_bytes": self.twin_bytes,
            "mismatched_elements": self.mismatched_elements,
            "first_mismatch": None
            if first is None
            else {
                "coordinate": list(first),
                "weight_bits": f"0x{first.expected_bits:04x}",
                "twin_bits": f"0x{first.actual_bits:04x}",
            },
        }


@dataclass(frozen=True)
class FreedBytes:
    """The gross bytes released, three ways; None where it could not be measured."""

    nominal: int
    """From shapes."""
    allocator: int | None
    """From the allocator's count (CPU: the process's anonymous memory), with the twins added back."""
    device: int | None
    """From what the driver reports free, with the twins added back."""

    @property
    def least(self) -> int:
        """The smallest of the measures that there are: what may be claimed."""
        return min(figure for figure in (self.nominal, self.allocator, self.device) if figure is not None)


@dataclass(frozen=True)
class Report:
    """What one reclaim or restore came to."""

    layers: tuple[LayerReport, ...]
    freed: FreedBytes
    peak_extra_bytes: int | None
    """Most memory above the starting point while it ran; None where it could not be measured."""
    pool: PoolChange | None
    seconds: float

    @property
    def gross_bytes(self) -> int:
        """bf16 bytes released."""
        return sum(layer.gross_bytes for layer in self.layers)

    @property
    def twin_bytes(self) -> int:
        """Bytes that twins cost."""
        return sum(layer.twin_bytes for layer in self.layers)

    @property
    def net_bytes(self) -> int:
        """Bytes gained: gross minus twin."""
        return self.gross_bytes - self.twin_bytes

    @property
    def mismatched(self) -> bool:
        """Whether a layer has no exact twin."""
        return any(layer.is_mismatch for layer in self.layers)

    def count(self, state: State) -> int:
        """How many layers are in ``state``."""
        return sum(layer.state is state for layer in self.layers)

    def to_dict(self) -> dict[str, Any]:
        """JSON-ready, bytes as integers."""
        pool = self.pool
        return {
            "schema_version": SCHEMA_VERSION,
            "layers": [layer.to_dict() for layer in self.layers],
            "gross_bytes": self.gross_bytes,
            "twin_bytes": self.twin_bytes,
            "net_bytes": self.net_bytes,
            "freed_bytes": {
                "nominal": self.freed.nominal,
                "allocator": self.freed.allocator,
                "device": self.freed.device,
            },
            "peak_extra_bytes": self.peak_extra_bytes,
            "kv_pool": None
            if pool is None
            else {
                "tokens_before": pool.tokens_before,
                "tokens_after": pool.tokens_after,
                "tokens_gained": pool.tokens_gained,
                "bytes_per_token": pool.bytes_per_token,
                "limited_by": pool.limited_by,
                "head_room_bytes": pool.head_room_bytes,
            },
            "seconds": self.seconds,
        }
