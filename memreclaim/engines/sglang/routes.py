"""Which stock kernel the engine would run for a call, found by running the engine's own dispatch.

The dispatch is copied with its kernels replaced by markers: it looks at the same flags, shapes and platform as ever,
and where it would launch a kernel it names it instead. So its conditions are written down nowhere in memreclaim,
whichever line they are from, and a kernel that it launches and memreclaim does not know is simply another name.
"""

from __future__ import annotations

from enum import Enum
from types import FunctionType
from typing import TYPE_CHECKING, Any, NoReturn

import torch

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from memreclaim_kernels.plan import Stock


class Route(Enum):
    """What the engine runs on a bf16 weight."""

    GEMV = "wo_a_bf16_gemv"
    SMALL = "wo_a_bf16_small_batch"
    SMALL_MXFP8 = "wo_a_bf16_small_batch_mxfp8"
    BMM = "_wo_a_bf16_bmm_token_major"
    EINSUM = "einsum"
    OTHER = ""
    """Something that memreclaim does not know; its exact bf16 operand is made for it."""

    @property
    def stock(self) -> Stock:
        """Whose order of sums ``identical`` keeps, in the words of :mod:`memreclaim_kernels.plan`."""
        return "sglang" if self in (Route.GEMV, Route.SMALL, Route.SMALL_MXFP8) else "bmm"


_KERNELS = {route.value: route for route in (Route.GEMV, Route.SMALL, Route.SMALL_MXFP8, Route.BMM)}
_EINSUM = "tgd,grd->tgr"


class _Found(BaseException):
    """Ends the copied dispatch where it would launch; no Exception, since a dispatch may catch those and go on."""

    def __init__(self, route: Route) -> None:
        self.route = route


def route_of(stock: Callable[..., Any], o: torch.Tensor, geometry: torch.Tensor, *args: Any, **kwargs: Any) -> Route:  # noqa: ANN401
    """The kernel that ``stock(o, weight, *args, **kwargs)`` launches for a bf16 weight of ``geometry``.

    ``geometry`` is a meta tensor ``[G, R, D]``. ``stock`` is the engine's function itself, unwrapped. Nothing is
    launched: a dispatch that cannot be followed gives :attr:`Route.OTHER`.
    """
    code, names = getattr(stock, "__code__", None), getattr(stock, "__globals__", None)
    if code is None or names is None:
        return Route.OTHER
    marked = {**names, **_markers(names), "torch": _Torch()}
    copy = FunctionType(code, marked, stock.__name__, stock.__defaults__, stock.__closure__)
    copy.__kwdefaults__ = stock.__kwdefaults__
    try:
        copy(o, geometry, *args, **kwargs)
    except _Found as found:
        return found.route
    except Exception:  # noqa: BLE001  it got to something that cannot work on a meta tensor: a kernel of its own
        return Route.OTHER
    return Route.OTHER


def _markers(names: Mapping[str, Any]) -> dict[str, Callable[..., NoReturn]]:
    return {name: _marker(route) for name, route in _KERNELS.items() if name in names}


def _marker(route: Route) -> Callable[..., NoReturn]:
    def launch(*_args: object, **_kwargs: object) -> NoReturn:
        raise _Found(route)

    return launch


class _Torch:
    """``torch``, but its einsum is a marker."""

    def __getattr__(self, name: str) -> Any:  # noqa: ANN401
        return getattr(torch, name)

    @staticmethod
    def einsum(equation: str, *_operands: object) -> NoReturn:
        raise _Found(Route.EINSUM if equation == _EINSUM else Route.OTHER)
