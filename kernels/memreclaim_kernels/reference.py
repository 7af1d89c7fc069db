"""What every kernel must compute, in plain torch, on any device.

These are the CPU implementations of the custom ops in :mod:`memreclaim_kernels.ops`, and the oracle the GPU kernels are
tested against. They work in integers, so that a flushed denormal or a library's rounding mode cannot change a bit,
and in strips of 32 rows x 1024 columns: that many elements (32,768) torch does not yet spread over threads, whose
barriers made this 100 times slower on a busy machine, and small enough to stay in a core's cache. Beside its result
no function here needs more than 1 MiB.
"""

from __future__ import annotations

from functools import lru_cache
from itertools import product
from typing import TYPE_CHECKING, NamedTuple

import torch

from memreclaim_kernels import blocks
from memreclaim_kernels.blocks import BLOCK

if TYPE_CHECKING:
    from collections.abc import Iterator

_MAGNITUDE = 0x7FFF
_INFINITY = 0x7F80
_E4M3_NAN = 0x7F
_NO_INDEX = -1
_STRIP_COLUMNS = 1024
LARGEST_SAFE_EXPONENT = 246
"""Above it the largest code overflows bf16."""
_FAST_EXPONENTS = (10, LARGEST_SAFE_EXPONENT)
"""Exponents at which no decoded value is subnormal or infinite, so that a multiplication cannot flush or overflow."""


