"""Serving a few prompts, and comparing answers bit by bit."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from memreclaim.engines import reference as ref

if TYPE_CHECKING:
    from collections.abc import Sequence

WAIT = 60.0
"""Seconds after which a wait for another thread counts as hung."""


def serve(
    model: ref.ReferenceModel, pool: ref.PagedPool, prompts: Sequence[Sequence[int]], new_tokens: int, drafts: int = 0
) -> list[ref.Request]:
    """All prompts in one batch, from submission to the last token."""
    server = ref.Server(model, pool, draft_tokens=drafts, max_running=len(prompts))
    requests = [server.submit(prompt, new_tokens) for prompt in prompts]
    server.run()
    return requests


def tokens(requests: Sequence[ref.Request]) -> list[list[int]]:
    """Answers."""
    return [request.tokens for request in requests]


def bits(requests: Sequence[ref.Request]) -> list[list[list[int]]]:
    """Bit patterns of every score of every token of every answer."""
    return [torch.stack(request.logits).view(torch.int32).tolist() for request in requests]
