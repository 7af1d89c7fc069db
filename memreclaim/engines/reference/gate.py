"""Steps and safe points take turns."""

from __future__ import annotations

import threading
from contextlib import contextmanager
from typing import TYPE_CHECKING

from memreclaim.errors import EngineError

if TYPE_CHECKING:
    from collections.abc import Iterator


class Gate:
    """Mutual exclusion in which safe points go before the next step.

    A plain lock would do the exclusion, but the stepping thread takes it again at once: whoever waits for a safe point
    could wait for as long as there is work.
    """

    def __init__(self) -> None:
        """Start with nobody inside."""
        self._changed = threading.Condition()
        self._holder: int | None = None
        self._waiting = 0

    @contextmanager
    def step(self) -> Iterator[None]:
        """Wait for safe points, those that are asked for included, then run one step."""
        with self._changed:
            self._changed.wait_for(lambda: self._holder is None and self._waiting == 0)
            self._holder = threading.get_ident()
        try:
            yield
        finally:
            self._leave()

    @contextmanager
    def safe_point(self) -> Iterator[None]:
        """Wait for the step that runs, then keep the next one out.

        Raises :class:`EngineError` from inside a step or another safe point of the same thread, which could never end.
        """
        with self._changed:
            if self._holder == threading.get_ident():
                message = "a safe point was asked for from inside a step or a safe point"
                raise EngineError(message)
            self._waiting += 1
            try:
                self._changed.wait_for(lambda: self._holder is None)
                self._holder = threading.get_ident()
            finally:
                self._waiting -= 1
        try:
            yield
        finally:
            self._leave()

    def _leave(self) -> None:
        with self._changed:
            self._holder = None
            self._changed.notify_all()
