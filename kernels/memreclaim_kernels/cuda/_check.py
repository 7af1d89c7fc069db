"""What the CUDA kernels take: the only home of legality of this package."""

from __future__ import annotations

from functools import lru_cache
from typing import Literal, TypeAlias

import torch

from memreclaim_kernels import blocks
from memreclaim_kernels.cuda import _nvrtc
from memreclaim_kernels.cuda._mid import ring_for

Family: TypeAlias = Literal["gemv", "small", "small_mxfp8", "mid", "large", "dequantize", "prove", "encode"]

_GEMV_DEPTH = 4096
_CHAIN_DEPTHS = (1024, 2048, 4096)
_SPLIT_COLUMNS = 1024
_WHOLE_BLOCK = 8 * 4 * blocks.TILE_BYTES
_MAX_ROWS = 65536
_ROW_LIMIT = {"gemv": 1, "small": 8, "small_mxfp8": 8, "large": _MAX_ROWS}


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
    family: Family,
    codes: torch.Tensor,
    exponents: torch.Tensor,
    o: torch.Tensor | None = None,
    splits: int = 1,
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
    refusal = device_refusal(codes.get_device(), wgmma=family in ("mid", "large")) or shape_refusal(
        family, shape, splits
    )
    return refusal or (None if o is None else _activation_refusal(family, shape, o, splits))


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
        if shape.depth not in _CHAIN_DEPTHS or shape.rank % 128:
            return "needs a depth of 1024, 2048 or 4096 and a rank that is a multiple of 128"
        if splits < 1 or (splits > 1 and -(-(shape.depth // 64) // splits) * 64 % 128):
            return f"{splits} splits are not whole stages of 128 columns"
    return None


def family_of(tokens: int, shape: blocks.WeightShape, splits: int = 1) -> Literal["mid", "large"]:
    """Which kernel that keeps cuBLAS's order is the faster one for a call (both take it if ``mid`` does)."""
    ring = ring_for(tokens, shape, splits)
    # Blocks of 64 x 64: 13.2 us in mid, 12.0 in large, unless there is one block of tokens only.
    crowded = ring is not None and ring.rows == 64 and ring.tokens > 48 and tokens > ring.tokens  # noqa: PLR2004
    return "large" if ring is None or crowded else "mid"


def _activation_refusal(family: Family, shape: blocks.WeightShape, o: torch.Tensor, splits: int) -> str | None:  # noqa: PLR0911
    if o.dtype != torch.bfloat16 or o.dim() != 3 or tuple(o.shape[1:]) != (shape.groups, shape.depth):  # noqa: PLR2004
        return f"activations must be bf16 [T, {shape.groups}, {shape.depth}]"
    if o.shape[0] < 1 or o.shape[0] > _ROW_LIMIT.get(family, _MAX_ROWS):
        return f"{family} takes 1 to {_ROW_LIMIT.get(family, _MAX_ROWS)} rows"
    if family == "mid" and ring_for(o.shape[0], shape, splits) is None:
        return f"no block shape of mid covers {o.shape[0]} rows in one wave"
    if o.stride(2) != 1:
        return "activations must have a last stride of 1"
    if o.data_ptr() % 16 or o.stride(1) % 8 or (o.shape[0] > 1 and o.stride(0) % 8):
        return "rows and groups of activations must stand at multiples of 16 bytes"
    if family in ("mid", "large") and o.shape[0] > 1 and o.stride(0) < shape.depth:
        return "rows of activations must not overlap"
    return None


def supports(
    family: Family,
    codes: torch.Tensor,
    exponents: torch.Tensor,
    o: torch.Tensor | None = None,
    splits: int = 1,
) -> bool:
    """Whether ``family`` can run; see :func:`why_not`."""
    return why_not(family, codes, exponents, o, splits) is None
