"""What memreclaim says in the log of the process that it lives in.

It is a guest there: no ``structlog.configure()``, nothing on the root logger. Each event is one logfmt line in the
message of a record of the logger ``memreclaim``, with the same fields as a dict in ``record.memreclaim`` for a JSON
formatter. Event names are constant and in the past tense; byte and time fields carry their unit.
"""

from __future__ import annotations

import logging
from functools import cache
from typing import TYPE_CHECKING, Any, TypeAlias

from memreclaim.states import State

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, MutableMapping

    from memreclaim.ledger import Entry
    from memreclaim.snapshot import Report

LOGGER = "memreclaim"
Listener: TypeAlias = "Callable[[str, str, Mapping[str, Any]], None]"
_listeners: list[Listener] = []


def layer_reclaimed(entry: Entry) -> None:
    """A layer's twin serves."""
    emit("debug", "layer_reclaimed", **_layer(entry), state=entry.state.value)


def layer_kept(entry: Entry, detail: str) -> None:
    """A layer stays in bf16; a mismatch is a warning, other reasons are policy."""
    level = "warning" if entry.reason is not None and entry.reason.is_mismatch else "debug"
    more = {"detail": detail} if detail else {}
    reason = "" if entry.reason is None else entry.reason.value
    emit(level, "layer_kept", **_layer(entry), reason=reason, mismatched_elements=entry.mismatched, **more)


def pool_refused(operation: str, n_bytes: int, detail: str) -> None:
    """A pool would not grow or shrink."""
    emit("warning", "pool_refused", operation=operation, requested_bytes=n_bytes, detail=detail)


def kernels_unverified(detail: str) -> None:
    """Kernels could not be compared with the stock path, so calls decode the twin and run that."""
    emit("warning", "kernels_unverified", detail=detail)


def summary(operation: str, report: Report) -> None:
    """The one line that an operation leaves at INFO."""
    pool = report.pool
    gained = {} if pool is None else {"kv_tokens_gained": pool.tokens_gained, "limited_by": pool.limited_by}
    emit(
        "info",
        f"weights_{operation}",
        layers=len(report.layers),
        reclaimed=report.count(State.RECLAIMED),
        kept=report.count(State.KEPT),
        gross_bytes=report.gross_bytes,
        twin_bytes=report.twin_bytes,
        net_bytes=report.net_bytes,
        **gained,
        duration_s=round(report.seconds, 3),
    )


def _layer(entry: Entry) -> dict[str, Any]:
    return {"layer": entry.name, "component": entry.component}


def listen(listener: Listener) -> Callable[[], None]:
    """Hand every event to ``listener(level, event, fields)`` too, at any level of the host; returns how to stop."""
    _listeners.append(listener)
    return lambda: _listeners.remove(listener)


def emit(level: str, event: str, **fields: Any) -> None:
    """Log one event: a constant name in the past tense, units in the keys (``freed_bytes``, ``duration_s``)."""
    for listener in tuple(_listeners):
        listener(level, event, fields)
    if logging.getLogger(LOGGER).isEnabledFor(getattr(logging, level.upper())):
        getattr(_logger(), level)(event, **fields)


@cache
def _logger() -> Any:
    import structlog

    return structlog.wrap_logger(logging.getLogger(LOGGER), processors=[_render], wrapper_class=structlog.BoundLogger)


def _render(_logger: object, _method: str, event: MutableMapping[str, Any]) -> tuple[tuple[str], dict[str, Any]]:
    """Last processor: message and keyword arguments of the stdlib call."""
    name = event.pop("event")
    line = " ".join([name, *(f"{key}={_quoted(value)}" for key, value in event.items())])
    return (line,), {"extra": {"memreclaim": {"event": name, **event}}}


def _quoted(value: object) -> str:
    text = str(value)
    return f'"{text}"' if " " in text or "=" in text else text
