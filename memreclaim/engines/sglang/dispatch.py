"""What runs in place of the engine's ``_apply_wo_a_bf16_matmul`` and ``fused_rope_wo_a_bf16``.

A plain weight goes to the engine's own function, untouched. A tag is served by a kernel whose bits were found equal to those
of the kernel that the engine would launch (:mod:`memreclaim.engines.sglang.routes`); where there is none, the engine's
own function gets the exact bf16 weight. So whatever the engine adds to the call, the stock path's bits come out.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from memreclaim import counters
from memreclaim.engines.sglang import mxfp8
from memreclaim.engines.sglang.routes import Route, route_of
from memreclaim.states import Phase
from memreclaim.tagged import Tagged, exact
from memreclaim_kernels import ops

if TYPE_CHECKING:
    from collections.abc import Callable

    from memreclaim.twin import Twin

DEQUANT = "dequant"
_MOST_ROUTES = 16384
"""Calls of different shapes or flags that are remembered: a prefill may have any number of rows."""
_routes: dict[Any, tuple[Route, Phase]] = {}
draft_twins: set[int] = set()
"""``id`` of every twin of a draft model; the session keeps those twins alive."""


def apply_wo_a(stock: Callable[..., Any], o: torch.Tensor, wo_a: torch.Tensor, *args: Any, **kwargs: Any) -> Any:  # noqa: ANN401
    """AROUND hook of ``_apply_wo_a_bf16_matmul``.

    Shapes: ``o`` bf16 ``[T, G, D]``, ``wo_a`` bf16 ``[G, R, D]`` -> bf16 ``[T, G, R]``, or the engine's own result when it asks
    for a quantised one.
    """
    if not isinstance(wo_a, Tagged):
        return stock(o, wo_a, *args, **kwargs)
    twin = wo_a.memreclaim_backing.twin
    if twin is None or not wo_a.memreclaim_whole or type(o) is not torch.Tensor or o.dim() != 3:  # noqa: PLR2004
        return stock(o, exact(wo_a, "sglang.dispatch"), *args, **kwargs)
    try:
        key = (o.shape, o.stride(), o.dtype, twin.packed.shape, args, *kwargs.items())
        route, phase = _routes[key]
    except (KeyError, TypeError):
        route, phase = _find(stock, o, wo_a, args, kwargs)
    out = _kernel(o, wo_a, twin, route, phase)
    if out is not None:
        return out
    counters.calls.add(DEQUANT, phase)
    return stock(o, exact(wo_a, "sglang.dispatch"), *args, **kwargs)


def _kernel(o: torch.Tensor, wo_a: Tagged, twin: Twin, route: Route, phase: Phase) -> Any:  # noqa: ANN401
    """Result of a verified kernel, None when there is none for this call."""
    if route is Route.OTHER or o.shape[0] == 0 or o.dtype != torch.bfloat16 or o.stride(2) != 1:
        return None
    asked = Phase.DRAFT if phase is not Phase.PREFILL and id(twin) in draft_twins else phase
    plan = ops.plan_for(
        o,
        twin.packed,
        phase=asked.value,
        numerics=wo_a.memreclaim_backing.numerics,
        stock=route.stock,  # type: ignore[arg-type]
    )
    if plan.path == DEQUANT:
        return None
    if route is Route.SMALL_MXFP8:
        out = mxfp8.project(o, twin, plan)
        if out is None:
            return None
    else:
        out = ops.project(o, twin.packed, twin.exponents, plan)
    counters.calls.add(plan.path, asked)
    return out


def _find(
    stock: Callable[..., Any], o: torch.Tensor, wo_a: Tagged, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[Route, Phase]:
    """Ask the engine's dispatch, and remember what it says for calls like this one."""
    geometry = wo_a.memreclaim_geometry
    found = (route_of(_unwrapped(stock), o, geometry, *args, **kwargs), phase_of_call(args, kwargs))
    try:
        key = (o.shape, o.stride(), o.dtype, wo_a.memreclaim_backing.twin.packed.shape, args, *kwargs.items())  # type: ignore[union-attr]
        if len(_routes) >= _MOST_ROUTES:
            _routes.clear()
        _routes[key] = found
    except TypeError:
        pass  # an argument that cannot be hashed: asked anew on each call
    return found


def forget_routes() -> None:
    """Ask the engine's dispatch anew for every call."""
    _routes.clear()


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
