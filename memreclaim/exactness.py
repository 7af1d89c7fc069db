"""Whether a weight of a checkpoint has an exact twin, in bounded memory and without torch.

Most weights need no decoding. A code without NaN has at most 4 significant bits, so at scales at which neither bf16 nor
fp32 goes subnormal or overflows every product is exact, and any 32x32 block of such products has a twin: exactness is
then a scan of bytes at the speed of the disk. Slabs that the scan cannot settle (scales near the ends of the range, NaN
codes, fp32 scales that are no powers of two) are dequantised as engines do, and bf16 weights are taken as they are. No
twin is built then either: an element has an exact code at its block's exponent or not, and its bits say which. Encoding
and comparing with the kernels' reference says the same (a test holds them together) but takes 46 CPU seconds per GB of
bf16.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING

import numpy as np

from memreclaim.checkpoint import Checkpoint, block_of
from memreclaim.errors import CheckpointError

if TYPE_CHECKING:
    from memreclaim.shard import TensorInfo

BLOCK = 32
"""Rows and columns of a twin's block; :data:`memreclaim_kernels.blocks.BLOCK`, which importing would load torch."""
_SAFE_EXPONENTS = (10, 246)
"""Scale bytes at which the smallest code (2**-9) stays normal in fp32 and bf16, and the largest (448) stays finite."""
_SLAB_ELEMENTS = 256 * 4096
_INFINITY = 0x7F80
_NEVER, _ALWAYS = np.iinfo(np.int16).min, np.iinfo(np.int16).max
_SMALLEST_BLOCK = 16
"""Fewest elements per scale: below, a tensor of scales would no longer be small beside its weight."""

Bytes = np.ndarray[tuple[int, ...], np.dtype[np.uint8]]
Halves = np.ndarray[tuple[int, ...], np.dtype[np.uint16]]
Floats = np.ndarray[tuple[int, ...], np.dtype[np.float32]]


def inexact_elements(checkpoint: Checkpoint, name: str) -> tuple[tuple[int, int] | None, int]:
    """Block of a weight's scales (None for bf16), and how many of its elements no twin holds.

    Such an element would decode to other bits, or is not finite. ``name`` is that of an ``F8_E4M3`` weight with
    scales or of a ``BF16`` one, ``[R, D]``. Raises :class:`CheckpointError`, naming file and tensor, for anything
    else, and for scales that are missing, NaN, or of a shape that does not divide the weight's.
    """
    info = checkpoint.info(name)
    if len(info.shape) != 2 or 0 in info.shape:  # noqa: PLR2004
        raise CheckpointError(info.file, f"{name} has shape {list(info.shape)}, not rows and columns")
    if info.dtype == "BF16":
        return None, _count(checkpoint, info, None)
    if info.dtype != "F8_E4M3":
        raise CheckpointError(info.file, f"{name} has dtype {info.dtype}, neither F8_E4M3 nor BF16")
    scale_name = checkpoint.scale_name(name)
    if scale_name is None:
        raise CheckpointError(info.file, f"{name} is F8_E4M3, but the checkpoint holds no scale for it")
    scales = checkpoint.info(scale_name)
    block = _scale_block(info, scales)
    return block, _count(checkpoint, info, _Scales(*_read_scales(checkpoint, scales), block))


def has_blocks(info: TensorInfo) -> bool:
    """Whether a weight is made of whole 32x32 blocks; without them it has no twin."""
    return not any(size % BLOCK for size in info.shape)


def _scale_block(info: TensorInfo, scales: TensorInfo) -> tuple[int, int]:
    try:
        block = block_of(info.shape, scales.shape)
    except ValueError as error:
        raise CheckpointError(scales.file, f"{scales.name}: {error}") from error
    if block[0] * block[1] < _SMALLEST_BLOCK:
        raise CheckpointError(
            scales.file, f"{scales.name} has a scale for every {block[0]}x{block[1]} elements: no block scales"
        )
    return block


def _has_nan(codes: Bytes) -> bool:
    """Whether e4m3 bytes hold a NaN, 0x7f or 0xff: the largest byte read with a sign or without; no copy."""
    return bool(codes.max() == 0xFF or codes.view(np.int8).max() == 0x7F)  # noqa: PLR2004


def _read_scales(checkpoint: Checkpoint, scales: TensorInfo) -> tuple[Bytes | None, Floats]:
    """Exponent bytes of a tensor's scales, None for fp32 ones that are no normal powers of two; and their fp32 values.

    Raises :class:`CheckpointError` for NaN and infinite scales: no engine could load them.
    """
    raw = checkpoint.shard(scales).read(scales)
    if scales.dtype == "F8_E8M0":
        exponents = np.frombuffer(raw, np.uint8)
        if exponents.max() == 0xFF:  # noqa: PLR2004
            raise CheckpointError(scales.file, f"{scales.name} holds NaN (byte 255)")
        factors = np.ldexp(np.float32(1), exponents.astype(np.int32) - 127)
        return exponents.reshape(scales.shape), factors.reshape(scales.shape)
    if scales.dtype != "F32":
        raise CheckpointError(scales.file, f"{scales.name} has dtype {scales.dtype}, neither F8_E8M0 nor F32")
    values = np.frombuffer(raw, np.float32).reshape(scales.shape)
    if not np.isfinite(values).all():
        raise CheckpointError(scales.file, f"{scales.name} holds NaN or infinity")
    bits = values.view(np.uint32)
    is_power = (bits & 0x807FFFFF) == 0
    return (bits >> 23).astype(np.uint8) if is_power.all() else None, values


