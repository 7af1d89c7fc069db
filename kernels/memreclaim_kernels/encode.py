"""Encode a bf16 weight on CUDA: codes in tile order and the smallest block exponents, by integer arithmetic.

The same steps as :func:`memreclaim_kernels.reference.encode`, and the same bytes. Only the proof says whether they are
exact.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from memreclaim_kernels import blocks

_COLS = 4
"""Blocks of 32x32 a program encodes: 128 columns, 4096 elements, 32 a thread with 4 warps."""
_WARPS = 4


@triton.jit  # type: ignore[untyped-decorator]
def _encode_kernel(
    weight: tl.tensor,
    codes: tl.tensor,
    exponents: tl.tensor,
    row_tiles: tl.tensor,
    col_tiles: tl.tensor,
    COLS: tl.constexpr,
) -> None:
    col_tile = tl.program_id(0) * COLS
    block_row = tl.program_id(1)
    group = tl.program_id(2).to(tl.int64)
    row = block_row * 32 + tl.arange(0, 32)
    col = col_tile * 32 + tl.arange(0, COLS * 32)
    offset = (group * row_tiles * 16 + row[:, None]) * (col_tiles * 32) + col[None, :]
    bits = tl.load(weight + offset, (col < col_tiles * 32)[None, :], 0).to(tl.int32)
    magnitude = bits & 0x7FFF

    # Smallest scale that holds the block's peak: 448 is 1.75 * 2**8, so a fraction above 0x60 needs the next octave.
    peak = tl.max(tl.max(tl.reshape(magnitude, (32, COLS, 32)), 2), 0)
    next_octave = ((peak & 0x7F) > 0x60).to(tl.int32)  # noqa: PLR2004
    smallest = tl.minimum(tl.maximum((peak >> 7) - 8 + next_octave, 0), 254)
    biased = tl.where(peak == 0, 127, smallest)
    tile = col_tile + tl.arange(0, COLS)
    inside = tile < col_tiles
    tl.store(exponents + (group * (row_tiles // 2) + block_row) * col_tiles + tile, biased.to(tl.uint8), inside)

    # The value is significand * 2**(field - 134); in units of e4m3's smallest step it is significand << shift.
    scale = tl.reshape(tl.broadcast_to(biased[None, :, None], (32, COLS, 32)), (32, COLS * 32))
    field = magnitude >> 7
    significand = (magnitude & 0x7F) + tl.where(field > 0, 0x80, 0)
    shift = tl.maximum(field, 1) - scale + 2
    steps = (significand << tl.minimum(tl.maximum(shift, 0), 17)) >> tl.minimum(tl.maximum(-shift, 0), 31)
    # steps is below 2**18, so its fp32 exponent field is its bit length.
    octave = tl.maximum((steps.to(tl.float32).to(tl.int32, bitcast=True) >> 23) - 130, 0)
    code = tl.minimum((steps >> octave) + (octave << 3), 0x7E) | ((bits >> 8) & 0x80)

    #                                             tile half g  D/32   s  h  t  lo
    parts = tl.reshape(code.to(tl.uint8), (2, 2, 8, COLS, 2, 2, 4, 2))
    packed = tl.reshape(tl.permute(parts, (0, 3, 2, 6, 4, 5, 7, 1)), (2, COLS, 512))
    row_tile = group * row_tiles + block_row * 2 + tl.arange(0, 2)
    address = (row_tile[:, None] * col_tiles + tile[None, :])[:, :, None] * 512 + tl.arange(0, 512)[None, None, :]
    tl.store(codes + address, packed, inside[None, :, None])


def encode(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """bf16 ``[G, R, D]``, contiguous -> uint8 codes ``[G, R/16, D/32, 512]``, uint8 exponents ``[G, R/32, D/32]``."""
    groups, rank, depth = weight.shape
    row_tiles, col_tiles = rank // blocks.TILE_ROWS, depth // blocks.TILE_COLS
    codes = torch.empty((groups, row_tiles, col_tiles, blocks.TILE_BYTES), dtype=torch.uint8, device=weight.device)
    exponents = torch.empty((groups, row_tiles // 2, col_tiles), dtype=torch.uint8, device=weight.device)
    grid = (triton.cdiv(col_tiles, _COLS), rank // blocks.BLOCK, groups)
    _encode_kernel[grid](weight.view(torch.int16), codes, exponents, row_tiles, col_tiles, _COLS, num_warps=_WARPS)
    return codes, exponents
