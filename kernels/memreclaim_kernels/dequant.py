"""Dequantise a twin on CUDA: packed codes and exponents to the exact bf16 weight."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from memreclaim_kernels import blocks
from memreclaim_kernels.tiles import load_tile

_ROWS = 1
"""Row tiles a program decodes: 16 rows."""
_COLS = 8
"""Column tiles a program decodes: 256 columns. Wider stores were what took a layer from 8.6 to 7.7 us on an H200."""
_WARPS = 4
"""4096 elements a program are 32 a thread: 32 bytes of codes and 64 of bf16."""


@triton.jit  # type: ignore[untyped-decorator]
def _dequantize_kernel(
    codes: tl.tensor,
    exponents: tl.tensor,
    out: tl.tensor,
    row_tiles: tl.tensor,
    col_tiles: tl.tensor,
    ROWS: tl.constexpr,
    COLS: tl.constexpr,
) -> None:
    col_tile = tl.program_id(0) * COLS
    row_tile = tl.program_id(1) * ROWS
    group = tl.program_id(2).to(tl.int64)
    values = load_tile(
        codes + group * row_tiles * col_tiles * 128,
        exponents + group * (row_tiles // 2) * col_tiles,
        row_tile,
        row_tiles,
        col_tile,
        col_tiles,
        col_tiles,
        ROWS,
        COLS,
    )
    row = row_tile * 16 + tl.arange(0, ROWS * 16)
    col = col_tile * 32 + tl.arange(0, COLS * 32)
    inside = (row < row_tiles * 16)[:, None] & (col < col_tiles * 32)[None, :]
    offset = (group * row_tiles * 16 + row[:, None]) * (col_tiles * 32) + col[None, :]
    tl.store(out + offset, values, inside)


def dequantize(codes: torch.Tensor, exponents: torch.Tensor) -> torch.Tensor:
    """uint8 ``[G, R/16, D/32, 512]``, uint8 ``[G, R/32, D/32]`` -> bf16 ``[G, R, D]``, a new tensor."""
    groups, row_tiles, col_tiles, _ = codes.shape
    out = torch.empty(blocks.shape_of(codes), dtype=torch.bfloat16, device=codes.device)
    grid = (triton.cdiv(col_tiles, _COLS), triton.cdiv(row_tiles, _ROWS), groups)
    _dequantize_kernel[grid](
        codes.view(torch.int32), exponents, out, row_tiles, col_tiles, _ROWS, _COLS, num_warps=_WARPS
    )
    return out