@dataclass(frozen=True)
class _Scales:
    """The scales of one fp8 weight ``[R, D]``."""

    exponents: Bytes | None
    """Exponent bytes ``[R/b, D/c]``; None for fp32 scales that are no normal powers of two."""
    factors: Floats
    """Their fp32 values ``[R/b, D/c]``."""
    block: tuple[int, int]
    """b and c."""

    def settle(self, codes: Bytes, start: int) -> bool:
        """Whether bytes alone show that a slab of codes ``[n, D]``, from row ``start`` on, is exact."""
        if self.exponents is None or self.block[0] % BLOCK or self.block[1] % BLOCK:
            return False
        rows = self.exponents[start // self.block[0] : -(-(start + len(codes)) // self.block[0])]
        safe = rows.min() >= _SAFE_EXPONENTS[0] and rows.max() <= _SAFE_EXPONENTS[1]
        return bool(safe) and not _has_nan(codes)

    def dequantize(self, codes: Bytes, start: int) -> Halves:
        """bf16 bits of ``bf16(float(code) * float(scale))`` of such a slab, uint16 ``[n, D]``."""
        rows = np.arange(start, start + len(codes)) // self.block[0]
        with np.errstate(over="ignore"):
            products = _e4m3_values()[codes] * self.factors[rows].repeat(self.block[1], axis=1)
        bits = products.view(np.uint32)
        # Round to nearest, ties to even, on the integer; a NaN of these products stays one.
        return ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16)


def _count(checkpoint: Checkpoint, info: TensorInfo, scales: _Scales | None) -> int:
    """How many elements of a weight ``[R, D]`` have no exact twin, slab by slab; ``scales`` is None for a bf16 one.

    A weight that is not made of blocks has no twin anyway: nothing is counted.
    """
    if not has_blocks(info):
        return 0
    rows, columns = info.shape
    step = max(BLOCK, _SLAB_ELEMENTS // columns // BLOCK * BLOCK)
    total = start = 0
    for chunk in checkpoint.shard(info).chunks(info, step * (info.nbytes // rows)):
        if scales is None:
            total += count_inexact(np.frombuffer(chunk.tobytes(), np.uint16).reshape(-1, columns))
        elif not scales.settle(codes := chunk.reshape(-1, columns), start):
            total += count_inexact(scales.dequantize(codes, start))
        start += step
    return total


def count_inexact(weight: Halves) -> int:
    """Elements that a twin cannot hold: bf16 bits, uint16 ``[n, D]`` with n and D multiples of 32 -> their number.

    NaN and infinities count, and the rest of their block is judged as if they were zero.
    """
    rows, columns = weight.shape
    magnitude = weight & 0x7FFF
    if magnitude.max() >= _INFINITY:
        magnitude[magnitude >= _INFINITY] = 0
    peaks = magnitude.reshape(-1, BLOCK, columns).max(axis=1).reshape(-1, columns // BLOCK, BLOCK).max(axis=2)
    # The smallest exponent byte whose scale brings the peak to at most 448 = 1.75 * 2**8 (mantissa 0x60).
    exponents = ((peaks >> 7).astype(np.int16) - 8 + ((peaks & 0x7F) > 0x60)).clip(0)  # noqa: PLR2004
    # The finest step at that exponent is 2**(exponent - 136); the table counts from 2**-134.
    finest = (exponents - 2).repeat(BLOCK, axis=1)
    lowest = _lowest_bits()[weight].reshape(rows // BLOCK, BLOCK, columns)
    return int(np.count_nonzero(lowest < finest[:, None, :]))


@cache
def _lowest_bits() -> np.ndarray[tuple[int], np.dtype[np.int16]]:
    """For each bf16 pattern the exponent of its lowest set bit, counted from 2**-134.

    Zeros are always held and have the largest int16; NaN, infinities and values of more than e4m3's 4 significant bits
    are never held and have the smallest.
    """
    bits = np.arange(0x10000)
    field, fraction = (bits >> 7) & 0xFF, bits & 0x7F
    significand = np.where(field > 0, fraction | 0x80, fraction)
    lowest = significand & -significand
    exponent = np.maximum(field, 1) + np.log2(np.maximum(lowest, 1)).astype(np.int64)
    held = (significand < 16 * lowest) & (bits & 0x7FFF < _INFINITY)
    return np.where(significand == 0, _ALWAYS, np.where(held, exponent, _NEVER)).astype(np.int16)


@cache
def _e4m3_values() -> Floats:
    """fp32 value of each e4m3 byte: 4 exponent bits of bias 7, 3 mantissa bits, subnormals, one NaN of each sign."""
    code = np.arange(256)
    field, mantissa = (code >> 3) & 0xF, code & 7
    magnitude = np.where(field > 0, np.ldexp(8.0 + mantissa, field - 10), np.ldexp(1.0 * mantissa, -9))
    magnitude[(code & 0x7F) == 0x7F] = np.nan  # noqa: PLR2004
    signed: Floats = np.where(code < 0x80, magnitude, -magnitude).astype(np.float32)  # noqa: PLR2004
    return signed
