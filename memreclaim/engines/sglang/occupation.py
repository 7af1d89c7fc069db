"""Pausing and resuming the engine's memory.

A pause releases the pages under the weights' region, twins included, and what is there after a resume is undefined
unless the engine backs it up. So each twin is copied to the host before, and after the resume, before any call, its
bytes are compared with their fingerprint and put back where they differ, at the same address. Bytes that cannot be put
right fail the resume. In between nothing of the service reads a twin: audit and probe are held off,
and operations that were asked for wait.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from memreclaim import events
from memreclaim.engines.sglang.session import session, twins_of
from memreclaim.errors import IntegrityError
from memreclaim.fingerprint import Fingerprint, fingerprint
from memreclaim.twin import Twin

if TYPE_CHECKING:
    from collections.abc import Callable

_WEIGHTS = "weights"
_saved: list[Saved] = []


class Saved:
    """A twin's bytes on the host, and what they must be."""

    def __init__(self, layer: str, twin: Twin) -> None:
        """Copy a twin that serves; 8.4 MB for two groups."""
        self.layer = layer
        self._twin = twin
        self._copy = Twin(twin.packed.cpu().clone(), twin.exponents.cpu().clone())
        self._was: Fingerprint = fingerprint(twin)

    def is_whole(self) -> bool:
        """Whether the twin's bytes on the device are what they were."""
        return fingerprint(self._twin) == self._was

    def put_back(self) -> None:
        """Write the saved bytes where the twin is, which graphs may hold."""
        self._twin.overwrite(self._copy)


def around_release(stock: Callable[..., Any], manager: Any, recv_req: Any, *args: Any, **kwargs: Any) -> Any:  # noqa: ANN401
    """AROUND hook of ``release_memory_occupation``."""
    here = session()
    if not _concerns_weights(recv_req) or here.paused:
        return stock(manager, recv_req, *args, **kwargs)
    for adapter in here.adapters:
        _saved.extend(Saved(name, twin) for name, twin in twins_of(adapter.models()[0].root).items())
    here.pause.enter_context(here.quiet())
    here.paused = True
    try:
        return stock(manager, recv_req, *args, **kwargs)
    except AssertionError:
        # The engine refuses by assertions that all stand before its pause: the memory is there, and what was saved
        # would be put back over the weights of later updates.
        _saved.clear()
        _awake()
        raise


def _awake() -> None:
    here = session()
    here.paused = False
    here.pause.close()


def around_resume(stock: Callable[..., Any], manager: Any, recv_req: Any, *args: Any, **kwargs: Any) -> Any:  # noqa: ANN401
    """AROUND hook of ``resume_memory_occupation``. Raises :class:`IntegrityError` for bytes that are lost."""
    result = stock(manager, recv_req, *args, **kwargs)
    if _concerns_weights(recv_req):
        try:
            audit()
        finally:
            _awake()
    return result


def audit() -> None:
    """Compare every saved twin with its fingerprint, and put back what differs."""
    damaged = [one for one in _saved if not one.is_whole()]
    for one in damaged:
        one.put_back()
    lost = [one.layer for one in damaged if not one.is_whole()]
    checked = len(_saved)
    _saved.clear()
    if lost:
        message = f"twins of {', '.join(lost)} did not survive the pause"
        raise IntegrityError(message)
    if checked:
        events.emit("info", "twins_audited", layers=checked, rebuilt=len(damaged))


def _concerns_weights(recv_req: Any) -> bool:  # noqa: ANN401
    tags = getattr(recv_req, "tags", None)
    return not tags or _WEIGHTS in tags
