"""The paged pool: right latents in right places, growth under load, no byte given back that is in use."""

from __future__ import annotations

import threading
import weakref

import pytest
import torch
from engine_runs import WAIT
from hypothesis import given
from hypothesis import strategies as st

from memreclaim.engines import reference as ref
from memreclaim.errors import ConfigError, IntegrityError, PoolError
from memreclaim.kvpool import KVPool

pytestmark = pytest.mark.cpu

CONFIG = ref.ModelConfig.tiny()
LAYERS, WIDTH = 3, 64
TOKEN_BYTES = LAYERS * WIDTH * 2
PAGING = ref.Paging(page_tokens=4, extent_tokens=16)


def small_pool(tokens: int = 32, *, pinned: bool = False) -> ref.PagedPool:
    """Pages of 4 tokens, extents of 16."""
    return ref.PagedPool(CONFIG, capacity_tokens=tokens, pinned=pinned, paging=PAGING)


def latents(count: int, seed: int = 0) -> torch.Tensor:
    """Random bf16 [count, 64]."""
    return torch.randn(count, WIDTH, generator=torch.Generator().manual_seed(seed)).bfloat16()


def allocate(pool: ref.PagedPool, tokens: int) -> ref.PageTable:
    """Pages that must be there."""
    table = pool.allocate(tokens)
    assert table is not None
    return table


def test_is_a_kv_pool() -> None:
    """The pool is what memreclaim's core asks for, with bytes from the shapes."""
    pool = small_pool()
    assert isinstance(pool, KVPool)
    assert pool.capacity_tokens == 32
    assert pool.bytes_per_token == TOKEN_BYTES
    assert pool.limited_by == "memory"


def test_capacity_is_whole_pages() -> None:
    """A part of a page holds no tokens, and less than one page is refused."""
    assert small_pool(35).capacity_tokens == 32
    with pytest.raises(ConfigError, match="capacity_tokens"):
        small_pool(3)


@pytest.mark.parametrize("sizes", [(0, 16), (16, 15)])
def test_paging_without_room_is_refused(sizes: tuple[int, int]) -> None:
    """A page has tokens and an extent has pages."""
    with pytest.raises(ConfigError, match="page_tokens"):
        ref.Paging(*sizes)


@given(
    st.lists(st.integers(1, 40), min_size=1, max_size=6),
    st.lists(st.integers(0, 5), max_size=4),
    st.integers(1, 40),
    st.integers(1, 7),
)
def test_paged_latents_equal_contiguous_ones(sizes: list[int], freed: list[int], length: int, step: int) -> None:
    """Whatever was allocated and freed before, a request reads back what was written, in pieces of any size."""
    pool = small_pool(400)
    tables = [allocate(pool, size) for size in sizes]
    for index in sorted(set(freed)):
        if index < len(tables):
            pool.free(tables[index])
    others = [table for table in tables if table.live]
    for seed, table in enumerate(others):
        pool.write(1, table, 0, latents(table.capacity_tokens, seed))
    table, expected = allocate(pool, length), latents(length, 99)
    for start in range(0, length, step):
        pool.write(1, table, start, expected[start : start + step])
    for end in range(length + 1):
        assert torch.equal(expected[:end], pool.read(1, table, end))
    for seed, other in enumerate(others):
        assert torch.equal(latents(other.capacity_tokens, seed), pool.read(1, other, other.capacity_tokens))
    assert not pool.read(0, table, length).any()
    pool.check_integrity()


def test_rewriting_replaces_only_what_it_covers() -> None:
    """Rejected drafts are written over: tokens before and after stay."""
    pool = small_pool()
    table, first, second = allocate(pool, 20), latents(20), latents(6, 1)
    pool.write(0, table, 0, first)
    pool.write(0, table, 7, second)
    assert torch.equal(torch.cat((first[:7], second, first[13:])), pool.read(0, table, 20))


def test_growing_moves_no_page() -> None:
    """Latents of a request in flight have the same addresses and bits after the pool has grown."""
    pool = small_pool()
    table, expected = allocate(pool, 20), latents(20)
    pool.write(2, table, 0, expected)
    addresses = [run.slots.data_ptr() for run in table.runs]
    assert pool.grow(10 * 4 * TOKEN_BYTES) == 40
    assert [run.slots.data_ptr() for run in table.runs] == addresses
    assert torch.equal(expected, pool.read(2, table, 20))
    assert pool.capacity_tokens == 72
    pool.check_integrity()


def test_request_may_lie_in_old_and_new_extents() -> None:
    """A request that starts in the old part and ends in the grown one reads back whole."""
    pool = small_pool()
    pool.grow(32 * TOKEN_BYTES)
    table, expected = allocate(pool, 60), latents(60)
    pool.write(0, table, 0, expected)
    assert len(table.runs) == 4
    assert torch.equal(expected, pool.read(0, table, 60))


@pytest.mark.parametrize("n_bytes", [0, 1, 4 * TOKEN_BYTES - 1])
def test_less_than_a_page_gains_nothing(n_bytes: int) -> None:
    """Bytes that make no page are not taken."""
    pool = small_pool()
    assert pool.grow(n_bytes) == 0
    assert pool.capacity_tokens == 32


def test_pinned_pool_gains_nothing() -> None:
    """The operator fixed the size: bytes stay head-room."""
    pool = small_pool(pinned=True)
    assert pool.grow(1 << 20) == 0
    assert pool.capacity_tokens == 32
    assert pool.limited_by == "pin"


@pytest.mark.parametrize("change", ["grow", "shrink"])
def test_negative_bytes_are_refused(change: str) -> None:
    """Growing by less than nothing is a mistake of the caller."""
    with pytest.raises(ValueError, match="-1 bytes"):
        getattr(small_pool(), change)(-1)


