"""Finding weights: every target once, each refusal with its reason, and nothing read but metadata."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
import torch
from core.models import Attention, Stack, Weighted, exact_weight, reclaimed, reclaimer, same_bits, stack
from torch import nn
from torch.testing._internal.two_tensor import TwoTensor

import memreclaim as mr
from memreclaim.discover import discover

if TYPE_CHECKING:
    from collections.abc import Callable

pytestmark = pytest.mark.cpu


def test_every_target_in_module_order() -> None:
    """Targets are found by the child's name, with the module's path, group count and bytes."""
    found = discover(stack(3))
    assert [one.name for one in found] == [f"layers.{i}.wo_a" for i in range(3)]
    assert {(one.groups, one.gross_bytes, one.refusal) for one in found} == {(2, 2 * 128 * 96, None)}


@pytest.mark.parametrize(
    ("attributes", "rows", "groups"),
    [({}, 2048, 2), ({"o_lora_rank": 64}, 128, 2), ({"n_local_groups": 4, "o_lora_rank": 64}, 128, 4),
     ({"n_local_groups": 1}, 128, 1)],
)  # fmt: skip
def test_group_count(attributes: dict[str, int], rows: int, groups: int) -> None:
    """Case 16: G is ``n_local_groups``, or rows by ``o_lora_rank``, or rows by 1024."""
    parent = nn.Module()
    parent.wo_a = Weighted(torch.zeros((rows, 32), dtype=torch.bfloat16))
    for name, value in attributes.items():
        setattr(parent, name, value)
    assert [one.groups for one in discover(parent)] == [groups]


def _unusual(kind: str) -> nn.Parameter:
    if kind == "lazy":
        return nn.UninitializedParameter(requires_grad=False, dtype=torch.bfloat16)
    made: dict[str, Callable[[], torch.Tensor]] = {
        "sparse": lambda: torch.eye(3, dtype=torch.bfloat16).to_sparse(),
        "wrapper": lambda: TwoTensor(exact_weight(), exact_weight()),
    }
    return nn.Parameter(made[kind](), requires_grad=False)


@pytest.mark.parametrize(
    ("kind", "reason"), [("lazy", "shape"), ("sparse", "unknown_reader"), ("wrapper", "unknown_reader")]
)
def test_parameters_without_memory_of_their_own(kind: str, reason: str) -> None:
    """Case 11: a lazy, sparse or wrapped parameter stops no search; where a ``wo_a`` is one, it is kept."""
    model = stack(1)
    model.elsewhere = Weighted(_unusual(kind))
    model.odd = nn.Module()
    model.odd.wo_a = Weighted(_unusual(kind))
    report = reclaimer().reclaim(model)
    found = {layer.name: (layer.state.value, layer.reason) for layer in report.layers}
    assert found == {"layers.0.wo_a": ("reclaimed", None), "odd.wo_a": ("kept", reason)}


def test_a_three_dimensional_weight_brings_its_groups() -> None:
    """Case 11: a weight stored as ``[G, R, D]`` is found, dropped and served."""
    weight = exact_weight(2, 64, 96).view(2, 64, 96).clone()
    model = Stack(Attention(weight.clone()))
    assert reclaimer().reclaim(model).count(mr.State.RECLAIMED) == 1
    assert (model.layers[0].wo_a.weight.shape, same_bits(model.layers[0].wo_a.weight.clone(), weight)) == (
        (2, 64, 96),
        True,
    )


REFUSALS: dict[str, tuple[Callable[[], torch.Tensor], str]] = {
    "fp8": (lambda: torch.zeros((128, 96)).to(torch.float8_e4m3fn), "nothing_to_do"),
    "fp32": (lambda: torch.zeros((128, 96)), "dtype"),
    "fp16": (lambda: torch.zeros((128, 96), dtype=torch.float16), "dtype"),
    "odd rows": (lambda: torch.zeros((130, 96), dtype=torch.bfloat16), "shape"),
    "odd groups": (lambda: torch.zeros((129, 96), dtype=torch.bfloat16), "shape"),
    "vector": (lambda: torch.zeros((128,), dtype=torch.bfloat16), "shape"),
    "scalar": (lambda: torch.zeros((), dtype=torch.bfloat16), "shape"),
    "empty": (lambda: torch.zeros((0, 96), dtype=torch.bfloat16), "shape"),
    "meta": (lambda: torch.zeros((128, 96), dtype=torch.bfloat16, device="meta"), "shape"),
    "transposed": (lambda: exact_weight().view(96, 128).t(), "not_contiguous"),
    "narrowed": (lambda: torch.zeros((128, 192), dtype=torch.bfloat16)[:, :96], "not_contiguous"),
    "expanded": (lambda: torch.zeros((1, 96), dtype=torch.bfloat16).expand(128, 96), "not_contiguous"),
    "part": (lambda: torch.zeros((256, 96), dtype=torch.bfloat16)[:128], "shared_storage"),
    "random": (lambda: torch.randn((128, 96)).to(torch.bfloat16), "mismatch"),
    "nan": (lambda: exact_weight().index_fill_(0, torch.tensor(3), float("nan")), "not_finite"),
}  # fmt: skip


@pytest.mark.parametrize("kind", REFUSALS)
def test_refusals_keep_the_very_weight(kind: str) -> None:
    """Cases 3, 6, 11, 22, 34: what cannot be dropped is kept with its reason, the object and its bytes untouched."""
    make, reason = REFUSALS[kind]
    model, rec = Stack(Attention(make())), reclaimer()
    weight = model.layers[0].wo_a.weight
    before = weight.detach().clone()
    report = rec.reclaim(model)
    assert [
        (layer.state.value, layer.reason.value, layer.gross_bytes, layer.twin_bytes) for layer in report.layers
    ] == [("kept", reason, 0, 0)]
    assert model.layers[0].wo_a.weight is weight
    if weight.device.type != "meta":
        assert same_bits(
            weight.view(torch.uint8) if kind == "fp8" else weight, before.view(torch.uint8) if kind == "fp8" else before
        )
    rec.check_integrity()


@pytest.mark.parametrize("parent", [nn.Module(), nn.Sequential(nn.Linear(4, 4))])
def test_models_without_a_target(parent: nn.Module) -> None:
    """A model without a target has nothing to find, and a reclaim of it is an empty report."""
    assert discover(parent) == ()
    assert reclaimer().reclaim(parent).to_dict()["layers"] == []


def test_a_target_without_a_weight() -> None:
    """A child of the name that has no weight, or None, is no target."""
    parent = nn.Module()
    parent.wo_a = nn.Linear(4, 4)
    parent.wo_a.weight = None
    assert discover(parent) == ()


def test_other_targets_by_name() -> None:
    """Targets are the operator's choice."""
    model = nn.Module()
    model.o_proj, model.n_local_groups = Weighted(exact_weight()), 2
    assert [one.name for one in discover(model, ("wo_a", "o_proj"))] == ["o_proj"]


def test_reclaimed_layers_are_left_out() -> None:
    """What is a tag already is no candidate."""
    assert discover(reclaimed(exact_weight())) == ()
