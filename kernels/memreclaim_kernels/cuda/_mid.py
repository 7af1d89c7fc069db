"""The ``mid`` kernel: 1..64 rows in cuBLAS's order of sums, on GPUs with wgmma."""

from __future__ import annotations

from ctypes import c_int, c_void_p
from functools import lru_cache
from typing import TYPE_CHECKING, NamedTuple

from memreclaim_kernels import blocks
from memreclaim_kernels.cuda._driver import Kernel
from memreclaim_kernels.cuda._tensormap import activation_map
from memreclaim_kernels.cuda._wgmma import wgmma_shared_header

if TYPE_CHECKING:
    import torch

_THREADS = 13 * 32
_TRIGGER_STEP = 4
"""Stage after which the next kernel may start: 6.7 us at 8 rows, 7.1 when it starts at once (H200)."""


class Ring(NamedTuple):
    """Shape of a ``mid`` block: padded tokens, blocks that share activations, columns of a stage, stages."""

    tokens: int
    cluster: int
    bk: int
    stages: int

    def shared_bytes(self) -> int:
        """Dynamic shared memory of a block."""
        activations, weights = self.tokens * self.bk * 2, 16 * self.bk * 2
        return self.stages * (activations + weights + 32)


def ring_for(rows: int, splits: int) -> Ring:
    """Ring of a row count.

    Stages of 256 columns: at 128 the same bytes in flight took 1.5 us longer. No cluster: sharing activations through
    multicast cost 0.5 us at two blocks and 3 at four. Split chains end at multiples of 64 columns, so they take 128.
    """
    tokens = next(size for size in (8, 16, 32, 48, 64) if rows <= size)
    return Ring(tokens, 1, 256 if splits == 1 else 128, 4)


@lru_cache(maxsize=256)
def mid_kernel(device: int, depth: int, ring: Ring, splits: int, trigger: int = _TRIGGER_STEP) -> Kernel:
    """The compiled kernel of a ring shape."""
    defines = (
        ("DEPTH", depth), ("TOKENS", ring.tokens), ("CLUSTER", ring.cluster), ("BK", ring.bk), ("STAGES", ring.stages),
        ("SPLITS", min(splits, 2)), ("TRIGGER_STEP", trigger),
    )
    return Kernel(
        "mid", "mid", defines, device, threads=_THREADS, shared=ring.shared_bytes(), cluster=ring.cluster,
        generated=(("wgmma_shared.cuh", wgmma_shared_header()),),
    )


def launch_mid(
    o: torch.Tensor, codes: torch.Tensor, exponents: torch.Tensor, out: torch.Tensor, ring: Ring, splits: int = 1,
    trigger: int = _TRIGGER_STEP,
) -> None:
    """Launch with a given ring. Shapes: ``o [T, G, D]``, ``out [T, G, R]``, T at most the ring's tokens."""
    groups, rank, depth = blocks.shape_of(codes)
    columns = -(-(depth // 64) // splits) * 64
    mid_kernel(o.get_device(), depth, ring, splits, trigger).launch(
        (rank // 16, 1, groups), activation_map(o, 64, ring.tokens // ring.cluster),
        c_int(0 if groups > 1 and o.stride(1) == 0 else 1), c_void_p(codes.data_ptr()), c_void_p(exponents.data_ptr()),
        c_void_p(out.data_ptr()), c_int(o.shape[0]), c_int(rank), c_int(columns),
    )


def mid(o: torch.Tensor, codes: torch.Tensor, exponents: torch.Tensor, out: torch.Tensor, splits: int = 1) -> None:
    """1..64 rows in cuBLAS's order: one ascending chain over K, or ``splits`` chains added ascending.

    Shapes: ``o [T, G, D]``, ``out [T, G, R]``. Deterministic.
    """
    launch_mid(o, codes, exponents, out, ring_for(o.shape[0], splits), splits)
