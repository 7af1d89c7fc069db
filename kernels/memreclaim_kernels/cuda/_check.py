"""What the CUDA kernels take: the only home of legality of this package."""

from __future__ import annotations

from functools import lru_cache
from typing import Literal, TypeAlias

import torch

from memreclaim_kernels import blocks
from memreclaim_kernels.cuda import _nvrtc

Family: TypeAlias = Literal["gemv", "small", "small_mxfp8", "mid", "large", "dequantize", "prove", "encode"]

_GEMV_DEPTH = 4096
_SPLIT_COLUMNS = 1024
_WHOLE_BLOCK = 8 * 4 * blocks.TILE_BYTES
_MID_ROWS = 64
_MAX_ROWS = 65536
_ROW_LIMIT = {"gemv": 1, "small": 8, "small_mxfp8": 8, "mid": _MID_ROWS, "large": _MAX_ROWS}


@lru_cache(maxsize=16)
def device_refusal(index: int, *, wgmma: bool) -> str | None:
    """Why no kernel (or none with wgmma) runs on a device, or None."""
    capability = torch.cuda.get_device_capability(index)
    if capability < (8, 0):
        return "bf16 MMA needs compute capability 8.0"
    if wgmma and capability != (9, 0):
        return "wgmma exists on compute capability 9.0 only"
    try:
        _nvrtc.library()
    except _nvrtc.CompileError as error:
        return str(error)
    return None


def why_not(
    family: Family, codes: torch.Tensor, exponents: torch.Tensor, o: torch.Tensor | None = None, splits: int = 1,
) -> str | None:
    """Why ``family`` cannot run on a twin (and activations ``o [T, G, D]``), or None when it can.

    ``splits``: chains that cuBLAS cuts K into, for ``mid`` and ``large``. What the tensors hold is not looked at.
    """
    if not codes.is_cuda:
        return "needs a CUDA device"
    shape = blocks.shape_of(codes)
    if not (codes.is_contiguous() and exponents.is_contiguous()):
        return "codes and exponents must be contiguous"
    if codes.data_ptr() % 16 or exponents.data_ptr() % 4:
        return "codes must stand at a multiple of 16 bytes, exponents of 4"
    refusal = device_refusal(codes.get_device(), wgmma=family in ("mid", "large"))
    return refusal or shape_refusal(family, shape, splits) or (None if o is None else _activation_refusal(family, shape, o))


def shape_refusal(family: Family, shape: blocks.WeightShape, splits: int = 1) -> str | None:  # noqa: PLR0911
    """Why ``family`` does not take a weight shape, or None."""
    if not blocks.is_blocked(shape):
        return "rank and depth must be multiples of 32"
    if family in ("dequantize", "prove"):
        if shape.depth % 128 or shape.rank * shape.depth % _WHOLE_BLOCK:
            return "needs a depth that is a multiple of 128 and groups of whole 32 KiB of codes"
        return None
    if family == "gemv":
        return None if shape.depth == _GEMV_DEPTH else "the gemv order is defined for a depth of 4096"
    if family in ("small", "small_mxfp8"):
        if shape.depth % _SPLIT_COLUMNS or shape.depth > _GEMV_DEPTH:
            return "needs a depth of 1024, 2048, 3072 or 4096"
        return "needs G*R a multiple of 128" if family == "small_mxfp8" and shape.groups * shape.rank % 128 else None
    if family in ("mid", "large"):
        if shape.depth % _SPLIT_COLUMNS or shape.rank % 128:
            return "needs a depth that is a multiple of 1024 and a rank that is a multiple of 128"
        if splits < 1 or (splits > 1 and -(-(shape.depth // 64) // splits) * 64 % 128):
            return f"splits of {-(-(shape.depth // 64) // splits) * 64 if splits > 0 else 0} columns are not whole stages of 128"
    return None


def _activation_refusal(family: Family, shape: blocks.WeightShape, o: torch.Tensor) -> str | None:  # noqa: PLR0911
    if o.dtype != torch.bfloat16 or o.dim() != 3 or tuple(o.shape[1:]) != (shape.groups, shape.depth):  # noqa: PLR2004
        return f"activations must be bf16 [T, {shape.groups}, {shape.depth}]"
    if o.shape[0] < 1 or o.shape[0] > _ROW_LIMIT.get(family, _MAX_ROWS):
        return f"{family} takes 1 to {_ROW_LIMIT.get(family, _MAX_ROWS)} rows"
    if o.stride(2) != 1:
        return "activations must have a last stride of 1"
    if o.data_ptr() % 16 or o.stride(1) % 8 or (o.shape[0] > 1 and o.stride(0) % 8):
        return "rows and groups of activations must stand at multiples of 16 bytes"
    if family in ("mid", "large") and o.shape[0] > 1 and o.stride(0) < shape.depth:
        return "rows of activations must not overlap"
    return None


def supports(
    family: Family, codes: torch.Tensor, exponents: torch.Tensor, o: torch.Tensor | None = None, splits: int = 1,
) -> bool:
    """Whether ``family`` can run; see :func:`why_not`."""
    return why_not(family, codes, exponents, o, splits) is None
