"""Starting an operation on all ranks or on none.

First every rank is reserved; if one refuses or does not answer, those that were reserved are released and nothing has
happened. Then every rank is told to start, with the same idempotency key, so that a lost answer can be asked for
again.
"""

from __future__ import annotations

import secrets
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from memreclaim import events
from memreclaim.errors import MemreclaimError
from memreclaim.service.client import UnreachableError

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from memreclaim.service.client import Answer, Client

_ACCEPTED = 202
_RESERVED = 201
_OK = 200


class RefusedError(MemreclaimError, RuntimeError):
    """A rank would not take part; nothing was started anywhere."""


@dataclass
class Fanned:
    """One operation on all ranks."""

    id: str
    kind: str
    operations: dict[str, str] = field(default_factory=dict)
    """Each rank's own operation, by its URL."""
    failed: dict[str, str] = field(default_factory=dict)
    """Ranks that were reserved and then did not start."""


class Fanout:
    """Talks to the ranks at ``urls``."""

    def __init__(self, urls: Sequence[str], client: Client) -> None:
        """Reach ranks through ``client``."""
        self._urls, self._client = tuple(urls), client

    def start(self, kind: str) -> Fanned:
        """Start ``kind`` everywhere. Raises :class:`RefusedError`, with what each rank said, when not all can."""
        reservations, refusals = self._split(self._reserve, _RESERVED)
        if refusals:
            held = {url: answer.body["reservation"] for url, answer in reservations.items()}
            self._each(lambda url: self._release(url, held[url]), list(held))
            raise RefusedError("; ".join(f"{url}: {why}" for url, why in refusals.items()))
        fanned = Fanned(secrets.token_urlsafe(9), kind)
        held = {url: answer.body["reservation"] for url, answer in reservations.items()}
        started, fanned.failed = self._split(lambda url: self._submit(url, kind, held[url], fanned.id), _ACCEPTED)
        fanned.operations = {url: answer.body["id"] for url, answer in started.items()}
        if fanned.failed:
            events.emit("error", "ranks_not_started", operation=kind, ranks=", ".join(fanned.failed))
        return fanned

    def state(self, fanned: Fanned) -> dict[str, Any]:
        """How an operation is getting on everywhere, as JSON."""
        answers, lost = self._split(lambda url: self._look(url, fanned), _OK, list(fanned.operations))
        ranks = {url: answer.body for url, answer in answers.items()}
        ranks |= {url: {"status": "failed", "error": why} for url, why in {**lost, **fanned.failed}.items()}
        found = {rank["status"] for rank in ranks.values()}
        status = next((word for word in ("running", "queued", "failed", "done") if word in found), "failed")
        return {"id": fanned.id, "kind": fanned.kind, "status": status, "ranks": ranks}

    def _reserve(self, url: str) -> Answer:
        return self._client.call("POST", url, "/v1/reservations", {})

    def _release(self, url: str, reservation: str) -> Answer:
        return self._client.call("DELETE", url, "/v1/reservations", headers={"X-Reservation": reservation})

    def _submit(self, url: str, kind: str, reservation: str, key: str) -> Answer:
        body, headers = {"reservation": reservation}, {"Idempotency-Key": key}
        try:
            return self._client.call("POST", url, f"/v1/{kind}", body, headers)
        except UnreachableError:  # the answer may have been lost, not the request
            return self._client.call("POST", url, f"/v1/{kind}", body, headers)

    def _look(self, url: str, fanned: Fanned) -> Answer:
        return self._client.get(url, f"/v1/operations/{fanned.operations[url]}")

    def _split(
        self, ask: Callable[[str], Answer], wanted: int, urls: Sequence[str] | None = None
    ) -> tuple[dict[str, Answer], dict[str, str]]:
        """Answers with the code that is wanted, and what the other ranks said."""
        good, bad = {}, {}
        for url, outcome in self._each(ask, self._urls if urls is None else urls).items():
            if isinstance(outcome, UnreachableError):
                bad[url] = str(outcome)
            elif outcome.code == wanted:
                good[url] = outcome
            else:
                bad[url] = outcome.error
        return good, bad

    def _each(self, ask: Callable[[str], Answer], urls: Sequence[str]) -> dict[str, Answer | UnreachableError]:
        def one(url: str) -> Answer | UnreachableError:
            try:
                return ask(url)
            except UnreachableError as error:
                return error

        if not urls:
            return {}
        with ThreadPoolExecutor(min(32, len(urls))) as pool:
            return dict(zip(urls, pool.map(one, urls), strict=True))
