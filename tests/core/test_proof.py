"""The proof: 16-bit patterns, all of them, with count, first coordinate and both values."""

from __future__ import annotations

import pytest
import torch
from core.models import Attention, Stack, exact_weight, reclaimer
from hypothesis import given, settings
from hypothesis import strategies as st

import memreclaim as mr

pytestmark = pytest.mark.cpu


@pytest.mark.parametrize("groups", [1, 2, 4])
def test_an_exact_twin_is_proven(groups: int, device: torch.device) -> None:
    """Case 1: nothing differs, and every element was compared."""
    weight = exact_weight(groups, 64, 96).to(device)
    assert mr.prove(mr.build_twin(weight, groups=groups), weight) == mr.Proof(True, groups * 64 * 96, 0, None)


@pytest.mark.parametrize(("there", "here"), [(0.0, -0.0), (-0.0, 0.0)])
def test_the_sign_of_zero_counts(there: float, here: float, device: torch.device) -> None:
    """Case 2: -0.0 where the twin holds +0.0 is one mismatch, and the other way round."""
    weight = exact_weight(1, 32, 32)
    weight[3, 4] = there
    twin = mr.build_twin(weight.to(device))
    weight[3, 4] = here
    proof = mr.prove(twin, weight.to(device))
    assert (proof.exact, proof.mismatched, proof.first_mismatch) == (False, 1, (3, 4))
    assert proof.first_mismatch is not None
    assert {proof.first_mismatch.expected_bits, proof.first_mismatch.actual_bits} == {0x0000, 0x8000}


def test_nan_in_the_weight_is_a_mismatch() -> None:
    """Case 3: a NaN equals nothing that a twin holds."""
    weight = exact_weight(1, 32, 32)
    twin = mr.build_twin(weight)
    weight[31, 31] = float("nan")
    proof = mr.prove(twin, weight)
    assert (proof.mismatched, proof.first_mismatch) == (1, (31, 31))


@settings(max_examples=80, deadline=None)
@given(st.sets(st.integers(0, 2 * 64 * 96 - 1), min_size=1, max_size=20), st.integers(1, 0xFFFF), st.booleans())
def test_any_flipped_bits_are_counted_and_the_first_is_named(places: set[int], flip: int, grouped: bool) -> None:
    """Case 6: however few bits differ, the proof counts the elements and names the first in the weight's own shape."""
    weight = exact_weight(2, 64, 96)
    if grouped:
        weight = weight.view(2, 64, 96)
    twin = mr.build_twin(weight, groups=2)
    signed = flip - 0x10000 if flip & 0x8000 else flip
    expected = int(weight.view(torch.int16).view(-1)[min(places)]) & 0xFFFF
    weight.view(torch.int16).view(-1)[list(places)] ^= signed
    proof = mr.prove(twin, weight)
    row, column = divmod(min(places), 96)
    assert (proof.exact, proof.mismatched) == (False, len(places))
    assert proof.first_mismatch == ((row // 64, row % 64, column) if grouped else (row, column))
    assert proof.first_mismatch is not None
    assert (proof.first_mismatch.actual_bits, proof.first_mismatch.expected_bits) == (expected, expected ^ flip)


def test_the_message_names_both_values() -> None:
    """Case 6: a person reads the coordinate, both values and both patterns."""
    weight = torch.zeros((32, 32), dtype=torch.bfloat16)
    weight[0, 1] = 1.0
    twin = mr.build_twin(weight)
    weight[0, 1] = -1.0
    first = mr.prove(twin, weight).first_mismatch
    assert first is not None
    assert first.describe() == "at (0, 1): weight -1.0 (0xbf80), twin 1.0 (0x3f80)"


@pytest.mark.parametrize(
    "weight",
    [
        torch.zeros((64, 96), dtype=torch.bfloat16), torch.zeros((128, 96)),
        torch.zeros((96, 128), dtype=torch.bfloat16).t(),
        torch.zeros((4, 32, 96), dtype=torch.bfloat16), torch.zeros((96, 128), dtype=torch.bfloat16),
    ],
)  # fmt: skip
def test_what_cannot_be_compared_raises(weight: torch.Tensor) -> None:
    """Case 9: another shape, dtype or layout is an error of the caller, not a verdict."""
    with pytest.raises(ValueError, match="weight"):
        mr.prove(mr.build_twin(exact_weight(), groups=2), weight)


def test_a_mismatch_is_described_under_any_default_device() -> None:
    """Case 6: a layer that does not match is reported where an engine made ``meta`` the default device."""
    model = Stack(Attention(torch.randn((128, 96)).bfloat16()))
    with torch.device("meta"):
        (layer,) = reclaimer().reclaim(model).layers
    assert (layer.state, layer.reason) == (mr.State.KEPT, mr.Reason.MISMATCH)
    assert "weight" in layer.first_mismatch.describe()
