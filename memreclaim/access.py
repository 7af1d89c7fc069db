"""How a tag answers each kind of access: refused, served, viewed, written through, or read exactly."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch.utils import _pytree as pytree

from memreclaim import serve
from memreclaim.tagged import Tagged, apply_geometry, exact, tagged_in

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch._ops import OpOverload


def answer(func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Run one operator that has tags among its arguments."""
    if func.namespace != "aten":
        return _foreign(func, args, kwargs)
    if func is torch.ops.aten.record_stream.default:
        # Its schema says that it writes; what it means is that a stream uses the memory that serves.
        return args[0].memreclaim_backing.record_stream(args[1])
    if func._can_decompose():
        # In inference mode composite operators arrive whole; their parts come back here one by one.
        result = func.decompose(*args, **kwargs)
        if result is not NotImplemented:
            return result
    if any(argument.name == "storage_offset" for argument in func._schema.arguments):
        # as_strided and its kin name places in memory by strides, and a tag's own are 0.
        _refuse_layout(func, args, kwargs)
    written = _written(func, args, kwargs)
    if written and torch.Tag.inplace_view in func.tags:
        # t_, resize_, set_ and the like change a tensor's own shape, which a tag has only on behalf of its weight.
        written[0].memreclaim_backing.refuse(str(func))
    if written:
        return _write(func, args, kwargs, written)
    if func.is_view and isinstance(args[0], Tagged):
        return _view(func, args, kwargs)
    served = serve.product(func, args)
    return _read(func, args, kwargs) if served is None else served


