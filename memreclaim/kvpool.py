"""What memreclaim needs to know of an engine's KV-cache pool."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol, runtime_checkable

from memreclaim import events
from memreclaim.errors import PoolError

MEMORY = "memory"
PIN = "pin"


@runtime_checkable
class KVPool(Protocol):
    """A pool of KV-cache slots that can take freed bytes while it serves.

    An engine that sizes its pool after reclaiming has nothing to grow: the bytes are there when it measures.
    """

    @property
    def capacity_tokens(self) -> int:
        """Tokens that the pool holds when it is full."""

    @property
    def bytes_per_token(self) -> float:
        """Bytes that one token costs on this rank, over all layers; engines publish fractions (1,670.75 for V4.1)."""

    @property
    def limited_by(self) -> str:
        """What bounds the capacity: ``memory``, ``pin`` (the operator fixed it) or ``rank N``."""

    def grow(self, n_bytes: int) -> int:
        """Take at most ``n_bytes`` into the pool; returns the tokens gained, 0 when pinned. Running requests go on.

        Raises :class:`memreclaim.errors.PoolError` when the memory cannot be had; the pool is then as it was.
        """

    def shrink(self, n_bytes: int) -> int:
        """Give back at least ``n_bytes`` if that many are unused; returns the bytes given back, at most what is unused.

        Raises :class:`memreclaim.errors.PoolError` when tokens in use stand in the way of the whole of it.
        """


@dataclass(frozen=True)
class PoolChange:
    """What a pool did with freed bytes."""

    tokens_before: int
    tokens_after: int
    bytes_per_token: float
    limited_by: str
    head_room_bytes: int
    """Freed bytes that the pool did not take: all of them when the operator pinned it."""

    @property
    def tokens_gained(self) -> int:
        """Tokens that the freed bytes added."""
        return self.tokens_after - self.tokens_before


def offer(pool: KVPool, n_bytes: int) -> PoolChange:
    """Offer ``pool`` bytes that were measured as free; a pool that refuses stays as it is, and the bytes head-room."""
    before, gained = pool.capacity_tokens, 0
    try:
        gained = pool.grow(n_bytes)
    except PoolError as error:
        events.pool_refused("grow", n_bytes, str(error))
    spare = n_bytes - int(gained * pool.bytes_per_token)
    return PoolChange(before, pool.capacity_tokens, pool.bytes_per_token, pool.limited_by, spare)


def ask_back(pool: KVPool, n_bytes: int) -> PoolChange:
    """Ask ``pool`` to give bytes back; what tokens in use hold stays with it."""
    before = pool.capacity_tokens
    try:
        pool.shrink(n_bytes)
    except PoolError as error:
        events.pool_refused("shrink", n_bytes, str(error))
    return PoolChange(before, pool.capacity_tokens, pool.bytes_per_token, pool.limited_by, 0)
