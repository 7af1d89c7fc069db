"""What runs in place of the engine's ``_apply_wo_a_bf16_matmul`` and ``fused_rope_wo_a_bf16``.

A plain weight goes to the engine's own function, untouched. A tag is served by a kernel whose bits were found equal to
those of the kernel that the engine would launch (:mod:`memreclaim.engines.sglang.routes`); where there is none, the
engine's own function gets the exact bf16 weight. So whatever the engine adds to the call, the stock path's bits come
out.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from memreclaim import counters
from memreclaim.engines.sglang import mxfp8
from memreclaim.engines.sglang.routes import Route, route_of
from memreclaim.states import Phase
from memreclaim.tagged import Tagged, exact
from memreclaim_kernels import ops
from memreclaim_kernels import plan as plans

if TYPE_CHECKING:
    from collections.abc import Callable

    from memreclaim_kernels.plan import Plan

DEQUANT = "dequant"
_MOST_CALLS = 16384
"""Calls of different shapes or flags that are remembered: a prefill may have any number of rows."""
_calls: dict[Any, Served] = {}
draft_twins: set[int] = set()
"""``id`` of every twin of a draft model. It only names the phase of a call: an id that a later twin has again changes
no plan, since decode, verify and draft are planned alike."""


class Served(NamedTuple):
    """How calls of one kind are served."""

    plan: Plan | None
    """The kernel; None where the engine's own function gets the exact weight."""
    phase: Phase
    generation: int
    """Of :func:`memreclaim_kernels.plan.generation`: a newer one means that kernels were judged since."""
    quantised: bool = False
    """The engine wants its ``Mxfp8SwizzledInput``."""


def apply_wo_a(stock: Callable[..., Any], o: torch.Tensor, wo_a: torch.Tensor, *args: Any, **kwargs: Any) -> Any:  # noqa: ANN401
    """AROUND hook of ``_apply_wo_a_bf16_matmul``.

    Shapes: ``o`` bf16 ``[T, G, D]``, ``wo_a`` bf16 ``[G, R, D]`` -> bf16 ``[T, G, R]``, or the engine's own result
    when it asks for a quantised one.
    """
    if not isinstance(wo_a, Tagged):
        return stock(o, wo_a, *args, **kwargs)
    twin = wo_a.memreclaim_backing.twin
    if twin is None or not wo_a.memreclaim_whole or type(o) is not torch.Tensor:
        return stock(o, exact(wo_a, "sglang.dispatch"), *args, **kwargs)
    key: Any
    try:
        key = (
            o.shape,
            o.stride(),
            o.dtype,
            twin.packed.shape,
            id(twin) in draft_twins,
            args,
            *kwargs,
            *kwargs.values(),
        )
        served = _calls.get(key)
    except TypeError:  # an argument that cannot be hashed: asked anew on each call
        key = served = None
    if served is None or served.generation != plans.generation():
        served = _find(stock, o, wo_a, args, kwargs)
        _remember(key, served)
    counters.calls.add(DEQUANT if served.plan is None else served.plan.path, served.phase)
    if served.plan is None:
        return stock(o, exact(wo_a, "sglang.dispatch"), *args, **kwargs)
    if served.quantised:
        return mxfp8.project(o, twin, served.plan)
    return ops.project(o, twin.packed, twin.exponents, served.plan)


def _find(
    stock: Callable[..., Any], o: torch.Tensor, wo_a: Tagged, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Served:
    """Ask the engine's dispatch where it would go, and take a kernel that was found to give those bits."""
    generation, twin = plans.generation(), wo_a.memreclaim_backing.twin
    assert twin is not None
    phase = phase_of_call(args, kwargs)
    if phase is not Phase.PREFILL and id(twin) in draft_twins:
        phase = Phase.DRAFT
    route = route_of(_unwrapped(stock), o, wo_a.memreclaim_geometry, *args, **kwargs)
    nothing = Served(None, phase, generation)
    if route is Route.OTHER or o.dim() != 3 or not o.shape[0] or o.dtype != torch.bfloat16 or o.stride(2) != 1:  # noqa: PLR2004
        return nothing
    quantised = route is Route.SMALL_MXFP8
    numerics = "identical" if quantised else wo_a.memreclaim_backing.numerics
    plan = ops.plan_for(o, twin.packed, phase=phase.value, numerics=numerics, stock=route.stock)
    if plan.path == DEQUANT or (quantised and not mxfp8.serves(plan)):
        return nothing
    return Served(plan, phase, generation, quantised)


def _remember(key: object, served: Served) -> None:
    if key is not None:
        if len(_calls) >= _MOST_CALLS:
            _calls.clear()
        _calls[key] = served


def forget() -> None:
    """Ask the engine's dispatch anew for every call; no draft is known."""
    _calls.clear()
    draft_twins.clear()


def _unwrapped(function: Callable[..., Any]) -> Callable[..., Any]:
    """The engine's function under the hooks of other plug-ins: they call it in the end."""
    while hasattr(function, "__wrapped__"):
        function = function.__wrapped__
    return function


_FLAGS = ("is_decode", "is_target_verify", "fuse_mxfp8_quant", "is_prefill")
"""The engine's flags behind ``o`` and ``wo_a``, in their order."""


def phase_of_call(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Phase:
    """Phase from the flags that the engine derives from its forward mode.

    What is neither decode nor verify is served as prefill, whose bits never differ from stock.
    """
    flags = {**dict(zip(_FLAGS, args, strict=False)), **kwargs}
    if flags.get("is_prefill"):
        return Phase.PREFILL
    if flags.get("is_decode"):
        return Phase.DECODE
    return Phase.VERIFY if flags.get("is_target_verify") else Phase.PREFILL


def fused_rope_wo_a(stock: Callable[..., Any], x: torch.Tensor, weight: torch.Tensor, *args: Any, **kwargs: Any) -> Any:  # noqa: ANN401
    """AROUND hook of ``fused_rope_wo_a_bf16`` (SM100 and SM103, up to 32 rows), which reads the weight by its pointer.

    Its sums have an order of their own that no twin kernel keeps, so it gets the exact bf16 weight.
    """
    if isinstance(weight, Tagged):
        counters.calls.add(DEQUANT, Phase.DECODE)
        weight = exact(weight, "sglang.fused_rope_wo_a")
    return stock(x, weight, *args, **kwargs)


def parameters_of(function: Callable[..., Any]) -> tuple[str, ...]:
    """Names of the parameters of the engine's function under its hooks."""
    code = _unwrapped(function).__code__
    return code.co_varnames[: code.co_argcount + code.co_kwonlyargcount]
