"""The CUDA C++ backend as plans and ops see it: what it offers, what it refuses, and calls that allocate their result.

Importing this module compiles nothing; NVRTC is looked for on the first question.
"""

from __future__ import annotations

from functools import cache
from typing import TYPE_CHECKING, Final, cast

import torch

from memreclaim_kernels import blocks, cuda
from memreclaim_kernels.blocks import WeightShape
from memreclaim_kernels.cuda import _nvrtc
from memreclaim_kernels.cuda._check import shape_refusal
from memreclaim_kernels.cuda._mid import ring_for
from memreclaim_kernels.plan import MID_ROWS, SMALL_ROWS, Plan

if TYPE_CHECKING:
    from collections.abc import Iterator

    from memreclaim_kernels.cuda._check import Family
    from memreclaim_kernels.plan import Device, Order

_MIN_CAPABILITY: Final = (8, 0)
"""First with MMA on bf16."""
_WGMMA_CAPABILITY: Final = (9, 0)
"""The one with wgmma, which ``mid`` and ``large`` are written in."""
_ORDERS: Final = {
    "gemv": ("gemv", "free"),
    "small": ("splits8", "free"),
    "mid": ("chain", "free"),
    "large": ("chain", "free"),
}
"""Orders of sums of each family; ``free`` is content with any."""
_MAX_SPLITS: Final = 4
"""cuBLAS cuts K into a few chains where one group's rows do not fill the GPU: G=1 below 192 rows on an H200."""
_ALIGNMENT: Final = 16
"""Bytes: activations are read as vectors, or by the copy engine, which wants rows and groups to start at multiples."""


@cache
def unavailable(device: Device) -> str | None:
    """Why this backend cannot be used on a device, or None."""
    if device.capability is None or device.capability < _MIN_CAPABILITY:
        return "needs a GPU with compute capability 8.0"
    try:
        _nvrtc.library()
    except cuda.CompileError as error:
        return str(error)
    return None


def offers(rows: int, shape: tuple[int, int, int], device: Device, order: Order) -> Iterator[Plan]:
    """Plans for a call that no table names, best first; legality is asked separately."""
    if rows <= SMALL_ROWS and order in ("splits8", "free"):
        yield Plan("small", "cuda", order)
    if rows == 1 and order in ("gemv", "free"):
        yield Plan("gemv", "cuda", order)
    if order in ("chain", "free") and device.capability == _WGMMA_CAPABILITY:
        for splits in range(1, _MAX_SPLITS + 1) if shape[0] == 1 and rows <= MID_ROWS else (1,):
            config = () if splits == 1 else (("splits", splits),)
            yield Plan(cuda.family_of(rows, WeightShape(*shape), splits), "cuda", order, config)