def encode(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Nearest-below fp8 codes and smallest block exponents of a bf16 weight.

    A block's exponent is the smallest whose scale brings the block's largest magnitude to at most 448; an all-zero
    block gets 127. Elements that e4m3 cannot hold at that scale are truncated: only :func:`prove` says whether the
    twin is exact.

    Shapes: bf16 ``[G, R, D]`` -> uint8 codes ``[G, R/16, D/32, 512]``, uint8 exponents ``[G, R/32, D/32]``.
    """
    groups, rank, depth = weight.shape
    codes = torch.empty(
        (groups, rank // blocks.TILE_ROWS, depth // blocks.TILE_COLS, blocks.TILE_BYTES),
        dtype=torch.uint8,
        device=weight.device,
    )
    exponents = torch.empty((groups, rank // BLOCK, depth // BLOCK), dtype=torch.uint8, device=weight.device)
    for strip in _strips(weight.shape):
        natural, exponents[strip.blocks] = _encode_strip(weight[strip.elements].contiguous().view(torch.int16))
        codes[strip.tiles] = blocks.pack(natural.unsqueeze(0))[0]
    return codes, exponents


class _Strip(NamedTuple):
    """Where a strip stands in a weight, its codes and its exponents."""

    elements: tuple[int, slice, slice]
    tiles: tuple[int, slice, slice]
    blocks: tuple[int, int, slice]


def _strips(shape: tuple[int, ...]) -> Iterator[_Strip]:
    """Strips of a weight ``[G, R, D]`` in row-major order of their first elements."""
    groups, rank, depth = shape
    for group, block in product(range(groups), range(rank // BLOCK)):
        for left in range(0, depth, _STRIP_COLUMNS):
            right = min(left + _STRIP_COLUMNS, depth)
            columns = slice(left // BLOCK, right // BLOCK)
            yield _Strip(
                (group, slice(block * BLOCK, (block + 1) * BLOCK), slice(left, right)),
                (group, slice(2 * block, 2 * block + 2), columns),
                (group, block, columns),
            )


def _encode_strip(bits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Codes and exponents of one strip: int16 ``[32, C]`` -> uint8 ``[32, C]``, uint8 ``[C/32]``."""
    magnitude = bits & _MAGNITUDE
    peak = magnitude.view(BLOCK, -1, BLOCK).amax(dim=(0, 2)).int()
    exponents = _smallest_exponent(peak)
    # value = significand * 2**(exponent - 134); in units of e4m3's smallest step it is significand << shift.
    field = (magnitude >> 7).int()
    steps = torch.where(field > 0, magnitude & 0x7F | 0x80, magnitude).int()
    shift = field.clamp_min_(1).sub_(exponents.repeat_interleave(BLOCK)).add_(2)
    steps = steps.bitwise_left_shift_(shift.clamp(0, 17)).bitwise_right_shift_(shift.neg_().clamp_(0, 31))
    # steps < 2**18 is exact in fp32, whose exponent field is the bit length: no loop, no log2.
    octave = steps.float().view(torch.int32).bitwise_right_shift_(23).sub_(130).clamp_min_(0)
    code = steps.bitwise_right_shift_(octave).add_(octave.bitwise_left_shift_(3)).clamp_max_(_E4M3_NAN - 1)
    sign = (bits < 0).to(torch.uint8) << 7
    return code.to(torch.uint8).bitwise_or_(sign), exponents.to(torch.uint8)


def _smallest_exponent(peak: torch.Tensor) -> torch.Tensor:
    """Smallest exponent byte whose scale holds a block of largest magnitude ``peak`` (int32 bf16 bits, no sign)."""
    # 448 is 1.75 * 2**8: the top octave is usable up to mantissa 0x60, above that the next scale is needed.
    normal = (peak >> 7) - 8 + ((peak & 0x7F) > 0x60)  # noqa: PLR2004
    exponents = normal.clamp(0, blocks.MAX_EXPONENT)
    return torch.where(peak == 0, torch.full_like(exponents, blocks.EXPONENT_BIAS), exponents)


def decode(natural: torch.Tensor, exponents: torch.Tensor) -> torch.Tensor:
    """Exact bf16 values of e4m3 bytes in natural order: ``bf16(code * 2**(exponent - 127))``, rounded to nearest even.

    Shapes: uint8 ``[..., D]`` codes, uint8 exponents broadcastable to the codes -> bf16 like the codes. NaN codes
    give NaN.
    """
    table = _decode_table(str(natural.device))
    # A row of the table is 256 codes at one exponent: 64 KiB x 2 in all, gathered by one flat index.
    index = exponents.int() * 256 + natural
    return table[index.view(-1)].view(natural.shape).view(torch.bfloat16)


@lru_cache(maxsize=8)
def _decode_table(device: str) -> torch.Tensor:
    """bf16 bits of every (exponent, code) pair, int16 ``[256 * 256]``; made in parts, for the sake of memory."""
    return torch.cat([_decode_part(torch.arange(first, first + 32)) for first in range(0, 256, 32)]).to(device)


def _decode_part(exponents: torch.Tensor) -> torch.Tensor:
    """bf16 bits of all codes at each of ``exponents``, int16 ``[32 * 256]``, by integer arithmetic alone."""
    code = torch.arange(256, dtype=torch.int32).repeat(len(exponents))
    exponent = exponents.int().repeat_interleave(256)
    octave, mantissa = (code >> 3) & 0xF, code & 7
    # In units of 2**-9 * scale an e4m3 magnitude is an integer of at most 4 significant bits, below 2**18.
    steps = torch.where(octave > 0, (mantissa + 8) << (octave - 1).clamp_min(0), mantissa)
    length = torch.zeros_like(steps)
    for bit in range(18):
        length += steps >> bit > 0
    # Normal bf16 with value steps * 2**(exponent - 136): biased exponent field below, 7-bit fraction.
    field = exponent + length - 10
    fraction = torch.where(length > 0, (steps << 8 >> length.clamp_min(1)) & 0x7F, 0)
    normal = (field << 7) + fraction
    subnormal = _round_half_even(steps << 8, (11 - exponent).clamp(0, 27))
    magnitude = torch.where(field >= 1, normal, subnormal)
    magnitude = torch.where(field >= 255, _INFINITY, magnitude)  # noqa: PLR2004
    magnitude = torch.where(steps == 0, 0, magnitude)
    magnitude = torch.where(((code & 0x7F) == _E4M3_NAN) | (exponent == 255), 0x7FC0, magnitude)  # noqa: PLR2004
    bits = magnitude | ((code & 0x80) << 8)
    return (bits - ((bits & 0x8000) << 1)).to(torch.int16)


def _round_half_even(value: torch.Tensor, shift: torch.Tensor) -> torch.Tensor:
    """``value / 2**shift`` rounded to nearest, ties to even; int32, ``shift`` at most 27."""
    floor = value >> shift
    rest = value - (floor << shift)
    half = (1 << shift) >> 1
    up = (rest > half) | ((rest == half) & (floor % 2 == 1) & (shift > 0))
    return floor + up.int()


def dequantize(codes: torch.Tensor, exponents: torch.Tensor) -> torch.Tensor:
    """The weight a twin stands for: packed codes and exponents -> bf16 ``[G, R, D]``, a new tensor."""
    out = torch.empty(blocks.shape_of(codes), dtype=torch.bfloat16, device=codes.device)
    for strip in _strips(out.shape):
        out[strip.elements] = _decode_strip(codes[strip.tiles], exponents[strip.blocks])
    return out


def _decode_strip(tiles: torch.Tensor, exponents: torch.Tensor) -> torch.Tensor:
    """bf16 ``[32, C]`` of codes ``[2, C/32, 512]`` and exponents ``[C/32]``."""
    lowest, highest = torch.aminmax(exponents)
    if lowest < _FAST_EXPONENTS[0] or highest > _FAST_EXPONENTS[1]:
        return decode(blocks.unpack(tiles.unsqueeze(0))[0], exponents.repeat_interleave(BLOCK))
    # Two codes of one row at a time, as they stand in a word: 4x faster than one by one (22 against 86 ms for 8 MiB).
    columns = exponents.shape[0]
    words = tiles.view(torch.int32).view(2, columns, 8, 4, 2, 2)
    pairs = torch.empty((2, 2, 8, columns, 2, 2, 4), dtype=torch.int32, device=tiles.device)
    table = _pair_table(str(tiles.device))
    for half in range(2):
        shifted = words >> 8 if half else words
        index = (shifted & 0xFF) | ((shifted >> 8) & 0xFF00)
        pairs[:, half] = table.index_select(0, index.view(-1)).view(index.shape).permute(0, 2, 1, 4, 5, 3)
    factors = (exponents.to(torch.int16) << 7).view(torch.bfloat16)
    return pairs.view(torch.bfloat16).view(BLOCK, columns, BLOCK).mul_(factors[None, :, None]).view(BLOCK, -1)


@lru_cache(maxsize=8)
def _pair_table(device: str) -> torch.Tensor:
    """Two bf16 values for each two codes at scale 1, int32 ``[65536]``, the lower byte's value in the lower half."""
    unit = _decode_table("cpu").view(256, 256)[blocks.EXPONENT_BIAS]
    both = torch.arange(65536, dtype=torch.int32)
    lower, upper = unit.index_select(0, both & 0xFF), unit.index_select(0, both >> 8)
    return torch.stack((lower, upper), dim=1).view(torch.int32).view(-1).to(device)


def prove(codes: torch.Tensor, exponents: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """Compare a twin's decoded bits with a bf16 weight ``[G, R, D]`` on 16-bit patterns.

    Returns int64 ``[2]`` on the weight's device: how many elements differ, and the flat index of the first or -1.
    """
    mismatched, first = 0, weight.numel()
    _, rank, depth = weight.shape
    for strip in _strips(weight.shape):
        decoded = _decode_strip(codes[strip.tiles], exponents[strip.blocks])
        differs = decoded.view(torch.int16) != weight[strip.elements].view(torch.int16)
        count = int(differs.sum())
        if count:
            group, rows, columns = strip.elements
            row, column = divmod(int(differs.view(-1).byte().argmax()), differs.shape[1])
            first = min(first, (group * rank + rows.start + row) * depth + columns.start + column)
        mismatched += count
    return torch.tensor([mismatched, first if mismatched else _NO_INDEX], dtype=torch.int64, device=weight.device)


def grouped_projection(o: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """The stock path: ``out[t, g, r] = sum_d o[t, g, d] * weight[g, r, d]`` by the library's batched product.

    Shapes: ``[T, G, D]``, ``[G, R, D]`` -> ``[T, G, R]``. cuBLAS gives the same bits for ``bmm`` and ``einsum`` here.
    """
    return torch.einsum("tgd,grd->tgr", o, weight)
