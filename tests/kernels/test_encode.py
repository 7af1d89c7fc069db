"""Encoding: kernel and reference give the same bytes, and the bytes are the smallest exact twin where there is one."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from memreclaim_kernels import blocks, ops, reference, testing
from memreclaim_kernels import encode as kernel
from memreclaim_kernels.blocks import WeightShape

SHAPE = WeightShape(2, 64, 160)


def from_bits(bits: torch.Tensor) -> torch.Tensor:
    """bf16 of 16-bit patterns given as integers."""
    return bits.to(torch.int32).sub_((bits >= 0x8000).int() * 0x10000).to(torch.int16).view(torch.bfloat16)


def all_patterns() -> torch.Tensor:
    """Every 16-bit pattern once, in blocks of 1,024 neighbours: every exponent field, NaNs and infinities."""
    return from_bits(torch.arange(65536).view(64, 32, 32).permute(1, 0, 2).reshape(1, 32, 2048))


def random_patterns() -> torch.Tensor:
    """Patterns drawn at random, so that a block's elements differ by hundreds of octaves."""
    return from_bits(torch.randint(0, 65536, tuple(SHAPE), generator=torch.Generator().manual_seed(1)))


def peaks() -> torch.Tensor:
    """Blocks whose largest element is just below, at and above 448 times a power of two, and small ones beside it."""
    weight = torch.full((1, 32, 32 * 6), 2.0**-9, dtype=torch.bfloat16)
    for block, bits in enumerate((0x43DF, 0x43E0, 0x43E1, 0x7F60, 0x7F61, 0x7F7F)):
        weight[0, 3, block * 32 + 5] = from_bits(torch.tensor(bits))
    return weight


WEIGHTS = {
    "all_patterns": all_patterns,
    "random_patterns": random_patterns,
    "peaks": peaks,
    "checkpoint": lambda: reference.dequantize(*testing.generate_twin(SHAPE)),
    "wide_exponents": lambda: reference.dequantize(*testing.generate_twin(SHAPE, exponents=(0, 245))),
    "random_bf16": lambda: torch.randn(tuple(SHAPE), generator=torch.Generator().manual_seed(2)).bfloat16(),
    "subnormal": lambda: torch.full((1, 32, 64), 2.0**-130, dtype=torch.bfloat16),
    "zeros": lambda: torch.zeros((1, 32, 32), dtype=torch.bfloat16),
    "negative_zeros": lambda: -torch.zeros((1, 64, 32), dtype=torch.bfloat16),
}


@pytest.mark.parametrize("name", WEIGHTS)
def test_kernel_gives_the_reference_bytes(kernel_device: torch.device, name: str) -> None:
    """Codes and exponents of the kernel equal the reference's, for every bf16 pattern and adversarial blocks."""
    weight = WEIGHTS[name]()
    codes, exponents = kernel.encode(weight.to(kernel_device))
    expected_codes, expected_exponents = reference.encode(weight)
    assert torch.equal(expected_exponents, exponents.cpu())
    assert torch.equal(expected_codes, codes.cpu())


@pytest.mark.cpu
@pytest.mark.parametrize("span", [(115, 126), (0, 12), (0, 245), (1, 1)])
def test_representable_weights_come_back(span: tuple[int, int]) -> None:
    """A weight that a twin can hold is encoded without a changed bit, bf16 subnormals included (cases 1, 4 and 5)."""
    weight = reference.dequantize(*testing.generate_twin(SHAPE, exponents=span))
    codes, exponents = ops.encode(weight)
    assert ops.prove(codes, exponents, weight).tolist() == [0, -1]
    testing.assert_same_bits(ops.dequantize(codes, exponents), weight)


@pytest.mark.cpu
def test_exponent_is_the_smallest_that_holds_the_peak() -> None:
    """Each block's exponent brings its peak to at most 448, and one less would not (float64 as the judge)."""
    weight = reference.dequantize(*testing.generate_twin(SHAPE, exponents=(20, 240)))
    _, exponents = reference.encode(weight)
    peak = weight.double().abs().view(2, 2, 32, 5, 32).amax(dim=(2, 4)).numpy()
    scale = np.ldexp(1.0, exponents.numpy().astype(int) - blocks.EXPONENT_BIAS)
    assert (peak <= 448 * scale).all()
    assert (peak > 448 * scale / 2).all()


@pytest.mark.cpu
def test_larger_scale_than_needed_changes_the_exponent_and_no_bit() -> None:
    """A checkpoint scale above the smallest possible one gives another exponent and the same weight (case 7)."""
    codes = blocks.pack(torch.full((1, 32, 32), 0x18, dtype=torch.uint8))  # 2**-4 everywhere
    exponents = torch.full((1, 1, 1), 127, dtype=torch.uint8)
    weight = reference.dequantize(codes, exponents)
    smallest = ops.encode(weight)
    assert int(smallest[1]) < int(exponents)
    testing.assert_same_bits(ops.dequantize(*smallest), weight)


@pytest.mark.cpu
def test_zero_blocks_keep_their_signs() -> None:
    """An all-zero block decodes to the same zeros, -0.0 as -0.0 (case 2)."""
    weight = torch.zeros((1, 32, 64), dtype=torch.bfloat16)
    weight[:, ::2, 32:] = -0.0
    codes, exponents = ops.encode(weight)
    assert exponents.tolist() == [[[127, 127]]]
    testing.assert_same_bits(ops.dequantize(codes, exponents), weight)
