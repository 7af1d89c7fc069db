"""The ``mid`` kernel: cuBLAS's order of sums where one wave of small blocks fills the chip, on GPUs with wgmma."""

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

_MULTIPROCESSORS = 132
_SHARED_BYTES = 227 * 1024
_SIZES = (16, 32, 64)
_TOKENS = (8, 16, 32, 48, 64)
"""Token counts of a block that are compiled; 24 took as long as 32."""
_FEW_TOKENS = 32
_DEEP = ((256, 8), (256, 4), (128, 8), (128, 4))
_SHORT = ((128, 8), (256, 4), (128, 4))
"""(Columns, number) of stages in order of preference. Deep while blocks are small: 8 stages of 256 columns took 6.4 us
at 16 rows, 4 of them 6.8, and stages of 128 columns 1.5 us more for the same bytes in flight. Short once 16 warps
decode: 96 rows took 9.0 us against 9.4. H200."""
_TRIGGER_STEP = 4
"""Stage after which the next kernel may start: 6.7 us at 8 rows, 7.1 when it starts at once (H200)."""


class Ring(NamedTuple):
    """Shape of a ``mid`` block: tokens, weight rows, columns of a stage, stages, warps that decode."""

    tokens: int
    rows: int
    bk: int
    stages: int
    decoders: int = 8

    def shared_bytes(self) -> int:
        """Dynamic shared memory of a block."""
        return self.stages * ((self.tokens + self.rows) * self.bk * 2 + 16)


def ring_for(tokens: int, shape: blocks.WeightShape, splits: int = 1) -> Ring | None:
    """Ring of a call, or None when no block shape covers it in one wave: then ``chain`` is the kernel.

    The fewest weight rows a block that fit, since each code is decoded once per block of tokens. Sixteen warps decode
    where eight cannot keep up (96 rows: 9.0 us against 9.5; at 16 weight rows they cost 0.4). Split chains end at
    multiples of 128 columns.
    """
    for rows in _SIZES:
        across = _MULTIPROCESSORS // (shape.groups * shape.rank // rows)
        padded = next((size for size in _TOKENS if tokens <= size * across), None)
        if padded is None:
            continue
        many = rows > _SIZES[0] and padded > _FEW_TOKENS
        for bk, stages in _SHORT if many and rows == _SIZES[1] else _DEEP:
            ring = Ring(padded, rows, bk, stages, 16 if many else 8)
            whole = shape.depth // bk % stages == 0 and (splits == 1 or bk == 128)  # noqa: PLR2004
            if whole and ring.shared_bytes() <= _SHARED_BYTES:
                return ring
    return None


@lru_cache(maxsize=256)
def mid_kernel(device: int, depth: int, ring: Ring, splits: int) -> Kernel:
    """The compiled kernel of a ring shape."""
    tiles, row_tiles = depth // blocks.TILE_COLS // ring.decoders, ring.rows // blocks.TILE_ROWS
    # A decoder's registers: 8 tiles of codes where blocks are small or decoders many, else 16.
    held = min((8 if row_tiles == 1 or ring.decoders > 8 else 16) // row_tiles, tiles)  # noqa: PLR2004
    trigger = min(_TRIGGER_STEP * 256, depth // 2) // ring.bk
    defines = (
        ("DEPTH", depth),
        ("TOKENS", ring.tokens),
        ("ROWS", ring.rows),
        ("BK", ring.bk),
        ("STAGES", ring.stages),
        ("DECODERS", ring.decoders),
        ("HOLD", held * row_tiles),
        ("SPLITS", min(splits, 2)),
        ("TRIGGER_STEP", trigger),
    )
    return Kernel(
        "mid",
        "mid",
        defines,
        device,
        threads=(ring.decoders + 5) * 32,
        shared=ring.shared_bytes(),
        generated=(("wgmma_shared.cuh", wgmma_shared_header(ring.rows)),),
    )


def launch_mid(
    o: torch.Tensor,
    codes: torch.Tensor,
    exponents: torch.Tensor,
    out: torch.Tensor,
    ring: Ring,
    splits: int = 1,
) -> None:
    """Launch with a given ring. Shapes: ``o [T, G, D]``, ``out [T, G, R]``."""
    groups, rank, depth = blocks.shape_of(codes)
    tokens = o.shape[0]
    columns = -(-(depth // 64) // splits) * 64
    mid_kernel(o.get_device(), depth, ring, splits).launch(
        (rank // ring.rows, -(-tokens // ring.tokens), groups),
        activation_map(o, 64, ring.tokens),
        c_int(0 if groups > 1 and o.stride(1) == 0 else 1),
        c_void_p(codes.data_ptr()),
        c_void_p(exponents.data_ptr()),
        c_void_p(out.data_ptr()),
        c_int(tokens),
        c_int(rank),
        c_int(columns),
    )


def mid(o: torch.Tensor, codes: torch.Tensor, exponents: torch.Tensor, out: torch.Tensor, splits: int = 1) -> None:
    """Rows in cuBLAS's order: one ascending chain over K, or ``splits`` chains added ascending.

    Shapes: ``o [T, G, D]``, ``out [T, G, R]``, T as far as :func:`ring_for` goes (512 at two groups of 1024).
    Deterministic.
    """
    ring = ring_for(o.shape[0], blocks.shape_of(codes), splits)
    assert ring is not None, "supports() said no"
    launch_mid(o, codes, exponents, out, ring, splits)