def test_failed_growth_leaves_the_pool_as_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    """When the second of three extents cannot be had, none is kept."""
    pool, real, calls = small_pool(), ref.PagedPool._memory, []

    def memory(self: ref.PagedPool, pages: int) -> torch.Tensor:
        calls.append(pages)
        if len(calls) == 2:
            message = "no more memory"
            raise PoolError(message)
        return real(self, pages)

    monkeypatch.setattr(ref.PagedPool, "_memory", memory)
    with pytest.raises(PoolError, match="no more memory"):
        pool.grow(48 * TOKEN_BYTES)
    assert calls == [4, 4]
    assert pool.capacity_tokens == 32
    pool.check_integrity()
    assert allocate(pool, 32).capacity_tokens == 32


def test_memory_that_is_not_there_is_a_pool_error() -> None:
    """The allocator's own error becomes ours, with the bytes asked for."""
    with pytest.raises(PoolError, match="more pages"):
        small_pool()._memory(1 << 40)


def test_shrinking_gives_back_what_was_grown() -> None:
    """Growing and shrinking by the same bytes ends where it began, and the memory is really gone."""
    pool = small_pool()
    gained = pool.grow(50 * TOKEN_BYTES)
    watch = [weakref.ref(extent.latents) for extent in pool._extents[2:]]
    assert gained == 48
    assert pool.shrink(50 * TOKEN_BYTES) == 48 * TOKEN_BYTES
    assert [reference() for reference in watch] == [None, None, None]
    assert pool.capacity_tokens == 32
    pool.check_integrity()


def test_shrinking_never_goes_below_the_first_size() -> None:
    """A pool that never grew gives nothing back, however much is asked."""
    pool = small_pool()
    assert pool.shrink(1 << 30) == 0
    assert pool.capacity_tokens == 32


def test_shrinking_refuses_pages_in_use() -> None:
    """While a request holds a grown page, its extent stays, and the pool is as it was; later it goes."""
    pool = small_pool()
    pool.grow(32 * TOKEN_BYTES)
    table, expected = allocate(pool, 36), latents(36)
    pool.write(0, table, 0, expected)
    with pytest.raises(PoolError, match="hold tokens of running requests"):
        pool.shrink(32 * TOKEN_BYTES)
    assert pool.capacity_tokens == 64
    assert torch.equal(expected, pool.read(0, table, 36))
    assert pool.shrink(16 * TOKEN_BYTES) == 16 * TOKEN_BYTES
    assert torch.equal(expected, pool.read(0, table, 36))
    pool.free(table)
    assert pool.shrink(16 * TOKEN_BYTES) == 16 * TOKEN_BYTES
    pool.check_integrity()


def test_freed_table_keeps_no_memory_alive() -> None:
    """An old page table that somebody forgot does not hold an extent that was given back."""
    pool = small_pool()
    pool.grow(16 * TOKEN_BYTES)
    table = allocate(pool, 48)
    watch = weakref.ref(pool._extents[-1].latents)
    pool.free(table)
    pool.shrink(16 * TOKEN_BYTES)
    assert watch() is None
    assert not table.live


def test_old_table_is_refused() -> None:
    """Reading, writing and freeing through pages that were given back raises."""
    pool = small_pool()
    table = allocate(pool, 4)
    pool.free(table)
    with pytest.raises(PoolError, match="already"):
        pool.free(table)
    with pytest.raises(PoolError, match="outside"):
        pool.read(0, table, 1)
    with pytest.raises(PoolError, match="outside"):
        pool.write(0, table, 0, latents(1))


def test_writing_past_the_reserved_tokens_is_refused() -> None:
    """A request cannot run into its neighbour's pages."""
    pool = small_pool()
    table = allocate(pool, 5)
    with pytest.raises(PoolError, match="token 9"):
        pool.write(0, table, 7, latents(2))


def test_full_pool_has_no_pages() -> None:
    """None, not an error, and nothing is taken; an empty request is the caller's mistake."""
    pool = small_pool()
    allocate(pool, 29)
    assert pool.allocate(1) is None
    assert (pool.used_tokens, pool.free_tokens) == (32, 0)
    with pytest.raises(ValueError, match="0 tokens"):
        pool.allocate(0)


def test_integrity_check_sees_a_lost_and_a_doubled_page() -> None:
    """A page that is in no list, or in two, is reported."""
    lost, doubled = small_pool(), small_pool()
    lost._free.pop()
    with pytest.raises(IntegrityError, match=r"8 pages.*have 7"):
        lost.check_integrity()
    doubled._used.add(doubled._free[0])
    with pytest.raises(IntegrityError, match=r"8 pages.*have 9"):
        doubled.check_integrity()


def test_threads_share_the_pool() -> None:
    """Four threads allocate, write, read and free while a fifth grows and shrinks; every read is right."""
    pool, wrong = small_pool(256), []

    def use(seed: int) -> None:
        for turn in range(30):
            table = pool.allocate(1 + (seed * 7 + turn) % 20)
            if table is None:
                continue
            expected = latents(table.capacity_tokens, seed * 100 + turn)
            pool.write(0, table, 0, expected)
            if not torch.equal(expected, pool.read(0, table, table.capacity_tokens)):
                wrong.append((seed, turn))
            pool.free(table)

    def breathe() -> None:
        for _ in range(30):
            pool.grow(32 * TOKEN_BYTES)
            try:
                pool.shrink(32 * TOKEN_BYTES)
            except PoolError:
                continue

    threads = [threading.Thread(target=use, args=(seed,)) for seed in range(4)] + [threading.Thread(target=breathe)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(WAIT)
        assert not thread.is_alive()
    assert wrong == []
    pool.check_integrity()
    assert pool.used_tokens == 0
