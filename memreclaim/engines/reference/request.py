"""One request on its way through the embedded engine."""

from __future__ import annotations

import threading
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from memreclaim.errors import EngineError

if TYPE_CHECKING:
    import torch

    from memreclaim.engines.reference.pages import PageTable


@dataclass(eq=False)
class Request:
    """Prompt in, tokens out; made by :meth:`memreclaim.engines.reference.Server.submit`."""

    prompt: tuple[int, ...]
    max_new_tokens: int
    tokens: list[int] = field(default_factory=list)
    """Tokens so far."""
    logits: list[torch.Tensor] = field(default_factory=list)
    """Scores that each token was chosen by, fp32 ``[vocab]`` on the CPU; empty unless the server records them."""
    table: PageTable | None = field(default=None, repr=False)
    """Pages while the request is in flight."""
    cached: int = 0
    """Tokens whose latents are in the pool."""
    hidden: torch.Tensor | None = field(default=None, repr=False)
    """The target's state of the last cached token, bf16 ``[hidden]``."""
    error: BaseException | None = None
    _finished: threading.Event = field(default_factory=threading.Event, repr=False)

    @property
    def done(self) -> bool:
        """It has all its tokens, or failed."""
        return self._finished.is_set()

    @property
    def pages(self) -> PageTable:
        """Its pages. Raises :class:`EngineError` when it is not in flight."""
        if self.table is None:
            message = "a request that is not in flight has no pages"
            raise EngineError(message)
        return self.table

    @property
    def last_token(self) -> int:
        """The newest token, whose latent is not in the pool yet."""
        return self.tokens[-1]

    @property
    def remaining(self) -> int:
        """Tokens still to come."""
        return self.max_new_tokens - len(self.tokens)

    def result(self, timeout: float | None = None) -> tuple[int, ...]:
        """Wait for all tokens.

        Raises ``TimeoutError`` after ``timeout`` seconds, :class:`EngineError` when the engine failed or cancelled it.
        """
        if not self._finished.wait(timeout):
            message = f"{len(self.tokens)} of {self.max_new_tokens} tokens after {timeout} s"
            raise TimeoutError(message)
        if self.error is not None:
            message = f"the request failed: {self.error}"
            raise EngineError(message) from self.error
        return tuple(self.tokens)

    def finish(self, error: BaseException | None = None) -> None:
        """Wake whoever waits for the result."""
        self.error = error
        self.hidden = None
        self._finished.set()
