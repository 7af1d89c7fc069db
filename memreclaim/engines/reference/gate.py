"""Steps and safe points take turns."""

from __future__ import annotations

import threading
from collections import deque
from contextlib import contextmanager
from typing import TYPE_CHECKING

from memreclaim.errors import EngineError

if TYPE_CHECKING:
    from collections.abc import Iterator


class Gate:
    """Mutual exclusion in order of arrival.

    A plain lock would do the exclusion, but a thread that steps without a pause takes it again at once: whoever waits
    for a safe point could wait for as long as there is work, and the other way round.
    """

    def __init__(self) -> None:
        """Start with nobody inside."""
        self._changed = threading.Condition()
        self._queue: deque[int] = deque()
        """Threads in order of arrival; the first one is inside."""

    @contextmanager
    def turn(self) -> Iterator[None]:
        """Wait for everybody who came before, and keep out who comes after until the block ends.

        Raises :class:`EngineError` when the thread is inside already: it would wait for itself.
        """
        me = threading.get_ident()
        with self._changed:
            if me in self._queue:
                message = "a step or a safe point was asked for from inside a step or a safe point"
                raise EngineError(message)
            self._queue.append(me)
        try:
            with self._changed:
                self._changed.wait_for(lambda: self._queue[0] == me)
            yield
        finally:
            with self._changed:
                self._queue.remove(me)
                self._changed.notify_all()