def _refuse_layout(func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    for tag in tagged_in(args, kwargs):
        assert isinstance(tag, torch.Tensor)
        if tag.stride() != tag.memreclaim_geometry.stride():
            tag.memreclaim_backing.refuse(str(func))


def _foreign(func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """An operator outside aten may hand the pointer to anything: only kept bf16 weights go in."""
    written = {id(tag) for tag in _written(func, args, kwargs)}
    for tag in tagged_in(args, kwargs):
        backing = tag.memreclaim_backing
        if backing.released:
            backing.refuse(str(func))
        if id(tag) in written:
            backing.make_dense()
    return _read(func, args, kwargs)


def _written(func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Tagged]:
    """Tags that stand where the schema says the operator writes."""
    found: list[Tagged] = []
    for position, argument in enumerate(func._schema.arguments):
        if argument.alias_info is None or not argument.alias_info.is_write:
            continue
        value = args[position] if position < len(args) else kwargs.get(argument.name)
        found += [leaf for leaf in pytree.tree_leaves(value) if isinstance(leaf, Tagged)]
    return found


def _write(func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any], written: list[Tagged]) -> Any:
    """Bring the bf16 weight back and write into it; the written tags are what the operator returns.

    ``out=`` is written by way of a copy: it may resize its tensor, which is refused before the weight is touched. So is
    a negated or conjugated view, whose flag operators do not look at below the dispatcher's Python key.
    """
    flagged = any(tag.memreclaim_geometry.is_neg() or tag.memreclaim_geometry.is_conj() for tag in written)
    by_copy = flagged or any(argument.is_out for argument in func._schema.arguments)
    targets = {id(tag): (exact(tag, str(func)).clone() if by_copy else _restored(tag), tag) for tag in written}

    def substitute(leaf: object) -> object:
        if id(leaf) in targets:
            return targets[id(leaf)][0]
        return _exact(leaf, str(func))

    result = func(*pytree.tree_map(substitute, args), **pytree.tree_map(substitute, kwargs))
    if by_copy:
        for target, tag in targets.values():
            if target.shape != tag.memreclaim_geometry.shape:
                tag.memreclaim_backing.refuse(str(func))
        for target, tag in targets.values():
            _restored(tag).copy_(target)
    back = {id(target): tag for target, tag in targets.values()}
    return pytree.tree_map(lambda leaf: back.get(id(leaf), leaf), result)


def _restored(tag: Tagged) -> torch.Tensor:
    """The place in the restored bf16 weight that ``tag`` stands for."""
    return apply_geometry(tag.memreclaim_backing.write("a write"), tag.memreclaim_geometry)


def _view(func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Let aten compute the view's geometry on meta tensors; a view of a restored weight is a plain one."""
    parent = args[0]
    if parent.memreclaim_backing.twin is None:
        return _read(func, args, kwargs)
    if func is torch.ops.aten._reshape_alias.default:
        # Its strides were derived from the tag's own, which are 0; aten's view finds those of the geometry.
        func, args = torch.ops.aten.view.default, args[:2]
    try:
        geometry = func(*pytree.tree_map(_meta, args), **pytree.tree_map(_meta, kwargs))
    except RuntimeError:
        # Not a view of this geometry (reshape of a transposed weight): what aten would have copied is copied.
        if func is not torch.ops.aten.view.default:
            raise
        return exact(parent, str(func)).reshape(args[1])
    return pytree.tree_map(
        lambda leaf: parent.memreclaim_view(leaf) if isinstance(leaf, torch.Tensor) else leaf, geometry
    )


def _meta(leaf: object) -> object:
    return leaf.memreclaim_geometry if isinstance(leaf, Tagged) else leaf


def _read(func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Run the operator on the exact bf16 values.

    Some operators return their input's memory though their schema does not say so (``unsafe_split``), and ``set_`` lets
    a plain tensor take it. Writes to that memory are not seen here, so a kept bf16 weight loses its twin then.
    """
    name = str(func)
    result = func(
        *pytree.tree_map(lambda leaf: _exact(leaf, name), args),
        **pytree.tree_map(lambda leaf: _exact(leaf, name), kwargs),
    )
    for tag in tagged_in(args, kwargs):
        dense = tag.memreclaim_backing.dense
        if dense is not None and any(_shares(leaf, dense) for leaf in pytree.tree_leaves(result)):
            tag.memreclaim_backing.make_dense()
    return result


def _shares(leaf: object, dense: torch.Tensor) -> bool:
    return isinstance(leaf, torch.Tensor) and torch._C._is_alias_of(leaf, dense)  # type: ignore[attr-defined]


def _exact(leaf: object, operation: str) -> object:
    return exact(leaf, operation) if isinstance(leaf, Tagged) else leaf


def _values(method: str) -> Callable[..., Any]:
    """Call a tensor method on the exact values."""

    def call(tag: Tagged, *args: Any, **kwargs: Any) -> Any:
        return getattr(exact(tag, method).detach(), method)(*args, **kwargs)

    return call


def _shared(method: str) -> Callable[..., Any]:
    """Call a tensor method whose result may share the weight's memory, which is then written unseen: no twin of it."""

    def call(tag: Tagged, *args: Any, **kwargs: Any) -> Any:
        if not tag.memreclaim_backing.released:
            tag.memreclaim_backing.make_dense()
        return _values(method)(tag, *args, **kwargs)

    return call


def _writes(method: str) -> Callable[..., Any]:
    """Call a tensor method that writes element by element on the restored weight."""

    def call(tag: Tagged, *args: Any, **kwargs: Any) -> Any:
        getattr(_restored(tag), method)(*args, **kwargs)
        return tag

    return call


def _raw(method: str) -> Callable[..., Any]:
    """Refuse raw memory of a released weight; raw access to a kept one ends the twin, since it may write unseen."""

    def call(tag: Tagged, *args: Any, **kwargs: Any) -> Any:
        backing = tag.memreclaim_backing
        assert isinstance(tag, torch.Tensor)
        if backing.released or tag.stride() != tag.memreclaim_geometry.stride():
            backing.refuse(method)
        value = getattr(_restored(tag), method)
        return value(*args, **kwargs) if callable(value) else value

    return call


def _untyped_storage(tag: Tagged) -> torch.UntypedStorage:
    """The bytes that a released weight still takes, for those who count them, without the bytes themselves."""
    assert isinstance(tag, torch.Tensor)
    if not tag.memreclaim_backing.released:
        storage: torch.UntypedStorage = _raw("untyped_storage")(tag)
        return storage
    nothing: torch.UntypedStorage = torch.UntypedStorage(tag.element_size(), device="meta")  # type: ignore[no-untyped-call]
    return nothing


def _set_data(tag: Tagged, value: torch.Tensor) -> None:
    """``weight.data = value``: the layer is restored, then its parameters take the new storage.

    ``module.cpu()`` of a module that is there already sets each parameter's data to itself: nothing is to be done.
    """
    if isinstance(value, Tagged):
        whole = value.memreclaim_whole and tag.memreclaim_whole
        alike = value.memreclaim_geometry.shape == tag.memreclaim_geometry.shape
        if whole and alike and value.memreclaim_backing is tag.memreclaim_backing:
            return
        value = exact(value, "data")
    tag.memreclaim_backing.replace_data(value)


BEYOND_DISPATCH: dict[Any, Callable[..., Any]] = {
    torch.Tensor.numpy: _shared("numpy"),
    torch.Tensor.tolist: _values("tolist"),
    torch.Tensor.__array__: _shared("__array__"),
    torch.Tensor.__format__: _values("__format__"),
    torch.Tensor.apply_: _writes("apply_"),
    torch.Tensor.map_: _writes("map_"),
    torch.Tensor.map2_: _writes("map2_"),
    torch.Tensor.data_ptr: _raw("data_ptr"),
    torch.Tensor.__dlpack__: _raw("__dlpack__"),
    torch.Tensor.__cuda_array_interface__.__get__: _raw("__cuda_array_interface__"),
    torch.Tensor.storage: _raw("storage"),
    torch.Tensor._typed_storage: _raw("storage"),
    torch.Tensor.share_memory_: _raw("share_memory_"),
    torch.Tensor.untyped_storage: _untyped_storage,
    torch.Tensor.data.__set__: _set_data,  # type: ignore[attr-defined]
    torch.ops.aten.set_data.default: _set_data,
    torch.Tensor.__deepcopy__: lambda tag, memo: tag.__deepcopy__(memo),
    torch.Tensor.__reduce_ex__: lambda tag, protocol: tag.__reduce_ex__(protocol),
}
"""What tensors can do without an operator, by the function that ``__torch_function__`` is given."""
if hasattr(torch.Tensor, "const_data_ptr"):  # since torch 2.13
    BEYOND_DISPATCH[getattr(torch.Tensor, "const_data_ptr")] = _raw("const_data_ptr")  # noqa: B009  not in its stubs
