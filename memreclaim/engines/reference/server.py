"""Continuous batching: requests come and go between steps, each step is one phase over all that are ready for it."""

from __future__ import annotations

import threading
from collections import Counter, deque
from contextlib import contextmanager
from itertools import accumulate, islice, takewhile
from typing import TYPE_CHECKING, Self

import torch

from memreclaim.engines.reference.batch import Batch, Segment
from memreclaim.engines.reference.gate import Gate
from memreclaim.engines.reference.request import Request
from memreclaim.engines.reference.speculation import accepted, proposals
from memreclaim.errors import ConfigError, EngineError, PoolError
from memreclaim.states import Phase

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from memreclaim.engines.reference.model import ReferenceModel
    from memreclaim.engines.reference.pool import PagedPool

PREFILL_ROWS = 512
"""Prompt rows of several requests that go into one step; a longer prompt goes alone."""


class Server:
    """Serves greedy requests on one model and pool.

    ``submit``, ``safe_point`` and ``cancel_all`` may be called from any thread. Steps are run by :meth:`step` or
    :meth:`run` in the caller's thread, or by a thread of the server's own between ``with server:`` and the block's end.
    """

    def __init__(
        self,
        model: ReferenceModel,
        pool: PagedPool,
        *,
        draft_tokens: int = 0,
        max_running: int = 64,
        record_logits: bool = True,
    ) -> None:
        """Serve plain greedy decoding, or with ``draft_tokens`` proposals per request that the target verifies.

        Raises :class:`ConfigError` for counts that make no sense, or for drafting without a draft block.
        """
        if draft_tokens < 0 or (draft_tokens and not model.config.num_nextn_predict_layers):
            blocks = model.config.num_nextn_predict_layers
            raise ConfigError("draft_tokens", f"{draft_tokens} cannot be had from {blocks} draft blocks")
        if max_running < 1:
            raise ConfigError("max_running", f"{max_running} is less than one request")
        self.model, self.pool = model, pool
        self.draft_tokens, self.max_running, self.record_logits = draft_tokens, max_running, record_logits
        self.rows: dict[Phase, Counter[int]] = {phase: Counter() for phase in Phase}
        """How often each phase was called with how many rows."""
        self._gate = Gate()
        self._changed = pool.changed
        self._waiting: deque[Request] = deque()
        self._unread: deque[Request] = deque()
        self._running: list[Request] = []
        self._thread: threading.Thread | None = None
        self._closing = False

    @property
    def running(self) -> int:
        """Requests in flight: they hold pages."""
        return len(self._unread) + len(self._running)

    @property
    def waiting(self) -> int:
        """Requests that wait for pages or for a place in the batch."""
        return len(self._waiting)

    def submit(self, prompt: Sequence[int], max_new_tokens: int) -> Request:
        """Queue a request; it waits until the pool has pages for its prompt, its tokens and one round of drafts.

        Raises ``ValueError`` for a prompt that is empty or not of this vocabulary, :class:`PoolError` for a request
        that is larger than the whole pool.
        """
        if max_new_tokens < 1 or not prompt or not all(0 <= token < self.model.config.vocab_size for token in prompt):
            message = f"a request needs tokens of 0..{self.model.config.vocab_size - 1} and at least one new token"
            raise ValueError(message)
        request = Request(tuple(prompt), max_new_tokens)
        if self.tokens_for(request) > self.pool.capacity_tokens:
            message = f"a request of {self.tokens_for(request)} tokens never fits into {self.pool.capacity_tokens}"
            raise PoolError(message)
        with self._changed:
            self._waiting.append(request)
            self._changed.notify_all()
        return request

    def tokens_for(self, request: Request) -> int:
        """Tokens that a request reserves: enough to never wait again once it is in flight."""
        return len(request.prompt) + request.max_new_tokens + self.draft_tokens

    @contextmanager
    def safe_point(self) -> Iterator[None]:
        """Hold the server between two steps; see :meth:`memreclaim.engines.base.EngineAdapter.safe_point`."""
        with self._gate.turn():
            if self.model.device.type == "cuda":
                torch.cuda.synchronize(self.model.device)
            yield

    def step(self) -> bool:
        """Admit what fits, then run one phase; False when nothing could be done."""
        with self._gate.turn():
            self._admit()
            if self._unread:
                self._prefill()
            elif self._running and self.draft_tokens:
                self._speculate()
            elif self._running:
                self._decode()
            else:
                return False
            return True

    def run(self) -> None:
        """Step until all requests are done.

        Raises :class:`PoolError` when the rest waits for pages that nobody in this server will give back.
        """
        while self.step():
            pass
        if self._waiting:
            message = f"{len(self._waiting)} requests wait for pages that another server holds"
            raise PoolError(message)

    def cancel_all(self) -> None:
        """End every request, giving its pages back; whoever waits for a result gets an :class:`EngineError`."""
        with self.safe_point():
            self._fail(EngineError("cancelled"))

    def __enter__(self) -> Self:
        """Start a thread that steps whenever there is work. Raises :class:`EngineError` when there is one already."""
        if self._thread is not None:
            message = "this server has a thread already"
            raise EngineError(message)
        self._closing = False
        self._thread = threading.Thread(target=self._serve, name="memreclaim-reference", daemon=True)
        self._thread.start()
        return self

    def __exit__(self, *_exception: object) -> None:
        """Finish the requests in flight, cancel those that wait, and end the thread."""
        with self._changed:
            self._closing = True
            self._changed.notify_all()
        if self._thread is not None:
            self._thread.join()
            self._thread = None

    def _serve(self) -> None:
        try:
            while self._wait_for_work():
                self.step()
        except BaseException as error:  # noqa: BLE001 - handed to everybody who waits for a result
            self._fail(error)
        else:
            self._fail(EngineError("the server was closed"))

    def _wait_for_work(self) -> bool:
        """Sleep until a step would do something; False once the server is closing and nothing is in flight."""
        with self._changed:
            self._changed.wait_for(lambda: self._closing or self.running or self._admissible())
            return bool(self.running) or not self._closing

    def _fail(self, error: BaseException) -> None:
        with self._changed:
            for request in [*self._waiting, *self._unread, *self._running]:
                self._release(request, error)
            self._waiting.clear()
            self._unread.clear()
            self._running.clear()

    def _admissible(self) -> bool:
        """Whether the request that has waited longest can leave the queue; nobody overtakes it."""
        if not self._waiting or self._closing:
            return False
        needed = self.tokens_for(self._waiting[0])
        fits = needed <= self.pool.free_tokens and self.running < self.max_running
        return fits or needed > self.pool.capacity_tokens

    def _admit(self) -> None:
        with self._changed:
            while self._admissible():
                request = self._waiting.popleft()
                request.table = self.pool.allocate(self.tokens_for(request))
                if request.table is None:
                    request.finish(PoolError("the pool shrank below what the request needs"))
                else:
                    self._unread.append(request)

    def _prefill(self) -> None:
        lengths = accumulate(len(request.prompt) for request in self._unread)
        fitting = sum(1 for _ in takewhile(lambda rows: rows <= PREFILL_ROWS, lengths))
        requests = list(islice(self._unread, max(fitting, 1)))
        batch = self._batch(Phase.PREFILL, requests, [request.prompt for request in requests])
        last = self.model(batch, self.pool)[batch.last_rows]
        # Only now: if the model raises, the requests are still where the next step finds them.
        self._running.extend(self._unread.popleft() for _ in requests)
        self._extend(requests, last, [len(request.prompt) for request in requests])

    def _decode(self) -> None:
        requests = list(self._running)
        batch = self._batch(Phase.DECODE, requests, [(request.last_token,) for request in requests])
        self._extend(requests, self.model(batch, self.pool), [1] * len(requests))

    def _extend(self, requests: list[Request], hidden: torch.Tensor, cached: list[int]) -> None:
        """One more token for each request from its last row's state ``[requests, hidden]``."""
        logits = self.model.logits(hidden)
        chosen = logits.argmax(dim=-1).tolist()
        for index, request in enumerate(requests):
            request.cached += cached[index]
            request.hidden = hidden[index]
            self._append(request, [chosen[index]], logits[index : index + 1])
        self._retire()

    def _speculate(self) -> None:
        requests = list(self._running)
        drafted = proposals(self.model, self.pool, requests, self.draft_tokens)
        self.rows[Phase.DRAFT][len(requests) * self.draft_tokens] += 1
        guesses = [(request.last_token, *row) for request, row in zip(requests, drafted, strict=True)]
        batch = self._batch(Phase.VERIFY, requests, guesses)
        hidden = self.model(batch, self.pool)
        logits = self.model.logits(hidden)
        chosen = logits.argmax(dim=-1).tolist()
        for (_, rows), request, guess in zip(batch.pieces(), requests, guesses, strict=True):
            count = min(accepted(guess[1:], chosen[rows]), request.remaining)
            request.cached += count
            request.hidden = hidden[rows.start + count - 1]
            self._append(request, chosen[rows][:count], logits[rows][:count])
        self._retire()

    def _batch(self, phase: Phase, requests: list[Request], tokens: Sequence[Sequence[int]]) -> Batch:
        segments = []
        for request, row in zip(requests, tokens, strict=True):
            segments.append(Segment(request.pages, request.cached, len(row)))
        flat = torch.tensor([token for row in tokens for token in row], device=self.model.device)
        self.rows[phase][flat.shape[0]] += 1
        return Batch(phase, flat, tuple(segments))

    def _append(self, request: Request, tokens: list[int], logits: torch.Tensor) -> None:
        request.tokens.extend(tokens)
        if self.record_logits:
            request.logits.extend(logits.cpu())

    def _retire(self) -> None:
        done = [request for request in self._running if request.remaining == 0]
        self._running = [request for request in self._running if request.remaining]
        for request in done:
            self._release(request)

    def _release(self, request: Request, error: BaseException | None = None) -> None:
        if request.table is not None:
            self.pool.free(request.table)
            request.table = None
        request.finish(error)