def refusal(plan: Plan, rows: int, shape: tuple[int, int, int], device: Device) -> str | None:
    """Why a plan of this backend cannot run a call, or None."""
    why = unavailable(device)
    if why is not None:
        return why
    if plan.path not in _ORDERS or plan.order not in _ORDERS[plan.path]:
        return f"this backend has no {plan.path} kernel that adds in order {plan.order}"
    weight, splits = WeightShape(*shape), plan.option("splits", 1)
    if plan.path in ("mid", "large") and device.capability != _WGMMA_CAPABILITY:
        return "needs wgmma: compute capability 9.0"
    if plan.path == "mid" and ring_for(rows, weight, splits) is None:
        return f"no block shape of mid covers {rows} rows in one wave"
    if plan.path == "small":
        # Activations of 8 rows, padded by 16 bytes a split, and fp32 partial sums of 16 weight rows.
        needed = 64 * (weight.depth // 4 + 16) + 64 * blocks.TILE_ROWS * 4
        if needed > device.shared_memory:
            return f"needs {needed} bytes of shared memory"
    return shape_refusal(cast("Family", plan.path), weight, splits)


def launch(o: torch.Tensor, codes: torch.Tensor, exponents: torch.Tensor, plan: Plan) -> torch.Tensor:
    """Project tokens: bf16 ``[T, G, D]``, last stride 1 -> bf16 ``[T, G, R]``; deterministic.

    Activations that are not aligned to 16 bytes are copied first: engines' are, and the values are the same.
    The op has checked the operands. Raises ``ValueError`` for more rows than the kernel takes.
    """
    tokens, path = o.size(0), plan.path
    if tokens > _MOST_ROWS.get(path, tokens):
        message = f"{path} takes at most {_MOST_ROWS[path]} rows, not {tokens}"
        raise ValueError(message)
    if _is_crooked(o):
        o = o.clone(memory_format=torch.contiguous_format)
    groups, row_tiles, _, _ = codes.shape
    out = torch.empty((tokens, groups, row_tiles * blocks.TILE_ROWS), dtype=torch.bfloat16, device=o.device)
    if path == "small":
        cuda.small(o, codes, exponents, out)
    elif path == "gemv":
        cuda.gemv(o, codes, exponents, out)
    else:
        (cuda.mid if path == "mid" else cuda.large)(o, codes, exponents, out, plan.option("splits", 1))
    return out


_MOST_ROWS: Final = {"gemv": 1, "small": SMALL_ROWS}


def _is_crooked(o: torch.Tensor) -> bool:
    """Whether rows or groups do not start at multiples of 16 bytes, or rows overlap."""
    row, group, _ = o.stride()
    aligned = o.data_ptr() % _ALIGNMENT == 0 and group % 8 == 0
    return not aligned or (o.size(0) > 1 and (row % 8 != 0 or row < o.size(2)))


def prepare(shape: WeightShape, device: torch.device, max_rows: int) -> None:
    """Compile and load what serves ``shape`` at up to ``max_rows`` rows, so that no call does it later."""
    index = torch.cuda.current_device() if device.index is None else device.index
    cuda.prepare(index, shape, range(1, max_rows + 1))


def encode(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """bf16 ``[G, R, D]``, contiguous -> uint8 codes ``[G, R/16, D/32, 512]``, uint8 exponents ``[G, R/32, D/32]``."""
    groups, rank, depth = weight.shape
    row_tiles, col_tiles = rank // blocks.TILE_ROWS, depth // blocks.TILE_COLS
    codes = torch.empty((groups, row_tiles, col_tiles, blocks.TILE_BYTES), dtype=torch.uint8, device=weight.device)
    exponents = torch.empty((groups, row_tiles // 2, col_tiles), dtype=torch.uint8, device=weight.device)
    cuda.encode(weight, codes, exponents)
    return codes, exponents


def prove(codes: torch.Tensor, exponents: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """Count of elements whose bits differ from bf16 ``[G, R, D]``, and flat index of the first or -1: int64 ``[2]``."""
    if not _whole(blocks.shape_of(codes)):
        from memreclaim_kernels.prove import prove as portable

        return portable(codes, exponents, weight)
    verdict = torch.empty(2, dtype=torch.int64, device=weight.device)
    cuda.prove(codes, exponents, weight, verdict)
    return verdict


def dequantize(codes: torch.Tensor, exponents: torch.Tensor) -> torch.Tensor:
    """uint8 ``[G, R/16, D/32, 512]``, uint8 ``[G, R/32, D/32]`` -> bf16 ``[G, R, D]``, a new tensor."""
    shape = blocks.shape_of(codes)
    if not _whole(shape):
        from memreclaim_kernels.dequant import dequantize as portable

        return portable(codes, exponents)
    out = torch.empty(shape, dtype=torch.bfloat16, device=codes.device)
    cuda.dequantize(codes, exponents, out)
    return out


def _whole(shape: WeightShape) -> bool:
    """Whether the dequantise and prove kernels take a shape; the portable ones take the rest."""
    return shape_refusal("dequantize", shape) is None and shape_refusal("prove", shape) is None
