"""aten as a whole on a tag: every operator gives the plain weight's bits, or an error that names the layer."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Any

import pytest
import torch
from core import aten_calls
from core.models import Attention, drop, exact_weight, same_bits, shadow
from torch.utils import _pytree as pytree

import memreclaim as mr
from memreclaim.tagged import Tagged

if TYPE_CHECKING:
    from collections.abc import Callable
    from contextlib import AbstractContextManager

# Made-up arguments draw warnings (resized outputs, prototypes) that say nothing about tags.
pytestmark = [pytest.mark.cpu, pytest.mark.filterwarnings("ignore")]

WEIGHT = exact_weight(2, 32, 32)
MODES: dict[str, Callable[[], AbstractContextManager[Any]]] = {
    "no_grad": torch.no_grad,
    "inference": torch.inference_mode,
    "grad": contextlib.nullcontext,
}


def fresh(state: str, *, trains: bool = False) -> tuple[Attention, Attention, torch.Tensor]:
    """The same layer plain and as a tag, and the tag: dropped, kept in twin mode, or outlived by a restored weight."""
    plain, layer = Attention(WEIGHT.clone()), Attention(WEIGHT.clone())
    for one in (plain, layer):
        one.wo_a.weight.requires_grad_(trains)
    (drop if state != "twin" else shadow)(layer)
    tag = layer.wo_a.weight
    if state == "restored":
        tag.memreclaim_backing.make_dense()
    return plain, layer, tag


@pytest.fixture(scope="module")
def calls() -> list[aten_calls.Call]:
    """Calls that run on a plain weight."""
    return list(aten_calls.runnable(WEIGHT))


def outcome(call: aten_calls.Call, weight: torch.Tensor) -> Any:
    """What a call returns or raises."""
    try:
        return call.run(weight)
    except (mr.MemreclaimError, RuntimeError, ValueError, TypeError, IndexError) as error:
        return error


def difference(call: aten_calls.Call, plain: Attention, layer: Attention, tag: torch.Tensor) -> str | None:
    """How a tag's answer, and the layer after it, differ from the plain weight's."""
    before = plain.wo_a.weight.detach().clone()
    expected, actual = outcome(call, plain.wo_a.weight), outcome(call, tag)
    if isinstance(expected, Exception):
        return None
    if isinstance(actual, mr.TagAccessError):
        return None if same_bits(layer.wo_a.weight.detach().clone(), before) else "refused, and changed"
    if isinstance(actual, Exception):
        return f"raised {type(actual).__name__}: {str(actual)[:150]}"
    told = _compare(pytree.tree_leaves(expected), pytree.tree_leaves(actual)) if call.is_defined else None
    if told is not None:
        return told
    after = plain.wo_a.weight
    if call.is_defined and not same_bits(layer.wo_a.weight.detach().clone(), after):
        return "the layer has another content afterwards"
    return "written without being restored" if mr.is_tag(layer.wo_a.weight) and not same_bits(after, before) else None


def _compare(expected: list[Any], actual: list[Any]) -> str | None:
    if len(expected) != len(actual):
        return f"{len(actual)} results instead of {len(expected)}"
    for one, other in zip(expected, actual, strict=True):
        if not isinstance(one, torch.Tensor):
            if not (one == other or one != one):  # noqa: PLR0124
                return f"{other!r} instead of {one!r}"
            continue
        dense = other.clone() if isinstance(other, Tagged) else other
        kinds = [
            (dense_or_not.shape, dense_or_not.dtype, dense_or_not.layout, told.requires_grad)
            for dense_or_not, told in ((one, one), (dense, other))
        ]
        if kinds[0] != kinds[1]:
            return f"{kinds[1]} instead of {kinds[0]}"
        if one.layout is torch.strided and not same_bits(one, dense):
            return "other bits"
    return None


@pytest.mark.parametrize(
    ("mode", "state", "step"),
    # The first two answer differently for composite operators; of the others, a fifth of the operators is enough.
    [
        ("no_grad", "dropped", 1),
        ("inference", "dropped", 1),
        ("grad", "dropped", 5),
        ("no_grad", "twin", 5),
        ("inference", "restored", 5),
    ],
)
def test_every_operator_gives_the_plain_weights_bits_or_names_the_layer(
    calls: list[aten_calls.Call], mode: str, state: str, step: int
) -> None:
    """Cases 18, 19, 28: reads are exact and writes reach the layer, whichever operator of aten it is."""
    assert len(calls) > 1500
    differences = {}
    plain, layer, tag = fresh(state, trains=mode == "grad")
    for call in calls[::step]:
        with MODES[mode]():
            told = difference(call, plain, layer, tag)
        if told:
            differences[call.name] = told
        if call.writes or told:
            plain, layer, tag = fresh(state, trains=mode == "grad")
    assert differences == {}
