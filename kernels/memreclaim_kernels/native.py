"""The CUDA C++ backend as plans and ops see it: what it offers, what it refuses, and calls that allocate their result.

Importing this module compiles nothing; NVRTC is looked for on the first question.
"""

from __future__ import annotations

from functools import cache
from typing import TYPE_CHECKING, Final

import torch

from memreclaim_kernels import blocks, cuda
from memreclaim_kernels.cuda import _nvrtc
from memreclaim_kernels.plan import SMALL_ROWS, Plan

if TYPE_CHECKING:
    from collections.abc import Iterator

    from memreclaim_kernels.blocks import WeightShape
    from memreclaim_kernels.plan import Device, Order

_MIN_CAPABILITY: Final = (8, 0)
"""First with MMA on bf16."""
_GEMV_DEPTH: Final = 4096
"""The gemv order is that of 128 threads with 32 columns each."""
_SPLITS: Final = 8
_SPLIT_COLUMNS: Final = 128
"""A split reads four exponents, 128 columns, as one word."""
_ELEMENTS_A_BLOCK: Final = 8 * 4 * blocks.TILE_BYTES
"""What a block of the dequantise and prove kernels handles whole: 8 warps, 4 tiles each."""


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
    del shape, device
    if rows == 1 and order in ("gemv", "free"):
        yield Plan("gemv", "cuda", order)
    if rows <= SMALL_ROWS and order in ("splits8", "free"):
        yield Plan("small", "cuda", order)


def refusal(plan: Plan, rows: int, shape: tuple[int, int, int], device: Device) -> str | None:  # noqa: PLR0911
    """Why a plan of this backend cannot run a call, or None."""
    why = unavailable(device)
    if why is not None:
        return why
    depth = shape[2]
    if plan.path == "gemv":
        if plan.order not in ("gemv", "free"):
            return f"the gemv kernel does not add in order {plan.order}"
        return None if depth == _GEMV_DEPTH and rows == 1 else "the gemv kernel takes 1 row and a depth of 4096"
    if plan.path == "small":
        if plan.order not in ("splits8", "free"):
            return f"the small kernel does not add in order {plan.order}"
        if rows > SMALL_ROWS or depth % (_SPLITS * _SPLIT_COLUMNS):
            return "the small kernel takes 1 to 8 rows and a depth that is a multiple of 1024"
        # Activations of 8 rows, padded by 16 bytes a split, and fp32 partial sums of 16 weight rows.
        needed = 8 * _SPLITS * (depth // _SPLITS * 2 + 16) + _SPLITS * 8 * blocks.TILE_ROWS * 4
        return f"needs {needed} bytes of shared memory" if needed > device.shared_memory else None
    return f"this backend has no {plan.path} kernel"


def launch(o: torch.Tensor, codes: torch.Tensor, exponents: torch.Tensor, plan: Plan) -> torch.Tensor:
    """Project tokens: bf16 ``[T, G, D]``, last stride 1 -> bf16 ``[T, G, R]``; deterministic.

    The op has checked the operands. Raises ``ValueError`` for more rows than the kernel takes.
    """
    if o.size(0) > (1 if plan.path == "gemv" else SMALL_ROWS):
        message = f"{plan.path} takes fewer rows than {o.size(0)}"
        raise ValueError(message)
    groups, rank, _ = blocks.shape_of(codes)
    out = torch.empty((o.size(0), groups, rank), dtype=torch.bfloat16, device=o.device)
    (cuda.gemv if plan.path == "gemv" else cuda.small)(o, codes, exponents, out)
    return out


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
    """Whether warps of 4 tiles in a row, and blocks of 8 warps, divide a group: what dequantise and prove launch."""
    return shape.depth % (4 * blocks.TILE_COLS) == 0 and shape.rank * shape.depth % _ELEMENTS_A_BLOCK == 0
