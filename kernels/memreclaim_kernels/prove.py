"""Prove a twin on CUDA: decode in registers and compare with the bf16 weight, bit for bit, without a bf16 copy."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from memreclaim_kernels.tiles import load_tile

_ROWS = 1
"""Row tiles a program compares: 16 rows."""
_COLS = 8
"""Column tiles a program compares: 256 columns, so that the weight is read in runs of 512 bytes."""
_WARPS = 4


@triton.jit  # type: ignore[untyped-decorator]
def _prove_kernel(
    codes: tl.tensor,  # int32 [G, R/16, D/32, 128]
    exponents: tl.tensor,  # uint8 [G, R/32, D/32]
    weight: tl.tensor,  # int16 [G, R, D]
    count: tl.tensor,  # int64 [1], starts at 0
    first: tl.tensor,  # uint64 [1], starts at the largest value, which is -1 as int64
    row_tiles: tl.tensor,
    col_tiles: tl.tensor,
    ROWS: tl.constexpr,
    COLS: tl.constexpr,
) -> None:
    col_tile = tl.program_id(0) * COLS
    row_tile = tl.program_id(1) * ROWS
    group = tl.program_id(2).to(tl.int64)
    decoded = load_tile(
        codes + group * row_tiles * col_tiles * 128,
        exponents + group * (row_tiles // 2) * col_tiles,
        row_tile,
        row_tiles,
        col_tile,
        col_tiles,
        col_tiles,
        ROWS,
        COLS,
    ).to(tl.int16, bitcast=True)
    row = row_tile * 16 + tl.arange(0, ROWS * 16)
    col = col_tile * 32 + tl.arange(0, COLS * 32)
    inside = (row < row_tiles * 16)[:, None] & (col < col_tiles * 32)[None, :]
    flat = (group * row_tiles * 16 + row[:, None]) * (col_tiles * 32) + col[None, :]
    expected = tl.load(weight + flat, inside, 0)
    differs = (decoded != expected) & inside
    mismatched = tl.sum(tl.sum(differs.to(tl.int32), 1), 0)
    if mismatched > 0:
        # Integer atomics commute: count and minimum do not depend on the order of programs.
        tl.atomic_add(count, mismatched.to(tl.int64), sem="relaxed")
        lowest = tl.min(tl.min(tl.where(differs, flat, 0x7FFFFFFFFFFFFFFF), 1), 0)
        tl.atomic_min(first, lowest.to(tl.uint64), sem="relaxed")


def prove(codes: torch.Tensor, exponents: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """Count of elements whose 16 bits differ from a contiguous bf16 ``[G, R, D]``, and flat index of the first or -1.

    Returns int64 ``[2]`` on the weight's device, without waiting for it.
    """
    groups, row_tiles, col_tiles, _ = codes.shape
    verdict = torch.arange(0, -2, -1, dtype=torch.int64, device=weight.device)  # [0, -1] in one launch, no host copy
    grid = (triton.cdiv(col_tiles, _COLS), triton.cdiv(row_tiles, _ROWS), groups)
    _prove_kernel[grid](
        codes.view(torch.int32),
        exponents,
        weight.view(torch.int16),
        verdict[:1],
        verdict.view(torch.uint64)[1:],
        row_tiles,
        col_tiles,
        _ROWS,
        _COLS,
        num_warps=_WARPS,
    )
    return verdict
