"""Nine and more rows: tiles of tokens x weight rows, over the whole depth or, for ``free`` sums, a share of it.

Order of sums: ``chain`` with ``split_k`` 1. With ``split_k`` > 1 (order ``free``, published for GB10, whose 48 SMs a
16-token tile of G=2 does not fill otherwise) fp32 partial sums of every share go to a buffer of this call's own and a
second kernel adds them in ascending order: deterministic, but not the bits of the stock path.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import triton
import triton.language as tl

from memreclaim_kernels import blocks
from memreclaim_kernels.tiles import chain, round_to_bf16

if TYPE_CHECKING:
    from memreclaim_kernels.plan import Plan

_REDUCE_BLOCK = 1024
"""Outputs a program of the second kernel adds: 8 a thread with 4 warps, loads of 32 bytes."""


# Not specialised for a row count: a count of 1 or a multiple of 16 would compile again, perhaps in a graph capture.
@triton.jit(do_not_specialize=["tokens"])  # type: ignore[untyped-decorator]
def _mid_kernel(
    o: tl.tensor,  # bf16 [T, G, D]
    tokens: tl.tensor,
    row_stride: tl.tensor,
    group_stride: tl.tensor,
    codes: tl.tensor,  # int32 [G, R/16, D/32, 128]
    exponents: tl.tensor,  # uint8 [G, R/32, D/32]
    out: tl.tensor,  # bf16 [T, G, R], or fp32 [SPLIT_K, T, G, R]
    groups: tl.tensor,
    row_tiles: tl.tensor,
    col_tiles: tl.tensor,
    SPLIT_K: tl.constexpr,
    BLOCK_M: tl.constexpr,
    ROWS: tl.constexpr,
    COLS: tl.constexpr,
    STAGES: tl.constexpr,
) -> None:
    # Token tiles run fastest: the programs that share a weight tile run side by side, and it comes from memory once.
    token = (tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)).to(tl.int64)
    row_tile = tl.program_id(1) * ROWS
    group = (tl.program_id(2) // SPLIT_K).to(tl.int64)
    split = tl.program_id(2) % SPLIT_K
    share = tl.cdiv(tl.cdiv(col_tiles, SPLIT_K), COLS) * COLS
    total = chain(
        o + group * group_stride,
        token,
        tokens,
        row_stride,
        codes + group * row_tiles * col_tiles * 128,
        exponents + group * (row_tiles // 2) * col_tiles,
        row_tile,
        row_tiles,
        split * share,
        tl.minimum((split + 1) * share, col_tiles),
        col_tiles,
        BLOCK_M,
        ROWS,
        COLS,
        STAGES,
    )
    row = row_tile * 16 + tl.arange(0, ROWS * 16)
    offset = ((token[None, :] + split.to(tl.int64) * tokens) * groups + group) * (row_tiles * 16) + row[:, None]
    if SPLIT_K == 1:
        total = round_to_bf16(total)
    tl.store(out + offset, total, (token < tokens)[None, :] & (row < row_tiles * 16)[:, None])


@triton.jit(do_not_specialize=["numel"])  # type: ignore[untyped-decorator]
def _reduce_kernel(
    partial: tl.tensor, out: tl.tensor, numel: tl.tensor, SPLIT_K: tl.constexpr, BLOCK: tl.constexpr
) -> None:
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    total = tl.load(partial + at, at < numel)
    for split in range(1, SPLIT_K):
        total += tl.load(partial + split * numel + at, at < numel)
    tl.store(out + at, round_to_bf16(total), at < numel)


def launch(o: torch.Tensor, codes: torch.Tensor, exponents: torch.Tensor, plan: Plan) -> torch.Tensor:
    """Project any number of tokens: bf16 ``[T, G, D]``, last stride 1 -> bf16 ``[T, G, R]``; deterministic.

    The op has checked the operands, ``plan_supports`` the plan.
    """
    groups, rank, _ = blocks.shape_of(codes)
    row_tiles, col_tiles = codes.shape[1:3]
    tokens, split_k = o.shape[0], plan.option("split_k", 1)
    out = torch.empty((tokens, groups, rank), dtype=torch.bfloat16, device=o.device)
    partial = out if split_k == 1 else torch.empty((split_k, *out.shape), dtype=torch.float32, device=o.device)
    block_m = plan.option("block_m", 16)
    tile_rows = plan.option("block_n", 32) // blocks.TILE_ROWS
    _mid_kernel[(triton.cdiv(tokens, block_m), triton.cdiv(row_tiles, tile_rows), groups * split_k)](
        o,
        tokens,
        o.stride(0),
        o.stride(1),
        codes.view(torch.int32),
        exponents,
        partial,
        groups,
        row_tiles,
        col_tiles,
        split_k,
        block_m,
        tile_rows,
        plan.option("block_k", 128) // blocks.TILE_COLS,
        plan.option("stages", 3),
        num_warps=plan.option("warps", 4),
    )
    if split_k > 1:
        grid = (triton.cdiv(out.numel(), _REDUCE_BLOCK),)
        _reduce_kernel[grid](partial, out, out.numel(), split_k, _REDUCE_BLOCK)
    return out
