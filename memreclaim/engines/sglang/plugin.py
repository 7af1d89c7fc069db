"""The entry point ``sglang.srt.plugins``: called by the engine in each of its processes, early.

With ``MEMRECLAIM`` unset it returns at once: nothing is registered, and neither torch code of ours nor
prometheus_client is imported.
"""

from __future__ import annotations

import os


def register() -> None:
    """Register the hooks, if the operator switched memreclaim on.

    Never raises for a failure of ours: the engine then runs as it would without us, and one line says why. Under
    ``MEMRECLAIM_ON_MISMATCH=abort`` a failure ends the process with ``SystemExit``, since the engine swallows
    exceptions.
    """
    if is_wanted():
        from memreclaim.engines.sglang import activation

        activation.activate()


def is_wanted() -> bool:
    """Whether the environment switches memreclaim on, by its own variable or by an older name."""
    mode = os.environ.get("MEMRECLAIM")
    if mode is None:
        return os.environ.get("DSV41_WO_A_W8", "0").strip().lower() not in ("", "0", "off", "false")
    return mode != "off"
