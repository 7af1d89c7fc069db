"""Drafting several tokens per request and keeping those that the target would have chosen."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from memreclaim.engines.reference.batch import Batch, Segment
from memreclaim.states import Phase

if TYPE_CHECKING:
    from collections.abc import Sequence

    from memreclaim.engines.reference.batch import LatentCache
    from memreclaim.engines.reference.model import ReferenceModel
    from memreclaim.engines.reference.request import Request


def proposals(model: ReferenceModel, cache: LatentCache, requests: Sequence[Request], count: int) -> list[list[int]]:
    """``count`` proposed tokens after each request's last one, by one call of the draft blocks over all of them."""
    last = torch.tensor([request.last_token for request in requests], device=model.device)
    segments = tuple(Segment(request.pages, request.cached, count) for request in requests)
    batch = Batch(Phase.DRAFT, model.guess(last, count).view(-1), segments)
    hidden = torch.stack([request.hidden for request in requests if request.hidden is not None])
    proposed: list[list[int]] = model.draft(batch, hidden, cache).argmax(dim=-1).view(-1, count).tolist()
    return proposed


def accepted(proposed: Sequence[int], chosen: Sequence[int]) -> int:
    """How many of the target's ``chosen`` tokens count: up to and including the first that differs from the proposal.

    ``chosen`` has one more than ``proposed``: the target's token after all of them.
    """
    for index, token in enumerate(proposed):
        if token != chosen[index]:
            return index + 1
    return len(chosen)
