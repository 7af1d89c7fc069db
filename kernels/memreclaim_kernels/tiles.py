"""Device code shared by the Triton kernels: loading packed tiles, decoding them to bf16, and the chain of sums.

Decoding is integers and two exact fp32 multiplications, so it compiles below sm89, where Triton has no e4m3 type. An
e4m3 magnitude placed at bit 20 is the fp32 number ``value * 2**-120`` (both formats have their fraction right below the
exponent field, biases 7 and 127), so ``value = bits * 2**120``, then ``* 2**(exponent - 127)``. Both products are exact
in fp32, subnormals included: a value has at most 4 significant bits and is at least ``2**-136``, and fp32 reaches down
to ``2**-149``. Rounding happens once, to bf16, to nearest even. Triton emits multiplications without flush to zero.
"""

from __future__ import annotations

import os

import triton
import triton.language as tl

INTERPRETED = tl.constexpr(os.environ.get("TRITON_INTERPRET") == "1")
"""Whether kernels run in Triton's interpreter, whose dot of bf16 operands is wrong by orders of magnitude, and whose
conversion from fp32 to bf16 cuts off instead of rounding."""


@triton.jit  # type: ignore[untyped-decorator]
def widen(values: tl.tensor) -> tl.tensor:
    """bf16 -> fp32, by bits."""
    return (values.to(tl.int16, bitcast=True).to(tl.int32) << 16).to(tl.float32, bitcast=True)


@triton.jit  # type: ignore[untyped-decorator]
def round_to_bf16(values: tl.tensor) -> tl.tensor:
    """fp32 -> bf16, to nearest even."""
    if INTERPRETED:
        bits = values.to(tl.int32, bitcast=True)
        bits = tl.where(values != values, 0x7FFF0000, bits + 0x7FFF + ((bits >> 16) & 1))  # noqa: PLR0124  NaN
        return (bits >> 16).to(tl.int16).to(tl.bfloat16, bitcast=True)
    return values.to(tl.bfloat16)


@triton.jit  # type: ignore[untyped-decorator]
def decode_byte(byte: tl.tensor, scale: tl.tensor) -> tl.tensor:
    """fp32 bits (int32) of the bf16 value of e4m3 bytes (int32, 0..255) times ``scale`` (fp32). NaN codes give NaN."""
    magnitude = byte & 0x7F
    sign = (byte & 0x80) << 24
    unit = (sign | (magnitude << 20)).to(tl.float32, bitcast=True) * 1.329227995784916e36  # 2**120
    bits = (unit * scale).to(tl.int32, bitcast=True)
    bits = tl.where(magnitude == 0x7F, sign | 0x7FC00000, bits)  # noqa: PLR2004
    # To nearest even by hand: Triton's interpreter loses bf16 subnormals in its own conversion.
    return (bits + 0x7FFF + ((bits >> 16) & 1)) & -0x10000


@triton.jit  # type: ignore[untyped-decorator]
def decode_scale(exponent: tl.tensor) -> tl.tensor:
    """``2**(exponent - 127)`` as fp32; byte 0 is the subnormal 2**-127, which no fp32 exponent field says."""
    bits = tl.where(exponent == 0, 0x00400000, exponent << 23)
    return bits.to(tl.float32, bitcast=True)


