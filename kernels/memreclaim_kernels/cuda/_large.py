"""The ``chain`` kernel: cuBLAS's order of sums at any number of rows, on GPUs with wgmma."""

from __future__ import annotations

from ctypes import c_int, c_void_p
from functools import lru_cache
from typing import TYPE_CHECKING, NamedTuple

from memreclaim_kernels import blocks
from memreclaim_kernels.cuda._driver import Kernel
from memreclaim_kernels.cuda._tensormap import activation_map
from memreclaim_kernels.cuda._wgmma import wgmma_header

if TYPE_CHECKING:
    import torch


class Tile(NamedTuple):
    """Shape of a block and its cluster; the names are the macros of ``chain.cu``.

    ``wg`` warpgroups of 64 weight rows, ``bn`` tokens, clusters of ``cw`` blocks that share codes times ``ca`` that
    share activations, stages of ``bk`` columns; ``registers`` a consumer thread takes over from the producer.
    """

    wg: int
    bn: int
    cw: int
    ca: int
    bk: int
    stages: int
    min_blocks: int
    registers: int = 0

    def shared_bytes(self, depth: int) -> int:
        """Dynamic shared memory of a block."""
        factors = self.wg * 2 * (depth // blocks.BLOCK) * 4
        return self.stages * (self.bn * self.bk * 2 + self.wg * 64 * self.bk + 16) + factors


SQUARE = Tile(wg=2, bn=128, cw=2, ca=1, bk=128, stages=4, min_blocks=1)
WIDE = Tile(wg=2, bn=256, cw=2, ca=1, bk=64, stages=4, min_blocks=1, registers=240)
_MULTIPROCESSORS = 132


def tile_for(tokens: int, shape: blocks.WeightShape) -> Tile:
    """Tile of a call.

    Where one wave of 64 weight rows x up to 128 tokens covers it, that (two groups on an H200: 256 rows 12.0 us with 64
    tokens, 384 13.5 with 96, 512 15.6 with 128). Else the one whose waves take less time: a wave of ``WIDE`` takes as
    long as two of ``SQUARE`` (49 and 24 us).
    """
    across = _MULTIPROCESSORS // (shape.groups * shape.rank // 64)
    pair = 2 if across > 1 else 1
    for bn, stages in ((64, 8), (96, 4), (128, 4)):
        if across and -(-tokens // (bn * pair)) * pair <= across:
            return Tile(wg=1, bn=bn, cw=pair, ca=1, bk=128, stages=_fitting(stages, shape.depth), min_blocks=1)

    def waves(tile: Tile) -> int:
        needed = shape.rank // (tile.wg * 64) * shape.groups * -(-tokens // (tile.bn * tile.cw)) * tile.cw
        return -(-needed // _MULTIPROCESSORS)

    return SQUARE if waves(SQUARE) < 2 * waves(WIDE) else WIDE


def _fitting(stages: int, depth: int) -> int:
    """Stages, no more than divide the steps of 128 columns."""
    return stages if depth // 128 % stages == 0 else 4


@lru_cache(maxsize=256)
def chain_kernel(device: int, depth: int, tile: Tile, splits: int) -> Kernel:
    """The compiled kernel of a tile shape."""
    defines = (
        ("DEPTH", depth),
        ("WG", tile.wg),
        ("BN", tile.bn),
        ("CW", tile.cw),
        ("CA", tile.ca),
        ("BK", tile.bk),
        ("STAGES", tile.stages),
        ("MIN_BLOCKS", tile.min_blocks),
        ("REGISTERS", tile.registers),
        ("SPLITS", min(splits, 2)),
    )
    return Kernel(
        "chain",
        "chain",
        defines,
        device,
        threads=tile.wg * 128 + (128 if tile.registers else 32),
        shared=tile.shared_bytes(depth),
        cluster=tile.cw * tile.ca,
        generated=(("wgmma.cuh", wgmma_header(tile.bn)),),
    )


def launch_chain(
    o: torch.Tensor,
    codes: torch.Tensor,
    exponents: torch.Tensor,
    out: torch.Tensor,
    tile: Tile,
    splits: int = 1,
) -> None:
    """Launch with a given tile. Shapes: ``o [T, G, D]``, ``out [T, G, R]``."""
    groups, rank, depth = blocks.shape_of(codes)
    tokens = o.shape[0]
    columns = -(-(depth // 64) // splits) * 64
    grid = (rank // (tile.wg * 64) * tile.cw, -(-tokens // (tile.bn * tile.cw)), groups)
    chain_kernel(o.get_device(), depth, tile, splits).launch(
        grid,
        activation_map(o, 64, tile.bn // tile.ca),
        c_int(0 if groups > 1 and o.stride(1) == 0 else 1),
        c_void_p(codes.data_ptr()),
        c_void_p(exponents.data_ptr()),
        c_void_p(out.data_ptr()),
        c_int(tokens),
        c_int(rank),
        c_int(columns),
    )


def large(o: torch.Tensor, codes: torch.Tensor, exponents: torch.Tensor, out: torch.Tensor, splits: int = 1) -> None:
    """Rows in cuBLAS's order, any number: one ascending chain over K, or ``splits`` chains added ascending.

    Shapes: ``o [T, G, D]``, ``out [T, G, R]``. Deterministic.
    """
    launch_chain(o, codes, exponents, out, tile_for(o.shape[0], blocks.shape_of(codes)), splits)
