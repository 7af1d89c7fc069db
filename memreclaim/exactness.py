"""Whether a weight of a checkpoint has an exact twin, in bounded memory.

Most weights need no decoding. A code without NaN has at most 4 significant bits, so at scales at which neither bf16 nor
fp32 goes subnormal or overflows every product is exact, and any 32x32 block of such products has a twin: exactness is
then a scan of bytes at the speed of the disk. What the scan cannot settle (scales near the ends of the range, NaN
codes, fp32 scales that are no powers of two, bf16 weights) is dequantised, encoded and compared, slab by slab.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from memreclaim.checkpoint import Checkpoint, block_of, dequantize_wo_a
from memreclaim.errors import CheckpointError

if TYPE_CHECKING:
    import torch

    from memreclaim.shard import TensorInfo

BLOCK = 32
"""Rows and columns of a twin's block; :data:`memreclaim_kernels.blocks.BLOCK`, which importing would load torch."""
_SAFE_EXPONENTS = (10, 246)
"""Scale bytes at which the smallest code (2**-9) stays normal in fp32 and bf16, and the largest (448) stays finite."""
_SLAB_ELEMENTS = 128 * 4096
_SMALLEST_BLOCK = 16
"""Fewest elements per scale: below, a tensor of scales would no longer be small beside its weight."""

Bytes = np.ndarray[tuple[int, ...], np.dtype[np.uint8]]


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
        return None, _mismatched(checkpoint, info, None)
    if info.dtype != "F8_E4M3":
        raise CheckpointError(info.file, f"{name} has dtype {info.dtype}, neither F8_E4M3 nor BF16")
    scale_name = checkpoint.scale_name(name)
    if scale_name is None:
        raise CheckpointError(info.file, f"{name} is F8_E4M3, but the checkpoint holds no scale for it")
    scales = checkpoint.info(scale_name)
    block = _scale_block(info, scales)
    exponents = _exponents(checkpoint, scales)
    settled = exponents is not None and _is_exact_by_scan(checkpoint, info, exponents, block)
    return block, 0 if settled else _mismatched(checkpoint, info, scales)


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


def _is_exact_by_scan(checkpoint: Checkpoint, codes: TensorInfo, exponents: Bytes, block: tuple[int, int]) -> bool:
    """Whether bytes alone show that every element has an exact twin; False means that it must be computed."""
    if block[0] % BLOCK or block[1] % BLOCK:
        return False
    if exponents.min() < _SAFE_EXPONENTS[0] or exponents.max() > _SAFE_EXPONENTS[1]:
        return False
    return not any(_has_nan(chunk) for chunk in checkpoint.shard(codes).chunks(codes))


def _has_nan(codes: Bytes) -> bool:
    """Whether e4m3 bytes hold a NaN, 0x7f or 0xff: the largest byte read with a sign or without; no copy."""
    return bool(codes.max() == 0xFF or codes.view(np.int8).max() == 0x7F)  # noqa: PLR2004


def _exponents(checkpoint: Checkpoint, scales: TensorInfo) -> Bytes | None:
    """Exponent bytes of a tensor's scales, or None for fp32 scales that are no normal powers of two.

    Raises :class:`CheckpointError` for NaN and infinite scales: no engine could load them.
    """
    raw = checkpoint.shard(scales).read(scales)
    if scales.dtype == "F8_E8M0":
        exponents = np.frombuffer(raw, np.uint8)
        if exponents.max() == 0xFF:  # noqa: PLR2004
            raise CheckpointError(scales.file, f"{scales.name} holds NaN (byte 255)")
        return exponents
    if scales.dtype != "F32":
        raise CheckpointError(scales.file, f"{scales.name} has dtype {scales.dtype}, neither F8_E8M0 nor F32")
    values = np.frombuffer(raw, np.float32)
    if not np.isfinite(values).all():
        raise CheckpointError(scales.file, f"{scales.name} holds NaN or infinity")
    bits = values.view(np.uint32)
    is_power = (bits & 0x807FFFFF) == 0
    return (bits >> 23).astype(np.uint8) if is_power.all() else None


def _mismatched(checkpoint: Checkpoint, info: TensorInfo, scales: TensorInfo | None) -> int:
    """How many elements of a weight have no exact twin, by computing the weight and its twin slab by slab."""
    import torch

    rows, columns = info.shape
    factors = None if scales is None else checkpoint.tensor(scales.name)
    step = max(BLOCK, _SLAB_ELEMENTS // columns // BLOCK * BLOCK)
    mismatched = start = 0
    for chunk in checkpoint.shard(info).chunks(info, step * (info.nbytes // rows)):
        raw = torch.from_numpy(chunk.copy())
        if factors is None:
            weight = raw.view(torch.bfloat16).view(-1, columns)
        else:
            codes = raw.view(torch.float8_e4m3fn).view(-1, columns)
            row_of_scale = torch.arange(start, start + len(codes)) // (rows // factors.shape[0])
            weight = dequantize_wo_a(codes, factors.float()[row_of_scale])
        mismatched += _mismatched_in(weight)
        start += step
    return mismatched


def _mismatched_in(weight: torch.Tensor) -> int:
    """Elements of a bf16 slab ``[rows, columns]`` without an exact twin; in a slab of broken blocks only NaNs count."""
    import torch

    from memreclaim_kernels import blocks, reference

    finite = weight.isfinite()
    broken = weight.numel() - int(finite.sum())
    clean = torch.where(finite, weight, 0) if broken else weight
    grouped = clean.unsqueeze(0)
    if not blocks.is_blocked(tuple(grouped.shape)):
        return broken
    codes, exponents = reference.encode(grouped)
    return broken + int(reference.prove(codes, exponents, grouped)[0])
