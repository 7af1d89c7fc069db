"""Pages of the latent-KV pool: how they lie in memory, and which of them a request has."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch

from memreclaim.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Sequence


@dataclass(frozen=True)
class Paging:
    """Sizes of a page and of an extent, in tokens. Raises :class:`ConfigError` when an extent holds no page."""

    page_tokens: int = 16
    extent_tokens: int = 1024
    """At most; 5 MiB in the demo. Small extents can be given back one by one, large ones are read in fewer pieces."""

    def __post_init__(self) -> None:
        """Refuse sizes without room for a page."""
        if self.page_tokens < 1 or self.extent_tokens < self.page_tokens:
            raise ConfigError("page_tokens", f"no page of {self.page_tokens} fits an extent of {self.extent_tokens}")

    def pages(self, n_tokens: int) -> int:
        """Pages that hold ``n_tokens``."""
        return -(-n_tokens // self.page_tokens)

    @property
    def extent_pages(self) -> int:
        """Pages in one extent at most."""
        return self.extent_tokens // self.page_tokens


@dataclass(frozen=True, eq=False)
class Extent:
    """One piece of memory of the pool."""

    latents: torch.Tensor
    """bf16 ``[layers, pages, page_tokens, width]``."""
    first_page: int

    @property
    def pages(self) -> range:
        """Page numbers in this extent."""
        return range(self.first_page, self.first_page + self.latents.shape[1])

    @property
    def nbytes(self) -> int:
        """Bytes of memory."""
        return self.latents.nbytes


@dataclass(frozen=True, eq=False)
class Run:
    """Consecutive tokens of one request in one extent."""

    slots: torch.Tensor
    """The extent seen as bf16 ``[layers, tokens, width]``."""
    where: torch.Tensor
    """int64 ``[n]``: the slot of each of the run's tokens."""
    first: int
    """Position of the run's first token in the request."""

    @property
    def end(self) -> int:
        """Position after the run's last token."""
        return self.first + self.where.shape[0]


@dataclass(eq=False)
class PageTable:
    """The pages of one request in the order of its tokens; made and ended by the pool."""

    pages: tuple[int, ...]
    capacity_tokens: int
    runs: tuple[Run, ...] = field(repr=False)
    """Empty once the pages are given back, so that an old table keeps no memory alive."""

    @property
    def live(self) -> bool:
        """Whether the pages still belong to the request."""
        return bool(self.runs)

    def read(self, layer: int, n_tokens: int) -> torch.Tensor:
        """Latents of the first ``n_tokens``, at least one: bf16 ``[n_tokens, width]``, a copy."""
        parts = [
            run.slots[layer].index_select(0, run.where[: n_tokens - run.first])
            for run in self.runs
            if run.first < n_tokens
        ]
        return parts[0] if len(parts) == 1 else torch.cat(parts)

    def write(self, layer: int, start: int, latents: torch.Tensor) -> None:
        """Store bf16 ``[n, width]`` at positions ``start ..``, over what is there."""
        end = start + latents.shape[0]
        for run in self.runs:
            low, high = max(start, run.first), min(end, run.end)
            if low < high:
                where = run.where[low - run.first : high - run.first]
                run.slots[layer].index_copy_(0, where, latents[low - start : high - start])


def table_of(pages: tuple[int, ...], extents: Sequence[Extent], page_tokens: int) -> PageTable:
    """Page table of ``pages``; those that follow one another in one extent become one run, read by one gather."""
    groups: list[tuple[Extent, list[int]]] = []
    for page in pages:
        extent = next(extent for extent in extents if page in extent.pages)
        if not groups or groups[-1][0] is not extent:
            groups.append((extent, []))
        groups[-1][1].append(page - extent.first_page)
    runs: list[Run] = []
    for extent, local in groups:
        latents = extent.latents
        slots = latents.view(latents.shape[0], -1, latents.shape[-1])
        base = torch.tensor(local, device=latents.device).unsqueeze(1) * page_tokens
        where = (base + torch.arange(page_tokens, device=latents.device)).view(-1)
        runs.append(Run(slots, where, runs[-1].end if runs else 0))
    return PageTable(pages, len(pages) * page_tokens, tuple(runs))
