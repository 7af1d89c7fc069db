"""One row: a matrix-vector product without MMA, in the order of sums of SGLang's one-row kernel.

That kernel multiplies one weight row of D columns in a program of 4 warps and adds with ``tl.sum``. Its order, with
column ``c = rep * 1024 + warp * 256 + lane * 8 + e``: each thread adds its products in order of (rep, e); then lanes
16, 8, 4, 2 and 1 apart are added, then the warps as ``(w0 + w2) + (w1 + w3)``. This kernel writes the same sums out, so
that Triton's choice of layout cannot change them. A product of two bf16 is exact in fp32 unless it underflows, so
fusing must stay off.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import triton
import triton.language as tl

from memreclaim_kernels import blocks
from memreclaim_kernels.tiles import decode_byte, load_words, round_to_bf16, widen

if TYPE_CHECKING:
    from memreclaim_kernels.plan import Plan

_WARPS = 4
"""16 rows x 1024 columns are 128 values a thread at 4 warps, and G=2 gives 128 programs, one per SM of an H200."""


@triton.jit  # type: ignore[untyped-decorator]
def _add_products(
    total: tl.tensor, byte_0: tl.tensor, byte_1: tl.tensor, scale: tl.tensor, x_0: tl.tensor, x_1: tl.tensor
) -> tl.tensor:
    """Add 8 products a thread in ascending column order; ``total`` fp32 ``[8 g, 128 threads]``.

    A byte tensor is int32 ``[1, 32, 128]`` with words ``((g*4 + t)*2 + s)*2 + h``; column ``t*2 + lo`` of a thread is
    byte ``lo`` of word t. Thread ``tile * 4 + s * 2 + h``.
    """
    products_0 = decode_byte(byte_0, scale).to(tl.float32, bitcast=True) * x_0
    products_1 = decode_byte(byte_1, scale).to(tl.float32, bitcast=True) * x_1
    both = tl.reshape(tl.join(products_0, products_1), (32, 8, 2, 2, 4, 2))
    #                         g  tile sh lo t0 t1
    ordered = tl.permute(both, (1, 0, 4, 5, 3, 2))
    first, last = tl.split(ordered)
    t_0, t_1 = tl.split(first)
    t_2, t_3 = tl.split(last)
    for_t_0_even, for_t_0_odd = tl.split(tl.reshape(t_0, (8, 128, 2)))
    for_t_1_even, for_t_1_odd = tl.split(tl.reshape(t_1, (8, 128, 2)))
    for_t_2_even, for_t_2_odd = tl.split(tl.reshape(t_2, (8, 128, 2)))
    for_t_3_even, for_t_3_odd = tl.split(tl.reshape(t_3, (8, 128, 2)))
    total = ((total + for_t_0_even) + for_t_0_odd) + for_t_1_even
    total = ((total + for_t_1_odd) + for_t_2_even) + for_t_2_odd
    return (total + for_t_3_even) + for_t_3_odd


@triton.jit  # type: ignore[untyped-decorator]
def _add_threads(total: tl.tensor) -> tl.tensor:
    """Add 128 threads' sums, fp32 ``[8, 128]`` -> ``[8]``: a tree over lanes, then over warps.

    An axis of 2 has one order of addition.
    """
    total = tl.sum(tl.reshape(total, (8, 4, 2, 16)), 2)
    total = tl.sum(tl.reshape(total, (8, 4, 2, 8)), 2)
    total = tl.sum(tl.reshape(total, (8, 4, 2, 4)), 2)
    total = tl.sum(tl.reshape(total, (8, 4, 2, 2)), 2)
    total = tl.sum(total, 2)
    total = tl.sum(tl.reshape(total, (8, 2, 2)), 1)
    return tl.sum(total, 1)


@triton.jit  # type: ignore[untyped-decorator]
def _gemv_kernel(
    o: tl.tensor,
    group_stride: tl.tensor,
    codes: tl.tensor,
    exponents: tl.tensor,
    out: tl.tensor,
    row_tiles: tl.tensor,
    col_tiles: tl.tensor,
) -> None:
    row_tile = tl.program_id(0)
    group = tl.program_id(1).to(tl.int64)
    codes += group * row_tiles * col_tiles * 128
    exponents += group * (row_tiles // 2) * col_tiles
    word = tl.arange(0, 128)
    column = (word & 3) * 8 + ((word >> 2) & 3) * 2  # s*16 + h*8 + t*2
    rows = row_tile + tl.arange(0, 1)
    # -0.0 is the one start that leaves a first product of -0.0 as it is.
    upper = tl.full((8, 128), -0.0, tl.float32)
    lower = tl.full((8, 128), -0.0, tl.float32)
    for col_tile in range(0, col_tiles, 32):
        cols = col_tile + tl.arange(0, 32)
        inside = (rows < row_tiles)[:, None] & (cols < col_tiles)[None, :]
        words, scale = load_words(codes, exponents, rows, cols, inside, col_tiles)
        address = o + group * group_stride + cols[None, :, None] * 32 + column[None, None, :]
        x_0 = widen(tl.load(address, inside[:, :, None], 0.0))
        x_1 = widen(tl.load(address + 1, inside[:, :, None], 0.0))
        upper = _add_products(upper, words & 0xFF, (words >> 16) & 0xFF, scale, x_0, x_1)
        lower = _add_products(lower, (words >> 8) & 0xFF, (words >> 24) & 0xFF, scale, x_0, x_1)
    at = out + (group * row_tiles + row_tile) * 16 + tl.arange(0, 8)
    tl.store(at, round_to_bf16(_add_threads(upper)))
    tl.store(at + 8, round_to_bf16(_add_threads(lower)))


def launch(o: torch.Tensor, codes: torch.Tensor, exponents: torch.Tensor, plan: Plan) -> torch.Tensor:
    """Project one token: bf16 ``[1, G, D]``, last stride 1 -> bf16 ``[1, G, R]``; deterministic.

    Orders ``gemv`` and ``free``. The op has checked the operands, ``plan_supports`` the plan.
    """
    if o.shape[0] != 1:
        message = f"gemv takes 1 row, not {o.shape[0]}"
        raise ValueError(message)
    groups, rank, _ = blocks.shape_of(codes)
    row_tiles, col_tiles = codes.shape[1:3]
    out = torch.empty((1, groups, rank), dtype=torch.bfloat16, device=o.device)
    _gemv_kernel[(row_tiles, groups)](
        o,
        o.stride(1),
        codes.view(torch.int32),
        exponents,
        out,
        row_tiles,
        col_tiles,
        num_warps=plan.option("warps", _WARPS),
        enable_fp_fusion=False,
    )
    return out
