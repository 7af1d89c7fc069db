"""Serving a grouped projection from a twin, at every row count.

``out[t, g, r] = sum_d o[t, g, d] * weight[g, r, d]``. Which kernel serves is decided by
:mod:`memreclaim_kernels.plan`; the fall-back, and the only path on a CPU, is to decode the twin into a buffer of the
call's own and run the stock product on it.
"""

from __future__ import annotations

from functools import cache
from typing import TYPE_CHECKING, Any

import torch

from memreclaim import counters
from memreclaim.states import Phase
from memreclaim.tagged import Tagged, apply_geometry, exact, is_whole
from memreclaim_kernels import ops, plan, reference

if TYPE_CHECKING:
    from torch._ops import OpOverload

    from memreclaim.twin import Twin
    from memreclaim_kernels.blocks import WeightShape

STOCK = "stock"
"""Path name of a call that was served from bf16."""


def grouped_projection(
    o: torch.Tensor, weight: torch.Tensor, phase: str = Phase.DECODE, *, stock: plan.Stock = "bmm"
) -> torch.Tensor:
    """Project each token's groups by their own matrix.

    Shapes: ``o`` bf16 ``[T, G, D]`` with any row stride (T may be 0), ``weight`` bf16 ``[G, R, D]`` or ``[G*R, D]``,
    plain or a tag -> bf16 ``[T, G, R]``, new and contiguous. ``phase`` is decode, verify, draft or prefill. ``stock``
    says whose bits ``identical`` numerics keep: ``bmm`` (cuBLAS) or ``sglang``, whose own kernels serve 1 to 8 rows.
    Works in CUDA graph capture, on any stream, and under ``torch.compile``. Raises ``ValueError`` for an unknown
    phase.
    """
    phase = Phase(phase)
    if isinstance(weight, Tagged):
        twin = weight.memreclaim_backing.twin
        if twin is not None and weight.memreclaim_whole:
            return _serve(o, twin, phase, weight.memreclaim_backing.numerics, stock)
        weight = exact(weight, "grouped_projection")
    if not torch.compiler.is_compiling():  # a lock cannot be traced
        counters.calls.add(STOCK, phase)
    return reference.grouped_projection(o, weight.view(o.shape[1], -1, weight.shape[-1]))


def _serve(o: torch.Tensor, twin: Twin, phase: Phase, numerics: plan.Numerics, stock: plan.Stock) -> torch.Tensor:
    if torch.compiler.is_compiling():
        # One operator in the graph, which chooses its plan when it runs.
        return ops.planned_projection(o, twin.packed, twin.exponents, phase.value, numerics, stock)
    chosen = ops.plan_for(o, twin.packed, phase=phase.value, numerics=numerics, stock=stock)
    counters.calls.add(chosen.path, phase)
    return ops.project(o, twin.packed, twin.exponents, chosen)


def verify_kernels(shape: WeightShape, device: torch.device, numerics: plan.Numerics) -> None:
    """Let kernels serve weights of ``shape``: compare each with the stock path on ``device``, once per process.

    Until this was done, and where a bit differs, calls decode the twin and run the stock product. A CPU needs none.
    """
    if device.type == "cuda":
        _verify_kernels(shape, device, numerics)


@cache
def _verify_kernels(shape: WeightShape, device: torch.device, numerics: plan.Numerics) -> None:
    from memreclaim_kernels import selfcheck

    selfcheck.check(shape, device)
    if numerics != "identical":
        selfcheck.check(shape, device, numerics=numerics)


def product(func: OpOverload, args: tuple[Any, ...]) -> torch.Tensor | None:
    """Serve aten's ``bmm(x, weight^T)`` or ``mm(x, weight^T)`` of a whole tag from its twin; None for anything else.

    These two are what ``einsum``, ``matmul`` and ``linear`` become. The phase is unknown here, so the stock path's
    bits are kept whatever the settings allow. Kernels are compared with ``bmm``; what cuBLAS does with ``mm``, one
    product of all groups' rows, is another problem to it and gets the decoded weight.
    """
    if func not in _PRODUCTS or not isinstance(args[1], Tagged) or isinstance(args[0], Tagged):
        return None
    x, weight = args
    twin = weight.memreclaim_backing.twin
    geometry: torch.Tensor = weight.memreclaim_geometry
    if twin is None or x.dtype != torch.bfloat16 or not is_whole(geometry.mT, twin.shape):
        return None
    if func is torch.ops.aten.bmm.default and x.shape[::2] == twin.shape[::2] and x.stride(2) == 1:
        o = x.transpose(0, 1)
        chosen = ops.plan_for(o, twin.packed, phase="prefill", numerics="identical", stock="bmm")
        if chosen.path not in ("dequant", "empty"):
            counters.calls.add(chosen.path, Phase.PREFILL)
            return ops.project(o, twin.packed, twin.exponents, chosen).transpose(0, 1)
    # The same operator on operands of the same strides: nothing about its choice of algorithm can differ.
    counters.calls.add("dequant", Phase.PREFILL)
    result: torch.Tensor = func(x, apply_geometry(twin.dequantize(), geometry))
    return result


_PRODUCTS = (torch.ops.aten.bmm.default, torch.ops.aten.mm.default)
