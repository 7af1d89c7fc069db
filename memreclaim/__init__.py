"""memreclaim: exact fp8 twins of bf16 weights, and the memory they free.

Names are looked up when they are first used, so that importing the package loads neither torch nor an engine.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from memreclaim._version import __version__
    from memreclaim.config import Settings
    from memreclaim.errors import (
        CheckpointError,
        ConfigError,
        EngineError,
        IntegrityError,
        MemreclaimError,
        NotExact,
        PoolError,
        SwapError,
        TagAccessError,
    )
    from memreclaim.kvpool import KVPool, PoolChange
    from memreclaim.proof import Mismatch, Proof, prove
    from memreclaim.reclaimer import Reclaimer
    from memreclaim.serve import grouped_projection
    from memreclaim.snapshot import FreedBytes, LayerReport, Report
    from memreclaim.states import Phase, Reason, State
    from memreclaim.tag import Tag
    from memreclaim.tagged import is_tag, twin_of
    from memreclaim.twin import Twin, build_twin

_HOMES = {
    "_version": ("__version__",),
    "config": ("Settings",),
    "errors": (
        "CheckpointError",
        "ConfigError",
        "EngineError",
        "IntegrityError",
        "MemreclaimError",
        "NotExact",
        "PoolError",
        "SwapError",
        "TagAccessError",
    ),
    "kvpool": ("KVPool", "PoolChange"),
    "proof": ("Mismatch", "Proof", "prove"),
    "reclaimer": ("Reclaimer",),
    "serve": ("grouped_projection",),
    "snapshot": ("FreedBytes", "LayerReport", "Report"),
    "states": ("Phase", "Reason", "State"),
    "tag": ("Tag",),
    "tagged": ("is_tag", "twin_of"),
    "twin": ("Twin", "build_twin"),
}
_HOME_OF = {name: home for home, names in _HOMES.items() for name in names}

__all__ = [
    "CheckpointError",
    "ConfigError",
    "EngineError",
    "FreedBytes",
    "IntegrityError",
    "KVPool",
    "LayerReport",
    "MemreclaimError",
    "Mismatch",
    "NotExact",
    "Phase",
    "PoolChange",
    "PoolError",
    "Proof",
    "Reason",
    "Reclaimer",
    "Report",
    "Settings",
    "State",
    "SwapError",
    "Tag",
    "TagAccessError",
    "Twin",
    "__version__",
    "build_twin",
    "grouped_projection",
    "is_tag",
    "prove",
    "twin_of",
]


def __getattr__(name: str) -> object:
    """Load a public name from its module on first use (PEP 562)."""
    home = _HOME_OF.get(name)
    if home is None:
        message = f"module {__name__!r} has no attribute {name!r}"
        raise AttributeError(message)
    value = getattr(import_module(f"{__name__}.{home}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    """Public names, loaded or not."""
    return sorted(__all__)