@triton.jit  # type: ignore[untyped-decorator]
def load_words(
    codes: tl.tensor, exponents: tl.tensor, rows: tl.tensor, cols: tl.tensor, inside: tl.tensor, col_tiles: tl.tensor
) -> tuple[tl.tensor, tl.tensor]:
    """Packed words, int32 ``[R/16, D/32, 128]``, and scales, fp32 ``[R/16, D/32, 1]``, of tiles ``rows`` x ``cols``.

    ``codes`` (int32 pointer) and ``exponents`` (uint8 pointer) start at one group. A tile is 128 contiguous words,
    which hold the bytes (column 0, row g), (column 0, row g + 8), (column 1, row g), (column 1, row g + 8) each. One
    exponent is loaded per tile and broadcast; tiles outside are zeros.
    """
    tile = rows[:, None] * col_tiles + cols[None, :]
    words = tl.load(codes + tile[:, :, None] * 128 + tl.arange(0, 128)[None, None, :], inside[:, :, None], 0)
    # Two row tiles share an exponent: a block is 32 rows.
    biased = tl.load(exponents + (rows // 2)[:, None] * col_tiles + cols[None, :], inside, 127)
    return words, decode_scale(biased.to(tl.int32))[:, :, None]


@triton.jit  # type: ignore[untyped-decorator]
def load_tile(
    codes: tl.tensor,
    exponents: tl.tensor,
    row_tile: tl.tensor,
    row_end: tl.tensor,
    col_tile: tl.tensor,
    col_end: tl.tensor,
    col_tiles: tl.tensor,
    ROWS: tl.constexpr,
    COLS: tl.constexpr,
) -> tl.tensor:
    """Decoded weight tile in natural order, bf16 ``[16 * ROWS, 32 * COLS]``; tiles from the ends on are zeros."""
    rows = row_tile + tl.arange(0, ROWS)
    cols = col_tile + tl.arange(0, COLS)
    inside = (rows < row_end)[:, None] & (cols < col_end)[None, :]
    words, scale = load_words(codes, exponents, rows, cols, inside, col_tiles)
    upper = tl.join(decode_byte(words & 0xFF, scale), decode_byte((words >> 16) & 0xFF, scale))
    lower = tl.join(decode_byte((words >> 8) & 0xFF, scale), decode_byte((words >> 24) & 0xFF, scale))
    values = (tl.join(upper, lower) >> 16).to(tl.int16).to(tl.bfloat16, bitcast=True)
    #                               R/16  D/32  g  t  s  h  lo half
    fragments = tl.reshape(values, (ROWS, COLS, 8, 4, 2, 2, 2, 2))
    natural = tl.permute(fragments, (0, 7, 2, 1, 4, 5, 3, 6))
    return tl.reshape(natural, (ROWS * 16, COLS * 32))


@triton.jit  # type: ignore[untyped-decorator]
def chain(
    o: tl.tensor,  # bf16, at one group
    token: tl.tensor,  # int64 [BM]
    tokens: tl.tensor,
    row_stride: tl.tensor,
    codes: tl.tensor,  # int32, at one group
    exponents: tl.tensor,  # uint8, at one group
    row_tile: tl.tensor,
    row_end: tl.tensor,
    col_begin: tl.tensor,
    col_end: tl.tensor,
    col_tiles: tl.tensor,
    BLOCK_M: tl.constexpr,
    ROWS: tl.constexpr,
    COLS: tl.constexpr,
    STAGES: tl.constexpr,
) -> tl.tensor:
    """Product of a weight tile with ``BLOCK_M`` tokens over columns ``32 * col_begin .. 32 * col_end``.

    Shape: fp32 ``[16 * ROWS, BLOCK_M]``. One accumulator in one ascending chain of k16 steps: the order in which cuBLAS
    adds on an H200 (0 of 127 million outputs differed). The weight is the first operand, so that 8 tokens do not fill
    up a tile of 16 weight rows.
    """
    total = tl.zeros((ROWS * 16, BLOCK_M), tl.float32)
    # The weight of a step is decoded one step ahead and carried by the loop. That overlaps decoding with MMA, and it is
    # what keeps the order: Triton looks from the dot back to its loads, and where it sees 8-bit loads or joins it packs
    # 4 or 8 neighbouring columns a thread (kWidth), so that an MMA step takes other 16 columns than the ascending ones.
    # It does not look past a loop's argument, and packs 2, as for bf16 loads.
    weight = load_tile(codes, exponents, row_tile, row_end, col_begin, col_end, col_tiles, ROWS, COLS)
    # Stages are asked for by hand: words that reach the dot by way of the loop are not in flight ahead otherwise.
    for col_tile in tl.range(col_begin, col_end, COLS, num_stages=STAGES):
        col = col_tile * 32 + tl.arange(0, COLS * 32)
        inside = (token < tokens)[None, :] & (col < col_end * 32)[:, None]
        x = tl.load(o + token[None, :] * row_stride + col[:, None], inside, 0.0)
        if INTERPRETED:
            total = tl.dot(widen(weight), widen(x), total, input_precision="ieee")
        else:
            total = tl.dot(weight, x, total)
        weight = load_tile(codes, exponents, row_tile, row_end, col_tile + COLS, col_end, col_tiles, ROWS, COLS)
    return total
