"""Switching the feature on in one process of the engine: settings, the engine's version, then the hooks."""

from __future__ import annotations

import os
import sys

from memreclaim import events
from memreclaim.config import Mode, OnMismatch, Settings
from memreclaim.engines.sglang import hooks, lines
from memreclaim.errors import ConfigError

_WITHOUT_WEIGHTS = frozenset(
    {
        "sglang.srt.entrypoints.engine",
        "sglang.srt.managers.detokenizer_manager",
        "sglang.srt.managers.data_parallel_controller",
    }
)
"""Callers of ``load_plugins`` in processes that hold no weights. Hooking the models there would import them: 7 s."""


def activate() -> None:
    """See :func:`memreclaim.engines.sglang.plugin.register`."""
    try:
        settings = Settings.from_env()
    except ConfigError as error:
        _stay_off(str(error), abort=os.environ.get("MEMRECLAIM_ON_MISMATCH") == OnMismatch.ABORT.value)
        return
    if settings.mode is Mode.OFF:
        return
    abort = settings.on_mismatch is OnMismatch.ABORT
    try:
        line = lines.installed()
        if not line.supported:
            _stay_off("; ".join(line.problems), abort=abort)
            return
        _hook(line, settings)
    except Exception as error:  # noqa: BLE001  the engine must start whatever we ran into
        _stay_off(f"{type(error).__name__}: {error}", abort=abort)


def _hook(line: lines.Line, settings: Settings) -> None:
    from memreclaim.engines.sglang import session

    session.configure(line, settings)
    wanted = hooks.of_line(line.name)
    if not hooks.has_framework():
        from memreclaim.engines.sglang import direct

        direct.install(wanted)
    elif _is_without_weights():
        # Should this process load a model after all, the rest follows then.
        hooks.register(hook for hook in wanted if hook.target == hooks.LOAD)
    else:
        hooks.register(wanted)


def _is_without_weights() -> bool:
    frame = sys._getframe()
    while frame is not None:
        if frame.f_globals.get("__name__") in _WITHOUT_WEIGHTS:
            return True
        frame = frame.f_back  # type: ignore[assignment]
    return False


def _stay_off(why: str, *, abort: bool) -> None:
    events.emit("warning", "engine_unsupported", engine="sglang", detail=f"memreclaim is off: {why}")
    if abort:
        message = f"memreclaim: {why}"
        raise SystemExit(message)
