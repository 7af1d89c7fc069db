"""Paged latent-KV pool that grows and shrinks while requests are in flight.

Growing adds extents and never moves a page, so a page table stays valid for the life of its request; shrinking gives
back whole extents that were grown and that nobody uses, newest first. What the pool started with stays: it was sized
while all weights were bf16.
"""

from __future__ import annotations

import heapq
from threading import Condition
from typing import TYPE_CHECKING

import torch

from memreclaim.engines.reference.pages import Extent, PageTable, Paging, table_of
from memreclaim.errors import ConfigError, IntegrityError, PoolError
from memreclaim.kvpool import MEMORY, PIN

if TYPE_CHECKING:
    from memreclaim.engines.reference.config import ModelConfig


class PagedPool:
    """The embedded engine's KV pool, a :class:`memreclaim.kvpool.KVPool`. All methods may be called from any thread."""

    def __init__(
        self,
        config: ModelConfig,
        *,
        capacity_tokens: int,
        device: torch.device | str = "cpu",
        pinned: bool = False,
        paging: Paging | None = None,
    ) -> None:
        """Allocate ``capacity_tokens``, rounded down to whole pages.

        ``pinned`` means that the operator fixed the size: :meth:`grow` then gains nothing.
        Raises :class:`ConfigError` for less than a page, :class:`PoolError` when the memory cannot be had.
        """
        self._paging = paging or Paging()
        if capacity_tokens < self.page_tokens:
            raise ConfigError("capacity_tokens", f"{capacity_tokens} is less than a page of {self.page_tokens}")
        self.changed = Condition()
        """Notified when pages come, go or become free; its lock guards all bookkeeping here."""
        self._device = torch.device(device)
        self._layers, self._width = config.cache_layers, config.head_dim
        self._pinned = pinned
        self._extents: list[Extent] = []
        self._next_page = 0
        self._free: list[int] = []
        self._used: set[int] = set()
        self._add(capacity_tokens // self.page_tokens)
        self._first_grown = self._next_page

    @property
    def page_tokens(self) -> int:
        """Tokens in a page, the unit in which requests reserve."""
        return self._paging.page_tokens

    @property
    def page_bytes(self) -> int:
        """Bytes of one page over all layers."""
        return self._layers * self.page_tokens * self._width * torch.bfloat16.itemsize

    @property
    def bytes_per_token(self) -> float:
        """Bytes of one token over all layers, the draft's included."""
        return self.page_bytes / self.page_tokens

    @property
    def capacity_tokens(self) -> int:
        """Tokens that the pool holds when it is full."""
        with self.changed:
            return (len(self._free) + len(self._used)) * self.page_tokens

    @property
    def used_tokens(self) -> int:
        """Tokens reserved by requests, in whole pages."""
        with self.changed:
            return len(self._used) * self.page_tokens

    @property
    def free_tokens(self) -> int:
        """Tokens that requests could still reserve."""
        with self.changed:
            return len(self._free) * self.page_tokens

    @property
    def limited_by(self) -> str:
        """``pin`` when the operator fixed the size, else ``memory``."""
        return PIN if self._pinned else MEMORY

    def rounded(self, n_tokens: int) -> int:
        """What a request of ``n_tokens`` reserves: whole pages, in tokens."""
        return self._paging.pages(n_tokens) * self.page_tokens

    def allocate(self, n_tokens: int) -> PageTable | None:
        """Reserve pages for ``n_tokens`` of one request, lowest page numbers first; None when the pool is too full."""
        if n_tokens < 1:
            message = f"a request of {n_tokens} tokens has no pages"
            raise ValueError(message)
        count = self._paging.pages(n_tokens)
        with self.changed:
            if count > len(self._free):
                return None
            pages = tuple(heapq.heappop(self._free) for _ in range(count))
            self._used.update(pages)
            return table_of(pages, self._extents, self.page_tokens)

    def free(self, table: PageTable) -> None:
        """Give a request's pages back. Raises :class:`PoolError` when that was done before."""
        with self.changed:
            if not table.live:
                message = "the pages of this table were given back already"
                raise PoolError(message)
            table.runs = ()
            self._used.difference_update(table.pages)
            for page in table.pages:
                heapq.heappush(self._free, page)
            self.changed.notify_all()

    def grow(self, n_bytes: int) -> int:
        """Take at most ``n_bytes`` into the pool, in whole pages; returns the tokens gained, 0 when pinned.

        No page moves. Raises :class:`PoolError` when the memory cannot be had; the pool is then as it was.
        """
        _check_bytes(n_bytes)
        pages = 0 if self._pinned else n_bytes // self.page_bytes
        with self.changed:
            self._add(pages)
            self.changed.notify_all()
        return pages * self.page_tokens

    def shrink(self, n_bytes: int) -> int:
        """Give back at least ``n_bytes`` of what was grown, in whole extents that nobody uses; returns the bytes.

        That is less when less was grown. Raises :class:`PoolError` when requests hold pages that stand in the way; the
        pool is then as it was.
        """
        _check_bytes(n_bytes)
        with self.changed:
            grown = [extent for extent in self._extents if extent.first_page >= self._first_grown]
            wanted = min(n_bytes, sum(extent.nbytes for extent in grown))
            leaving: list[Extent] = []
            for extent in reversed(grown):
                if sum(e.nbytes for e in leaving) >= wanted:
                    break
                if self._used.isdisjoint(extent.pages):
                    leaving.append(extent)
            given_back = sum(extent.nbytes for extent in leaving)
            if given_back < wanted:
                message = (
                    f"{wanted} bytes were asked back, {wanted - given_back} of them hold tokens of running requests"
                )
                raise PoolError(message)
            self._drop(leaving)
            self.changed.notify_all()
        return given_back

    def read(self, layer: int, table: PageTable, n_tokens: int) -> torch.Tensor:
        """Latents of the first ``n_tokens`` of a request: bf16 ``[n_tokens, width]``, a copy."""
        if n_tokens == 0:
            return torch.empty((0, self._width), dtype=torch.bfloat16, device=self._device)
        self._check_inside(table, n_tokens)
        return table.read(layer, n_tokens)

    def write(self, layer: int, table: PageTable, start: int, latents: torch.Tensor) -> None:
        """Store bf16 ``[n, width]`` at positions ``start ..`` of a request, over what is there.

        Raises :class:`PoolError` past the end of the request's pages, or when they were given back.
        """
        self._check_inside(table, start + latents.shape[0])
        table.write(layer, start, latents)

    def check_integrity(self) -> None:
        """Recount pages. Raises :class:`IntegrityError` when one is lost, counted twice or outside every extent."""
        with self.changed:
            held = [page for extent in self._extents for page in extent.pages]
            counted = [*self._free, *self._used]
            if sorted(held) != sorted(counted):
                message = f"extents hold {len(held)} pages, the free and used lists have {len(counted)}"
                raise IntegrityError(message)

    def _check_inside(self, table: PageTable, end: int) -> None:
        if end > table.capacity_tokens or not table.live:
            held = table.capacity_tokens if table.live else 0
            message = f"token {end} lies outside the {held} tokens that the request has"
            raise PoolError(message)

    def _add(self, pages: int) -> None:
        added: list[Extent] = []
        first = self._next_page
        while pages > 0:
            count = min(pages, self._paging.extent_pages)
            added.append(Extent(self._memory(count), first))
            first += count
            pages -= count
        self._extents.extend(added)
        self._free.extend(page for extent in added for page in extent.pages)
        heapq.heapify(self._free)
        self._next_page = first

    def _memory(self, pages: int) -> torch.Tensor:
        # Zeroed for two reasons: on the CPU the bytes are then really had and not only promised, and stale NaNs in
        # reused memory have exposed bugs in engines with larger pools.
        shape = (self._layers, pages, self.page_tokens, self._width)
        try:
            return torch.empty(shape, dtype=torch.bfloat16, device=self._device).zero_()
        except RuntimeError as error:
            message = f"the pool cannot have {pages} more pages of {self.page_bytes} bytes"
            raise PoolError(message) from error

    def _drop(self, extents: list[Extent]) -> None:
        gone = {page for extent in extents for page in extent.pages}
        self._extents = [extent for extent in self._extents if extent.first_page not in gone]
        self._free = [page for page in self._free if page not in gone]
        heapq.heapify(self._free)


def _check_bytes(n_bytes: int) -> None:
    if n_bytes < 0:
        message = f"{n_bytes} bytes cannot be moved"
        raise ValueError(message)
