"""SGLang: a general plug-in that swaps ``wo_a`` before the engine sizes its KV pool.

The engine loads it through the entry point ``sglang.srt.plugins`` (:mod:`memreclaim.engines.sglang.plugin`). Importing
this package imports neither torch nor the engine.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from memreclaim.engines.sglang.adapter import SGLangAdapter as ADAPTER  # noqa: N814  the registry's name for it
    from memreclaim.engines.sglang.diagnosis import diagnose

__all__ = ["ADAPTER", "diagnose"]


def __getattr__(name: str) -> object:
    """Import the adapter, which needs torch, when the registry asks for it."""
    if name == "ADAPTER":
        from memreclaim.engines.sglang.adapter import SGLangAdapter

        return SGLangAdapter
    if name == "diagnose":
        from memreclaim.engines.sglang.diagnosis import diagnose

        return diagnose
    message = f"module {__name__!r} has no attribute {name!r}"
    raise AttributeError(message)
