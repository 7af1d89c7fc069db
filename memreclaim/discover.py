"""Finding the weights of a model that may have an exact twin.

A target is any module that has a child of a given name (``wo_a``) with a ``weight``. The group count is the parent's
``n_local_groups``, or the weight's rows divided by the parent's ``o_lora_rank`` (1024 when it has none).
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch
from torch import nn

from memreclaim import twin
from memreclaim.states import Reason
from memreclaim.tag import Tag
from memreclaim.tagged import Tagged

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

_DEFAULT_RANK = 1024
_FP8 = frozenset({torch.float8_e4m3fn, torch.float8_e5m2, torch.float8_e4m3fnuz, torch.float8_e5m2fnuz})


@dataclass(frozen=True)
class Site:
    """A place in the model that a parameter stands at; holds the module, never the weight."""

    module: nn.Module
    attribute: str

    def get(self) -> nn.Parameter:
        """The parameter that stands there now."""
        parameter = self.module._parameters[self.attribute]
        assert parameter is not None
        return parameter

    def set(self, parameter: nn.Parameter) -> None:
        """Put ``parameter`` there. It goes around ``__setattr__``, which some engines guard."""
        self.module._parameters[self.attribute] = parameter


@dataclass(frozen=True)
class Candidate:
    """One weight, every place where it stands, and why it is refused if it is."""

    name: str
    """Path of the layer's module, such as ``model.layers.0.self_attn.wo_a``."""
    sites: tuple[Site, ...]
    groups: int
    gross_bytes: int
    """Bytes of the bf16 weight, from its shape; 0 when it is no bf16 weight."""
    refusal: Reason | None = field(default=None)


def discover(model: nn.Module, targets: Iterable[str] = ("wo_a",)) -> tuple[Candidate, ...]:
    """Every target of ``model`` in module order, each weight once, tied ones with all their places.

    Tags and already reclaimed layers are left out. Nothing is read but metadata, nothing is changed.
    """
    places = _places(model)
    seen: set[int] = set()
    found = []
    for path, parent, child in _target_modules(model, frozenset(targets)):
        weight = child._parameters.get("weight")
        if weight is None or isinstance(weight, Tagged) or _identity(weight) in seen:
            continue
        seen.add(_identity(weight))
        sites = places[_identity(weight)]
        found.append(_candidate(path, parent, weight, sites))
    return tuple(found)


def tags_of(model: nn.Module) -> tuple[Tag, ...]:
    """Every tag that stands in ``model``, tied ones as often as they stand."""
    standing = (parameter for module in model.modules() for parameter in module._parameters.values())
    return tuple(parameter for parameter in standing if isinstance(parameter, Tag))


def _target_modules(model: nn.Module, names: frozenset[str]) -> Iterator[tuple[str, nn.Module, nn.Module]]:
    for path, parent in model.named_modules():
        for name, child in parent.named_children():
            if name in names:
                yield (f"{path}.{name}" if path else name), parent, child


def _places(model: nn.Module) -> dict[int, tuple[Site, ...]]:
    """Places of each storage: tied weights may be one parameter twice, or two parameters over the same bytes."""
    places: dict[int, tuple[Site, ...]] = {}
    for module in model.modules():
        for attribute, parameter in module._parameters.items():
            if parameter is not None and not isinstance(parameter, Tagged):
                key = _identity(parameter)
                places[key] = (*places.get(key, ()), Site(module, attribute))
    return places


def _identity(weight: torch.Tensor) -> int:
    """What two parameters over the same bytes have in common; the object itself where there are none of its own.

    Models hold parameters without bytes of their own (meta, lazy) and without any storage to ask (sparse, opaque,
    wrappers around other tensors): none of them is a target, and none may stop the search for those that are.
    """
    if weight.device.type == "meta" or not _is_plain(weight):
        return id(weight)
    return weight.untyped_storage().data_ptr() or id(weight)


def _is_plain(weight: torch.Tensor) -> bool:
    """Whether a tensor is strided memory and nothing else; no wrapper, nothing still to be made."""
    own = type(weight).__torch_dispatch__ is not torch.Tensor.__torch_dispatch__
    return not own and not nn.parameter.is_lazy(weight) and weight.layout is torch.strided


def _candidate(path: str, parent: nn.Module, weight: nn.Parameter, sites: tuple[Site, ...]) -> Candidate:
    if not _is_plain(weight):
        return Candidate(path, sites, 0, 0, Reason.SHAPE if nn.parameter.is_lazy(weight) else Reason.UNKNOWN_READER)
    groups = _groups(parent, weight)
    refusal = _refusal(weight, groups, sites)
    gross = weight.numel() * weight.element_size() if weight.dtype == torch.bfloat16 else 0
    return Candidate(path, sites, groups, gross, refusal)


def _groups(parent: nn.Module, weight: nn.Parameter) -> int:
    declared = getattr(parent, "n_local_groups", None)
    if isinstance(declared, int) and declared > 0:
        return declared
    if weight.dim() == 3:  # noqa: PLR2004
        return weight.shape[0]
    rank = getattr(parent, "o_lora_rank", _DEFAULT_RANK)
    return weight.shape[0] // rank if weight.dim() and isinstance(rank, int) and rank > 0 else 0


def _refusal(weight: nn.Parameter, groups: int, sites: tuple[Site, ...]) -> Reason | None:
    if weight.dtype in _FP8:
        return Reason.NOTHING_TO_DO
    unfit = twin.unfit(weight, groups)
    if unfit is not None:
        return unfit
    if weight.device.type == "meta":
        return Reason.SHAPE
    alike = all(_same_view(site.get(), weight) for site in sites)
    whole = weight.untyped_storage().nbytes() == weight.numel() * weight.element_size()
    # A weight that is a part of a larger buffer frees nothing when it is dropped.
    return None if alike and whole else Reason.SHARED_STORAGE


def _same_view(one: torch.Tensor, other: torch.Tensor) -> bool:
    return one.dtype == other.dtype and one.shape == other.shape and one.stride() == other.stride()
