"""The desk: HTTP threads leave work here, the engine's thread takes it at a safe point.

One operation at a time. A caller may reserve the desk first, so that a head node starts something on all ranks or on
none; a reservation lapses by itself when its holder is gone.
"""

from __future__ import annotations

import secrets
import threading
import time
from collections import OrderedDict
from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING, Any, Final

from memreclaim import events
from memreclaim.errors import MemreclaimError
from memreclaim.journal import triggered_by

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from memreclaim.journal import Journal

RESERVATION_SECONDS: Final = 10.0
"""Long enough for a head node to reach every rank (its own time-out is 3 s), short enough not to be missed."""
REMEMBERED: Final = 32
"""Finished operations, and idempotency keys, that can still be asked for."""


class Status(StrEnum):
    """Where an operation is."""

    QUEUED = "queued"
    RUNNING = "running"
    DONE = "done"
    FAILED = "failed"


class BusyError(MemreclaimError, RuntimeError):
    """Another operation, or somebody's reservation, holds the desk."""


class UnknownReservationError(MemreclaimError, LookupError):
    """The reservation lapsed, or never was."""


@dataclass
class Operation:
    """One piece of work."""

    id: str
    kind: str
    status: Status = Status.QUEUED
    created: float = 0.0
    started: float | None = None
    finished: float | None = None
    result: dict[str, Any] | None = None
    error: str | None = None

    def to_dict(self) -> dict[str, Any]:
        """JSON-ready."""
        return {**vars(self), "status": self.status.value}


class Desk:
    """Thread-safe."""

    def __init__(self, handlers: Mapping[str, Callable[[], dict[str, Any]]], journal: Journal) -> None:
        """``handlers`` do the work, by kind, and return what it came to."""
        self._handlers, self._journal = handlers, journal
        self._changed = threading.Condition()
        self._operations: OrderedDict[str, Operation] = OrderedDict()
        self._keys: OrderedDict[str, str] = OrderedDict()
        self._queued: Operation | None = None
        self._reserved: tuple[str, float] | None = None
        self._closed = False
        self.finished = 0
        """How many operations have ended: what was seen before may have changed."""

    @property
    def pending(self) -> bool:
        """Whether :meth:`poll` would find work; one attribute read, cheap enough for every step of an engine."""
        return self._queued is not None

    @property
    def kinds(self) -> tuple[str, ...]:
        """What can be asked for."""
        return tuple(self._handlers)

    def reserve(self) -> str:
        """Keep others away for :data:`RESERVATION_SECONDS`. Raises :class:`BusyError`."""
        with self._changed:
            self._refuse_if_busy(None)
            self._reserved = (secrets.token_urlsafe(12), time.monotonic() + RESERVATION_SECONDS)
            return self._reserved[0]

    def release(self, reservation: str) -> None:
        """Give a reservation back. Raises :class:`UnknownReservationError`."""
        with self._changed:
            self._check(reservation)
            self._reserved = None

    def submit(self, kind: str, *, key: str | None = None, reservation: str | None = None) -> Operation:
        """Queue an operation; the same idempotency ``key`` gives the same operation again.

        Raises :class:`BusyError` while another one waits or runs, or the desk is reserved by somebody else, and
        :class:`UnknownReservationError` for a reservation that lapsed.
        """
        with self._changed:
            known = self._keys.get(f"{kind}:{key}") if key else None
            if known is not None and known in self._operations:
                return self._operations[known]
            if reservation is not None:
                self._check(reservation)
            self._refuse_if_busy(reservation)
            operation = Operation(secrets.token_urlsafe(9), kind, created=time.time())
            self._reserved = None
            self._remember(operation, key)
            self._queued = operation
            self._changed.notify_all()
            return operation

    def find(self, identifier: str) -> Operation | None:
        """An operation that is not forgotten yet."""
        with self._changed:
            return self._operations.get(identifier)

    def wait(self, timeout: float) -> bool:
        """Sleep until there is work, at most ``timeout`` seconds; for threads that have nothing else to do."""
        with self._changed:
            self._changed.wait_for(lambda: self.pending or self._closed, timeout)
            return self.pending

    def close(self) -> None:
        """End every :meth:`wait`, at shutdown."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()

    def poll(self, trigger: str = "http") -> Operation | None:
        """Run the operation that waits, in this thread; to be called at a safe point. Never raises for what it runs."""
        with self._changed:
            operation, self._queued = self._queued, None
            if operation is None:
                return None
            operation.status, operation.started = Status.RUNNING, time.time()
        result, error = None, None
        try:
            with triggered_by(trigger):
                result = self._handlers[operation.kind]()
        except Exception as caught:  # noqa: BLE001 - kept in the operation, counted and logged; the engine goes on
            error = f"{type(caught).__name__}: {caught}"
            self._journal.add("internal_errors_total", "operation")
            events.emit("error", "operation_failed", operation=operation.kind, id=operation.id, error=error)
        with self._changed:
            operation.result, operation.error, operation.finished = result, error, time.time()
            operation.status = Status.DONE if error is None else Status.FAILED
            self.finished += 1
            self._changed.notify_all()
        return operation

    def _refuse_if_busy(self, reservation: str | None) -> None:
        for operation in self._operations.values():
            if operation.status in (Status.QUEUED, Status.RUNNING):
                message = f"{operation.kind} {operation.id} is {operation.status.value}"
                raise BusyError(message)
        held = self._reserved
        if held is not None and held[1] > time.monotonic() and held[0] != reservation:
            message = "somebody else has reserved this rank"
            raise BusyError(message)

    def _check(self, reservation: str) -> None:
        held = self._reserved
        if held is None or held[0] != reservation or held[1] <= time.monotonic():
            message = "there is no such reservation; they lapse after a few seconds"
            raise UnknownReservationError(message)

    def _remember(self, operation: Operation, key: str | None) -> None:
        self._operations[operation.id] = operation
        if key:
            self._keys[f"{operation.kind}:{key}"] = operation.id
        for known in (self._operations, self._keys):
            while len(known) > REMEMBERED:
                known.popitem(last=False)
