"""What one call of the model works on: rows of several requests, one after another."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

import torch

if TYPE_CHECKING:
    from collections.abc import Iterator

    from memreclaim.engines.reference.pages import PageTable
    from memreclaim.states import Phase


class LatentCache(Protocol):
    """Where latents of tokens that were seen are kept; :class:`memreclaim.engines.reference.pool.PagedPool` is one."""

    def read(self, layer: int, table: PageTable, n_tokens: int) -> torch.Tensor:
        """Latents of a request's first ``n_tokens``: bf16 ``[n_tokens, width]``."""

    def write(self, layer: int, table: PageTable, start: int, latents: torch.Tensor) -> None:
        """Store bf16 ``[n, width]`` at positions ``start ..``."""


@dataclass(frozen=True, eq=False)
class Segment:
    """Rows of one request: ``rows`` consecutive positions from ``start``."""

    table: PageTable
    start: int
    rows: int


@dataclass(frozen=True, eq=False)
class Batch:
    """The call object that the engine hands to its models."""

    phase: Phase
    tokens: torch.Tensor
    """int64 ``[rows]``, segment after segment."""
    segments: tuple[Segment, ...]

    @property
    def rows(self) -> int:
        """Rows over all segments."""
        return self.tokens.shape[0]

    @property
    def positions(self) -> torch.Tensor:
        """int64 ``[rows]``."""
        device = self.tokens.device
        return torch.cat([torch.arange(s.start, s.start + s.rows, device=device) for s in self.segments])

    @property
    def last_rows(self) -> list[int]:
        """Index of each segment's last row."""
        return [rows.stop - 1 for _, rows in self.pieces()]

    def pieces(self) -> Iterator[tuple[Segment, slice]]:
        """Each segment with its rows in the batch."""
        first = 0
        for segment in self.segments:
            yield segment, slice(first, first + segment.rows)
            first += segment.rows
