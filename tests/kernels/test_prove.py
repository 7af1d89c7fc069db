"""The proof: how many bits differ and where the first does, on the CPU and by the fused kernel."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
import torch

from memreclaim_kernels import ops, reference, testing
from memreclaim_kernels import prove as kernel
from memreclaim_kernels.blocks import WeightShape

if TYPE_CHECKING:
    from collections.abc import Callable

SHAPE = WeightShape(2, 32, 288)
Prove = "Callable[[torch.Tensor, torch.Tensor, torch.Tensor], list[int]]"


@pytest.fixture
def prove(kernel_device: torch.device) -> Callable[[torch.Tensor, torch.Tensor, torch.Tensor], list[int]]:
    """Run the kernel, and check that the CPU op says the same."""

    def both(codes: torch.Tensor, exponents: torch.Tensor, weight: torch.Tensor) -> list[int]:
        verdict: list[int] = kernel.prove(*(part.to(kernel_device) for part in (codes, exponents, weight))).tolist()
        assert ops.prove(codes, exponents, weight).tolist() == verdict
        return verdict

    return both


def flip(weight: torch.Tensor, *coordinates: tuple[int, int, int]) -> torch.Tensor:
    """A copy with the lowest bit of some elements flipped."""
    changed = weight.clone()
    for coordinate in coordinates:
        changed.view(torch.int16)[coordinate] ^= 1
    return changed


def test_exact_twin(prove: Prove) -> None:
    """No element of an exact twin differs and there is no first one."""
    twin = testing.generate_twin(SHAPE)
    assert prove(*twin, reference.dequantize(*twin)) == [0, -1]


@pytest.mark.parametrize("coordinate", [(0, 0, 0), (0, 17, 255), (0, 31, 287), (1, 0, 0), (1, 8, 256), (1, 31, 287)])
def test_one_wrong_bit(prove: Prove, coordinate: tuple[int, int, int]) -> None:
    """One flipped bit anywhere, corners and tile edges included, is found where it is."""
    twin = testing.generate_twin(SHAPE)
    weight = flip(reference.dequantize(*twin), coordinate)
    group, row, column = coordinate
    assert [1, (group * 32 + row) * 288 + column] == prove(*twin, weight)


def test_first_of_many(prove: Prove) -> None:
    """Of several wrong elements in different programs all are counted and the lowest index is reported."""
    twin = testing.generate_twin(SHAPE)
    weight = flip(reference.dequantize(*twin), (1, 3, 9), (0, 20, 280), (0, 19, 287), (1, 31, 0))
    assert prove(*twin, weight) == [4, 19 * 288 + 287]


def test_all_elements_differ(prove: Prove) -> None:
    """A weight that differs everywhere is counted to the last element."""
    twin = testing.generate_twin(SHAPE)
    weight = reference.dequantize(*twin)
    weight.view(torch.int16).bitwise_xor_(1)
    assert [SHAPE.numel, 0] == prove(*twin, weight)


@pytest.mark.parametrize("value", [0.0, -0.0])
def test_sign_of_zero(prove: Prove, value: float) -> None:
    """A zero of the other sign is a mismatch (case 2)."""
    weight = torch.full((1, 32, 32), value, dtype=torch.bfloat16)
    twin = reference.encode(weight)
    assert prove(*twin, weight) == [0, -1]
    assert prove(*twin, -weight) == [1024, 0]


@pytest.mark.filterwarnings("ignore:overflow encountered:RuntimeWarning")  # numpy, at products that are infinite
@pytest.mark.parametrize("bits", [0x7FC0, -64, 0x7F81])
def test_nan_never_passes(prove: Prove, bits: int) -> None:
    """A twin never equals a weight with a NaN, whatever its sign and payload (case 3)."""
    weight = torch.ones((1, 32, 32), dtype=torch.bfloat16)
    weight.view(torch.int16)[0, 7, 5] = bits
    mismatched, first = prove(*reference.encode(weight), weight)
    assert mismatched > 0
    assert 0 <= first <= 7 * 32 + 5


def test_random_bf16_is_counted(prove: Prove) -> None:
    """Random bf16 does not pass, and the count is the number of elements that decode to something else (case 6)."""
    weight = torch.randn(tuple(SHAPE), generator=torch.Generator().manual_seed(3)).bfloat16()
    twin = reference.encode(weight)
    differs = (reference.dequantize(*twin).view(torch.int16) != weight.view(torch.int16)).view(-1)
    assert [int(differs.sum()), int(differs.nonzero()[0])] == prove(*twin, weight)


def test_transposed_scales_do_not_pass(prove: Prove) -> None:
    """Exponents in the wrong order of blocks are found (case 9)."""
    shape = WeightShape(1, 96, 96)
    codes, exponents = testing.generate_twin(shape)
    weight = reference.dequantize(codes, exponents)
    assert prove(codes, exponents.mT.contiguous(), weight)[0] > 0


def test_swapped_groups_do_not_pass(prove: Prove) -> None:
    """A twin whose groups stand in the other order is found (case 9)."""
    codes, exponents = testing.generate_twin(SHAPE)
    weight = reference.dequantize(codes, exponents)
    assert prove(codes.flip(0).contiguous(), exponents.flip(0).contiguous(), weight)[0] > 0


@pytest.mark.parametrize("zero_groups", [(3,), (0, 1, 2, 3), ()], ids=["one", "all", "repeated"])
def test_padded_groups(prove: Prove, zero_groups: tuple[int, ...]) -> None:
    """Groups that pad TP3 to 4, zeros or a repeat of the last, are exact like any other (case 10)."""
    weight = reference.dequantize(*testing.generate_twin(WeightShape(4, 32, 64)))
    weight[2:] = weight[2]
    for group in zero_groups:
        weight[group] = 0
    assert prove(*reference.encode(weight), weight) == [0, -1]
