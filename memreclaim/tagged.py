"""What tags and their views have in common: a backing, and a geometry over the contiguous bf16 weight.

The geometry is the shape, strides and offset that the tensor would have as a view of the bf16 weight. It is kept as a
meta tensor, so that aten itself computes every view of a view, and a read applies it to the exact weight with one
``as_strided``.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch.utils import _pytree as pytree

if TYPE_CHECKING:
    from memreclaim.backing import Backing
    from memreclaim.twin import Twin
    from memreclaim_kernels.blocks import WeightShape


class Tagged:
    """Mixin of :class:`memreclaim.tag.Tag` and :class:`memreclaim.tag.TagView`; both are tensors."""

    memreclaim_backing: Backing
    memreclaim_geometry: torch.Tensor
    memreclaim_whole: bool
    """:func:`is_whole` of the geometry, decided once."""
    memreclaim_views: dict[tuple[Any, ...], torch.Tensor]

    def memreclaim_view(self, geometry: torch.Tensor) -> torch.Tensor:
        """View of this tensor with the geometry that aten computed for it."""
        raise NotImplementedError


def is_whole(geometry: torch.Tensor, shape: WeightShape) -> bool:
    """Whether a geometry is the whole weight of ``shape`` in its own order, as ``[G, R, D]`` or ``[G*R, D]``."""
    layouts = (tuple(shape), (shape.groups * shape.rank, shape.depth))
    ordered = geometry.is_contiguous() and geometry.storage_offset() == 0 and geometry.dtype == torch.bfloat16
    return ordered and not geometry.is_neg() and tuple(geometry.shape) in layouts


def apply_geometry(dense: torch.Tensor, geometry: torch.Tensor) -> torch.Tensor:
    """The view of the contiguous bf16 weight that ``geometry`` describes."""
    flat = dense.view(-1)
    if geometry.dtype != flat.dtype:
        flat = flat.view(geometry.dtype)
    view = flat.as_strided(geometry.shape, geometry.stride(), flat.storage_offset() + geometry.storage_offset())
    # Conjugation and negation are flags of a view, and no part of its strides.
    view = view.conj() if geometry.is_conj() else view
    return view._neg_view() if geometry.is_neg() else view


def exact(value: Tagged, operation: str) -> torch.Tensor:
    """Exact bf16 values of a tag or of a view of one, counted by ``operation`` when they are decoded for this call."""
    # Below the dispatcher's Python key no operator looks at the flags of a negated or conjugated view.
    view = apply_geometry(value.memreclaim_backing.read(operation), value.memreclaim_geometry)
    return view.resolve_conj().resolve_neg()


def tagged_in(*values: object) -> list[Tagged]:
    """Every tag and view of a tag among an operator's arguments, lists of tensors included."""
    return [leaf for leaf in pytree.tree_leaves(values) if isinstance(leaf, Tagged)]


def is_tag(value: object) -> bool:
    """Whether ``value`` is a tag, or a view of one, whose bf16 bytes are released; False again after a restore."""
    return isinstance(value, Tagged) and value.memreclaim_backing.released


def twin_of(value: object) -> Twin | None:
    """Twin that serves ``value``, or None when it is no tag or serves from bf16 again."""
    return value.memreclaim_backing.twin if isinstance(value, Tagged) else None
