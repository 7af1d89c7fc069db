"""The stand-in for a weight whose bf16 bytes are released.

A :class:`Tag` is an ``nn.Parameter`` of the weight's shape, dtype and device whose strides are all 0 and whose
storage is one element of its own, a NaN. Nothing may ever read that NaN, so every way to a tensor's values is closed
or answered:

1. ``__torch_dispatch__`` sees every operator, from Python and from C++. aten's are answered by what their schema says
   they do (view, write, product, read), never by a list of names; others are refused.
2. ``__torch_function__`` sees what never becomes an operator: ``numpy``, ``data_ptr``, DLPack, pickling, ``.data =
   ...``.
3. The storage refuses a raw pointer in C++ too, for extensions that take a tensor and call ``data_ptr()`` themselves.

Views of tags are :class:`TagView`, no parameters, with the same twin behind them. How each access is answered stands in
:mod:`memreclaim.access`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Self, TypeVar

import torch
from torch import nn

from memreclaim import access
from memreclaim.eager import eager
from memreclaim.tagged import Tagged, apply_geometry, exact, is_whole

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from torch._ops import OpOverload

    from memreclaim.backing import Backing


class _Answered(Tagged):
    """The hooks through which torch asks a tag."""

    def __new__(cls, *_args: object, **_kwargs: object) -> Self:
        """Refuse: a tag without a backing would stand for nothing."""
        message = "tags are made by memreclaim.Reclaimer"
        raise TypeError(message)

    @classmethod
    @eager
    def __torch_function__(
        cls,
        func: Callable[..., Any],
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        """Answer what never reaches the dispatcher, and pass the rest on to it."""
        del types
        answer = access.BEYOND_DISPATCH.get(func)
        with torch._C.DisableTorchFunctionSubclass():
            if answer is not None and isinstance(args[0], Tagged):
                return answer(*args, **(kwargs or {}))
            return func(*args, **(kwargs or {}))

    @classmethod
    @eager
    def __torch_dispatch__(
        cls, func: OpOverload, types: Sequence[type], args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Answer one operator by what its schema says it does."""
        del types
        return access.answer(func, args, kwargs or {})

    def memreclaim_view(self, geometry: torch.Tensor) -> torch.Tensor:
        assert isinstance(self, torch.Tensor)
        return _make(TagView, self.memreclaim_backing, geometry, self.device, requires_grad=False)

    @eager
    def view(self, *shape: Any, **named: Any) -> torch.Tensor:
        """View as in torch; regrouping a weight is cached, since engines do it on every call."""
        # A view that was made before carries no gradients; the first question is the cheap one.
        trains = torch.is_grad_enabled() and self.requires_grad  # type: ignore[attr-defined]
        if trains or named or (shape and isinstance(shape[0], list)):
            result: torch.Tensor = torch.Tensor.view(self, *shape, **named)  # type: ignore[call-overload]
            return result
        cached = self.memreclaim_views.get(shape)
        if cached is not None and self.memreclaim_backing.twin is not None:
            return cached
        result = torch.Tensor.view(self, *shape)  # type: ignore[call-overload]
        if isinstance(result, Tagged) and not result.requires_grad:
            self.memreclaim_views[shape] = result
        return result

    def __repr__(self, *, tensor_contents: object = None) -> str:
        """Layer and shape; printing a weight is no reason to decode it."""
        del tensor_contents
        assert isinstance(self, torch.Tensor)
        serves = "bf16" if self.memreclaim_backing.twin is None else "twin"
        return f"{type(self).__name__}({self.memreclaim_backing.layer}, shape={tuple(self.shape)}, serves={serves})"


class TagView(_Answered, torch.Tensor):  # type: ignore[misc]
    """View of a :class:`Tag`: reads give exact values, a write restores the layer first."""

    def __deepcopy__(self, memo: dict[int, Any]) -> torch.Tensor:
        """An independent tensor with the exact values."""
        copy = memo[id(self)] = exact(self, "deepcopy").clone()
        return copy

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Pickle as the plain tensor that the view stands for."""
        return exact(self, "pickle").clone().__reduce_ex__(protocol)  # type: ignore[no-untyped-call]


class Tag(_Answered, nn.Parameter):  # type: ignore[misc]
    """A weight served by its twin; see the module's description."""

    def __deepcopy__(self, memo: dict[int, Any]) -> torch.Tensor:
        """An independent parameter with the exact values."""
        copy = memo[id(self)] = parameter_like(self, exact(self, "deepcopy").clone())
        return copy

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Pickle, and ``torch.save``, as the parameter that the tag stands for."""
        return parameter_like(self, exact(self, "pickle")).__reduce_ex__(protocol)  # type: ignore[no-untyped-call]


_T = TypeVar("_T", bound=_Answered)
_STATE = frozenset(Tagged.__annotations__)
"""Attributes of a tag that its weight did not have."""
_classes: dict[type[torch.Tensor], type[Tag]] = {}


def make_tag(backing: Backing, like: torch.Tensor) -> Tag:
    """Tag that takes the place of ``like``: same class checks, attributes, ``requires_grad``, shape, dtype and device.

    Allocates one element on the weight's device (nothing in twin mode, where the tag shows the bf16 weight itself).
    """
    geometry = torch.empty(like.shape, dtype=like.dtype, device="meta")
    tag = _make(_tag_class(type(like)), backing, geometry, like.device, requires_grad=like.requires_grad)
    tag.__dict__.update(like.__dict__)
    return tag


def parameter_like(tag: Tag, values: torch.Tensor) -> nn.Parameter:
    """Parameter of the weight's own class over ``values``, with the attributes that the tag has now."""
    original = next(base for base in type(tag).__mro__ if issubclass(base, nn.Parameter) and not issubclass(base, Tag))
    with torch.inference_mode(mode=False), torch.no_grad():
        result = torch.Tensor._make_subclass(original, values, tag.requires_grad)
    result.__dict__.update({name: value for name, value in tag.__dict__.items() if name not in _STATE})
    return result


def _make(cls: type[_T], backing: Backing, geometry: torch.Tensor, device: torch.device, *, requires_grad: bool) -> _T:
    # A tag made in inference mode must work outside of it, like the weight that it stands for.
    with torch.inference_mode(mode=False), torch.no_grad(), torch._C.DisableTorchFunctionSubclass():
        dense = backing.dense
        shown = _nothing(geometry, device) if dense is None else apply_geometry(dense, geometry)
        tag: _T = torch.Tensor._make_subclass(cls, shown, requires_grad)  # type: ignore[type-var]
    tag.memreclaim_backing = backing
    tag.memreclaim_geometry = geometry
    tag.memreclaim_whole = is_whole(geometry, backing.shape)
    tag.memreclaim_views = {}
    return tag


def _nothing(geometry: torch.Tensor, device: torch.device) -> torch.Tensor:
    """One NaN in all places, whose storage raises when its pointer is taken."""
    # All bits set are a NaN in every floating-point format, and a value of every other type that a weight is viewed as.
    nan = torch.full((geometry.element_size(),), 0xFF, dtype=torch.uint8, device=device).view(geometry.dtype)
    torch._C._set_throw_on_mutable_data_ptr(nan)
    return nan.as_strided(geometry.shape, (0,) * geometry.dim())


def _tag_class(original: type[torch.Tensor]) -> type[Tag]:
    """Subclass of :class:`Tag` that also passes ``isinstance`` checks for the weight's own class."""
    if original is nn.Parameter:
        return Tag
    if original not in _classes:
        _classes[original] = type(f"Tag[{original.__name__}]", (Tag, original), {})
    return _classes[original]
