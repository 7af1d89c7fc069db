"""Fingerprints of twins: taken when a twin is proven, compared later to notice that a byte of it moved.

A twin is read as int64 words in slabs of at most 256 KiB. The fingerprint of a slab is ``sum(word[i] * weight[i])``
modulo 2**64 with odd weights that depend on the position. A change of one word (8 bytes) is always seen, since an odd
weight has an inverse; changes of several words are missed with probability 2**-64. It guards against accidents, not
against an opponent.
"""

from __future__ import annotations

import weakref
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING, Final

import torch

if TYPE_CHECKING:
    from collections.abc import Iterator

    from memreclaim.twin import Twin

SLAB_BYTES: Final = 1 << 18
"""A slab needs a temporary of its own size, and one table of that size is kept: 0.5 MiB of the 4 MiB that an
operation may use."""
_WORD: Final = 8
_BATCH: Final = 4


@dataclass(frozen=True)
class Fingerprint:
    """What the bytes of a twin were when it was proven."""

    slabs: tuple[int, ...]
    """One number per slab, codes first, then exponents."""

    def differing(self, other: Fingerprint) -> int:
        """How many slabs differ."""
        return sum(mine != theirs for mine, theirs in zip(self.slabs, other.slabs, strict=True))


class Fingerprints:
    """Fingerprints by twin; they go when their twin goes. Thread-safe as dictionaries are."""

    def __init__(self) -> None:
        """Start empty."""
        self._of: weakref.WeakKeyDictionary[Twin, Fingerprint] = weakref.WeakKeyDictionary()

    def take(self, twin: Twin) -> None:
        """Note what ``twin`` is now, just after it was proven. One synchronisation with the device."""
        self._of[twin] = fingerprint(twin)

    def of(self, twin: Twin) -> Fingerprint | None:
        """What was noted, or None for a twin that was never noted."""
        return self._of.get(twin)


def fingerprint(twin: Twin) -> Fingerprint:
    """Fingerprint of a twin as it is now; peak memory beside it: 1.5 MiB. One synchronisation with its device."""
    sums = [each for part in (twin.packed, twin.exponents) for each in _sums(part.view(-1))]
    return Fingerprint(tuple(torch.cat(sums).tolist()))


def _sums(data: torch.Tensor) -> Iterator[torch.Tensor]:
    """Fingerprints of all slabs of ``data``, four at a time: slab by slab took 100 launches for a twin of 8 MiB."""
    words, whole = SLAB_BYTES // _WORD, data.numel() // SLAB_BYTES
    # One buffer for all batches: glibc places aligned buffers of one size side by side instead of reusing one.
    room = torch.empty((min(whole, _BATCH), words), dtype=torch.int64, device=data.device)
    rows = data[: whole * SLAB_BYTES].view(torch.int64).view(whole, words) if whole else room
    for batch in torch.split(rows, _BATCH):
        products = torch.mul(batch, _weights(data.device), out=room[: len(batch)])
        yield products.sum(dim=1)
    if whole * SLAB_BYTES < data.numel():
        yield slab_sum(data[whole * SLAB_BYTES :]).view(1)


def slabs(twin: Twin) -> Iterator[torch.Tensor]:
    """The twin's bytes as views, uint8 ``[n]`` with n at most :data:`SLAB_BYTES`."""
    for part in (twin.packed, twin.exponents):
        yield from torch.split(part.view(-1), SLAB_BYTES)


def slab_sum(slab: torch.Tensor) -> torch.Tensor:
    """Fingerprint of one slab: int64 scalar on its device, nothing is synchronised."""
    rest = slab.numel() % _WORD
    if rest:
        # Exponents of small twins only: real ones are made of whole words.
        slab = torch.nn.functional.pad(slab, (0, _WORD - rest))
    words = slab.view(torch.int64)
    return (words * _weights(words.device)[: words.numel()]).sum()


@cache
def _weights(device: torch.device) -> torch.Tensor:
    """Odd multipliers, int64 ``[SLAB_BYTES / 8]``: neighbours have unlike high bits."""
    index = torch.arange(SLAB_BYTES // _WORD, dtype=torch.int64, device=device)
    scrambled = (index + 1) * -7046029254386353131  # 2**64 divided by the golden ratio, as a signed number
    return (scrambled ^ (scrambled >> 29)) | 1
