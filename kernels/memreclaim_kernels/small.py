"""One to eight rows: every program holds 16 or more weight rows and all tokens, and runs the whole depth.

Orders of sums: ``chain`` (cuBLAS), and ``splits8``, that of SGLang's 2..8-row kernel: 8 chains over an eighth of the
depth each, added as ``(((p0+p2)+p4)+p6) + (((p1+p3)+p5)+p7)`` (0 of 884,736 outputs differed on an H200, five other
orders did in 1 to 14 of 150,000). Both run in one program: no partial sums in memory and no second launch, which cost
stock 1.5 of 8.0 us.
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

_BLOCK_M = 16
"""Tokens of a tile; 8 would do for ``mma.sync`` with the weight first, Triton's dot wants at least 16."""
_MAX_ROWS = 8


# Not specialised for a row count: a count of 1 or a multiple of 16 would compile again, perhaps in a graph capture.
@triton.jit(do_not_specialize=["tokens"])  # type: ignore[untyped-decorator]
def _small_kernel(
    o: tl.tensor,  # bf16 [T, G, D]
    tokens: tl.tensor,
    row_stride: tl.tensor,
    group_stride: tl.tensor,
    codes: tl.tensor,  # int32 [G, R/16, D/32, 128]
    exponents: tl.tensor,  # uint8 [G, R/32, D/32]
    out: tl.tensor,  # bf16 [T, G, R]
    groups: tl.tensor,
    row_tiles: tl.tensor,
    col_tiles: tl.tensor,
    SPLITS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    ROWS: tl.constexpr,
    COLS: tl.constexpr,
    STAGES: tl.constexpr,
) -> None:
    row_tile = tl.program_id(0) * ROWS
    group = tl.program_id(1).to(tl.int64)
    o += group * group_stride
    codes += group * row_tiles * col_tiles * 128
    exponents += group * (row_tiles // 2) * col_tiles
    token = tl.arange(0, BLOCK_M).to(tl.int64)
    if SPLITS == 1:
        total = chain(
            o, token, tokens, row_stride, codes, exponents, row_tile, row_tiles, 0, col_tiles, col_tiles,
            BLOCK_M, ROWS, COLS, STAGES,
        )  # fmt: skip
    else:
        # -0.0 is the one start that leaves the first split as it is.
        even = tl.full((ROWS * 16, BLOCK_M), -0.0, tl.float32)
        odd = tl.full((ROWS * 16, BLOCK_M), -0.0, tl.float32)
        width = col_tiles // SPLITS
        for pair in range(SPLITS // 2):
            begin = pair * 2 * width
            even += chain(
                o, token, tokens, row_stride, codes, exponents, row_tile, row_tiles, begin, begin + width, col_tiles,
                BLOCK_M, ROWS, COLS, STAGES,
            )  # fmt: skip
            begin += width
            odd += chain(
                o, token, tokens, row_stride, codes, exponents, row_tile, row_tiles, begin, begin + width, col_tiles,
                BLOCK_M, ROWS, COLS, STAGES,
            )  # fmt: skip
        total = even + odd
    row = row_tile * 16 + tl.arange(0, ROWS * 16)
    offset = (token[None, :] * groups + group) * (row_tiles * 16) + row[:, None]
    tl.store(out + offset, round_to_bf16(total), (token < tokens)[None, :] & (row < row_tiles * 16)[:, None])


def launch(o: torch.Tensor, codes: torch.Tensor, exponents: torch.Tensor, plan: Plan) -> torch.Tensor:
    """Project 1..8 tokens: bf16 ``[T, G, D]``, last stride 1 -> bf16 ``[T, G, R]``; deterministic.

    The op has checked the operands, ``plan_supports`` the plan.
    """
    if o.shape[0] > _MAX_ROWS:
        message = f"small takes at most {_MAX_ROWS} rows, not {o.shape[0]}"
        raise ValueError(message)
    groups, rank, _ = blocks.shape_of(codes)
    row_tiles, col_tiles = codes.shape[1:3]
    out = torch.empty((o.shape[0], groups, rank), dtype=torch.bfloat16, device=o.device)
    tile_rows = plan.option("block_n", 16) // blocks.TILE_ROWS
    _small_kernel[(triton.cdiv(row_tiles, tile_rows), groups)](
        o,
        o.shape[0],
        o.stride(0),
        o.stride(1),
        codes.view(torch.int32),
        exponents,
        out,
        groups,
        row_tiles,
        col_tiles,
        8 if plan.order == "splits8" else 1,
        _BLOCK_M,
        tile_rows,
        plan.option("block_k", 128) // blocks.TILE_COLS,
        plan.option("stages", 3),
        num_warps=plan.option("warps", 4),
    )
    return out
