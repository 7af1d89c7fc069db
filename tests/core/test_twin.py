"""Twins: from a weight's bits and from a checkpoint's bytes, exact or refused."""

from __future__ import annotations

from typing import TYPE_CHECKING

import ml_dtypes
import numpy as np
import pytest
import torch
from core.models import bits, checkpoint_bytes, exact_weight, same_bits
from hypothesis import given, settings
from hypothesis import strategies as st

import memreclaim as mr

if TYPE_CHECKING:
    from collections.abc import Callable

pytestmark = pytest.mark.cpu

EVERY_PROPERTY = settings(max_examples=60, deadline=None)


def decoded(codes: torch.Tensor, exponents: np.ndarray) -> torch.Tensor:
    """What an engine computes, by numpy and ml_dtypes: ``bf16(float(code) * float(scale))``.

    In float64 so that it rounds once.
    """
    values = codes.view(torch.uint8).numpy().view(ml_dtypes.float8_e4m3fn).astype(np.float64)
    factors = np.ldexp(1.0, exponents.astype(np.int64) - 127)
    block = values.shape[0] // factors.shape[0]
    with np.errstate(over="ignore"):
        weight = (values * np.kron(factors, np.ones((block, block)))).astype(ml_dtypes.bfloat16)
    return torch.from_numpy(weight.view(np.int16)).view(torch.bfloat16)


def bf16(pattern: int) -> torch.Tensor:
    """The bf16 value of a 16-bit pattern."""
    return torch.tensor(pattern - 0x10000 if pattern & 0x8000 else pattern, dtype=torch.int16).view(torch.bfloat16)


def test_every_code_at_every_finite_exponent() -> None:
    """Case 5: 254 finite codes x 255 exponent bytes decode as ml_dtypes does, overflow to infinity apart."""
    every = torch.tensor([code for code in range(256) if code & 0x7F != 0x7F], dtype=torch.uint8)
    block = torch.cat((every, every.new_zeros(2))).view(8, 32).repeat(4, 1)
    for byte in range(255):
        codes, scales = block.view(torch.float8_e4m3fn), torch.tensor([[byte]], dtype=torch.uint8)
        expected = decoded(codes, scales.numpy())
        if not expected.isfinite().all():
            with pytest.raises(mr.NotExact) as caught:
                mr.Twin.from_checkpoint(codes, scales.view(torch.float8_e8m0fnu))
            assert (byte > 246, caught.value.reason) == (True, mr.Reason.NOT_FINITE)
            continue
        assert same_bits(mr.Twin.from_checkpoint(codes, scales.view(torch.float8_e8m0fnu)).dequantize(), expected)


@pytest.mark.parametrize("code", [0x7F, 0xFF])
def test_nan_codes_are_refused(code: int) -> None:
    """Case 5: the two NaN codes have no place in a twin."""
    codes, scales = checkpoint_bytes(1, 32, 32)
    codes.view(torch.uint8)[31, 31] = code
    with pytest.raises(mr.NotExact) as caught:
        mr.Twin.from_checkpoint(codes, scales)
    assert caught.value.reason is mr.Reason.NOT_FINITE


def test_a_nan_scale_is_refused() -> None:
    """Case 5: exponent byte 255 is NaN."""
    codes, scales = checkpoint_bytes(1, 32, 64)
    scales.view(torch.uint8)[0, 1] = 255
    with pytest.raises(mr.NotExact) as caught:
        mr.Twin.from_checkpoint(codes, scales)
    assert caught.value.reason is mr.Reason.NOT_FINITE


@pytest.mark.parametrize("groups", [1, 2, 4, 8])
def test_checkpoint_and_weight_give_the_same_bits(groups: int, device: torch.device) -> None:
    """Cases 1, 10: a twin of the checkpoint's bytes and one of the bf16 weight decode to the weight."""
    codes, scales = (part.to(device) for part in checkpoint_bytes(groups, 64, 96, seed=groups))
    weight = exact_weight(groups, 64, 96, seed=groups).to(device)
    ours = mr.build_twin(weight, groups=groups)
    theirs = mr.Twin.from_checkpoint(codes, scales, groups=groups)
    assert same_bits(theirs.dequantize(), weight)
    assert same_bits(ours.dequantize(), weight)
    assert ours.shape == theirs.shape == (groups, 64, 96)
    assert ours.nbytes == theirs.nbytes == weight.numel() + weight.numel() // 1024


def test_codes_come_back_in_natural_order() -> None:
    """``codes`` and ``exponents`` of a checkpoint's twin are the checkpoint's own bytes."""
    codes, scales = checkpoint_bytes(2, 64, 96)
    twin = mr.Twin.from_checkpoint(codes, scales, groups=2)
    assert torch.equal(twin.codes.view(torch.uint8), codes.view(torch.uint8).view(2, 64, 96))
    assert torch.equal(twin.exponents, scales.view(torch.uint8).view(2, 2, 3))


@pytest.mark.parametrize("as_float", [False, True])
@pytest.mark.parametrize("block", [32, 128])
def test_block_sizes_and_scale_dtypes(block: int, as_float: bool) -> None:
    """Case 8: 128x128 scales become 32x32 exponents, and power-of-two fp32 scales are the same scales."""
    codes, _ = checkpoint_bytes(2, 128, 256)
    exponents = torch.randint(0, 200, (256 // block, 256 // block), dtype=torch.uint8)
    scales = exponents.view(torch.float8_e8m0fnu)
    twin = mr.Twin.from_checkpoint(codes, scales.float() if as_float else scales, groups=2)
    assert twin.exponents.shape == (2, 4, 8)
    assert same_bits(twin.dequantize(), decoded(codes, exponents.numpy()))


@pytest.mark.parametrize("bad", [0.3, -1.0, 0.0, float("nan"), float("inf"), 2.0**-128])
def test_fp32_scales_that_are_no_power_of_two(bad: float) -> None:
    """A scale without an exponent byte has no twin: it is refused, not rounded."""
    codes, scales = checkpoint_bytes(1, 32, 64)
    factors = scales.float()
    factors[0, 0] = bad
    with pytest.raises(mr.NotExact) as caught:
        mr.Twin.from_checkpoint(codes, factors)
    expected = mr.Reason.MISMATCH if np.isfinite(bad) else mr.Reason.NOT_FINITE
    assert caught.value.reason is expected


@pytest.mark.parametrize("byte", [0, 1, 253, 254])
def test_fp32_scales_at_both_ends(byte: int) -> None:
    """Case 5: 2**-127 is an fp32 subnormal and still byte 0."""
    codes = torch.zeros((32, 32), dtype=torch.uint8)
    codes[0, 0] = 0x08
    scale = torch.tensor([[2.0 ** (byte - 127)]], dtype=torch.float64).float()
    twin = mr.Twin.from_checkpoint(codes.view(torch.float8_e4m3fn), scale)
    assert int(twin.exponents) == byte


@pytest.mark.parametrize(
    "spoil",
    [
        lambda c, s: (c, s[:-1]),
        lambda c, s: (c, s.view(torch.uint8).t().contiguous().view(torch.float8_e8m0fnu)),
        lambda c, s: (c, s[:, :0]),
        lambda c, s: (c, s.view(-1)),
        lambda c, s: (c, s.half()),
        lambda c, s: (c.view(torch.uint8), s),
        lambda c, s: (c.view(torch.float8_e5m2), s),
        lambda c, s: (c[:, :-1], s),
        lambda c, s: (c[0], s),
        lambda c, s: (c[:0], s[:0]),
    ],
)
def test_shapes_and_dtypes_that_are_no_checkpoint(
    spoil: Callable[[torch.Tensor, torch.Tensor], tuple[torch.Tensor, torch.Tensor]],
) -> None:
    """Case 9: scales transposed or cut, and dtypes that are not the format's, raise ``ValueError``."""
    codes, scales = checkpoint_bytes(2, 64, 96)
    with pytest.raises(ValueError, match=r"scales|codes|weight"):
        mr.Twin.from_checkpoint(*spoil(codes, scales), groups=2)


def test_square_scales_transposed_do_not_pass_the_proof() -> None:
    """Case 9: a transposed scale matrix of the same shape is caught by the proof."""
    codes, scales = checkpoint_bytes(1, 96, 96)
    weight = exact_weight(1, 96, 96)
    turned = scales.view(torch.uint8).t().contiguous().view(torch.float8_e8m0fnu)
    proof = mr.prove(mr.Twin.from_checkpoint(codes, turned), weight)
    assert (proof.exact, proof.mismatched > 0) == (False, True)


def test_groups_in_another_order_do_not_pass_the_proof() -> None:
    """Case 9: swapping two groups keeps every shape and is caught by the proof."""
    codes, scales = checkpoint_bytes(2, 64, 96)
    swapped = (codes.view(torch.uint8).view(2, 64, 96).flip(0).reshape(128, 96).view(torch.float8_e4m3fn),
               scales.view(torch.uint8).view(2, 2, 3).flip(0).reshape(4, 3).view(torch.float8_e8m0fnu))  # fmt: skip
    assert not mr.prove(mr.Twin.from_checkpoint(*swapped, groups=2), exact_weight(2, 64, 96)).exact


def test_interleaved_rows_do_not_pass_the_proof() -> None:
    """Case 9: rows that are rank-major instead of group-major keep every shape and are caught by the proof."""
    weight = exact_weight(2, 64, 96)
    mixed = weight.view(2, 64, 96).transpose(0, 1).reshape(128, 96).contiguous()
    assert not mr.prove(mr.build_twin(weight, groups=2), mixed).exact


def test_a_larger_scale_than_needed() -> None:
    """Case 7: the twin may choose a smaller exponent than the checkpoint, the decoded bits are the same."""
    codes, scales = torch.zeros((32, 32), dtype=torch.uint8), torch.tensor([[120]], dtype=torch.uint8)
    codes[0, :4] = torch.tensor([0x01, 0x02, 0x85, 0x08], dtype=torch.uint8)
    stored = mr.Twin.from_checkpoint(codes.view(torch.float8_e4m3fn), scales.view(torch.float8_e8m0fnu))
    built = mr.build_twin(stored.dequantize())
    assert (int(built.exponents) < 120, same_bits(built.dequantize(), stored.dequantize())) == (True, True)


@pytest.mark.parametrize("pattern", [0x7F80, 0xFF80, 0x7FC0, 0x7F81, 0xFFFF])
@pytest.mark.parametrize("place", [(0, 0), (63, 95), (32, 64)])
def test_nan_and_infinity_anywhere(pattern: int, place: tuple[int, int]) -> None:
    """Case 3: one NaN or infinity in a weight has reason ``not_finite``."""
    weight = exact_weight(1, 64, 96)
    weight[place] = bf16(pattern)
    with pytest.raises(mr.NotExact) as caught:
        mr.build_twin(weight, groups=1)
    assert caught.value.reason is mr.Reason.NOT_FINITE


@pytest.mark.parametrize("fill", [float("inf"), float("-inf"), float("nan")])
def test_a_block_of_nothing_finite(fill: float) -> None:
    """Case 3: a whole block of infinities, which e4m3 with a large scale could imitate, is refused."""
    weight = exact_weight(1, 64, 96)
    weight[32:, 32:64] = fill
    with pytest.raises(mr.NotExact) as caught:
        mr.build_twin(weight, groups=1)
    assert caught.value.reason is mr.Reason.NOT_FINITE


@pytest.mark.parametrize("scale", [2.0**-130, 2.0**-133, 2.0**-127])
def test_blocks_of_subnormals(scale: float, device: torch.device) -> None:
    """Case 4: bf16 subnormals decode exactly."""
    weight = exact_weight(1, 64, 64)
    weight[:32, :32] = torch.randint(-3, 4, (32, 32)).double().mul(scale).to(torch.bfloat16)
    assert int(bits(weight[:32, :32]).count_nonzero()) > 0
    weight = weight.to(device)
    assert same_bits(mr.build_twin(weight, groups=1).dequantize(), weight)


def test_negative_zero_is_kept() -> None:
    """Case 2: -0.0 decodes to -0.0 and +0.0 to +0.0, in all-zero blocks too."""
    weight = torch.zeros((64, 64), dtype=torch.bfloat16)
    weight[::2, ::3] = -0.0
    assert same_bits(mr.build_twin(weight).dequantize(), weight)


def test_random_bf16_says_how_much_and_where() -> None:
    """Case 6: a weight that e4m3 cannot hold names the count of elements and the first coordinate with both values."""
    weight = exact_weight(2, 64, 96)
    weight[70, 33] = bf16(0x3F81)
    weight[100, 1] = bf16(0x3F81)
    with pytest.raises(mr.NotExact, match=r"2 elements differ, first at \(70, 33\)") as caught:
        mr.build_twin(weight, groups=2)
    error = caught.value
    assert (error.reason, error.mismatched, error.first_mismatch) == (mr.Reason.MISMATCH, 2, (70, 33))
    assert error.first_mismatch is not None
    assert error.first_mismatch.expected_bits == 0x3F81


@pytest.mark.parametrize(
    ("weight", "groups", "reason"),
    [
        (torch.zeros((64, 64)), 1, "dtype"),
        (torch.zeros((64, 48), dtype=torch.bfloat16), 1, "shape"),
        (torch.zeros((64, 64), dtype=torch.bfloat16), 3, "shape"),
        (torch.zeros((64, 64), dtype=torch.bfloat16), 4, "shape"),
        (torch.zeros((0, 64), dtype=torch.bfloat16), 1, "shape"),
        (torch.zeros((64,), dtype=torch.bfloat16), None, "shape"),
        (torch.zeros((2, 64, 64), dtype=torch.bfloat16), 4, "shape"),
        (torch.zeros((64, 128), dtype=torch.bfloat16).t(), 1, "not_contiguous"),
        (torch.zeros((64, 128), dtype=torch.bfloat16)[:, :64], 1, "not_contiguous"),
    ],
)
def test_weights_that_are_not_even_tried(weight: torch.Tensor, groups: int | None, reason: str) -> None:
    """Cases 11, 13: dtype, shape and layout are refused by their own reasons."""
    with pytest.raises(mr.NotExact) as caught:
        mr.build_twin(weight, groups=groups)
    assert caught.value.reason.value == reason


@EVERY_PROPERTY
@given(st.data())
def test_any_block_of_codes_is_found_again(data: st.DataObject) -> None:
    """Case 1, 7: whatever codes and exponents a weight was made of, its twin decodes to it."""
    groups, rank, depth = (data.draw(st.sampled_from(n)) for n in ((1, 2, 3), (32, 64, 96), (32, 64)))
    low = data.draw(st.integers(0, 246))
    high = data.draw(st.integers(low, 246))
    seed = data.draw(st.integers(0, 2**31))
    codes, scales = checkpoint_bytes(groups, rank, depth, seed=seed, low=low, high=high)
    keep = data.draw(st.sampled_from([0xFF, 0x83, 0x07, 0x80, 0x00]))
    codes = (codes.view(torch.uint8) & keep).view(torch.float8_e4m3fn)
    weight = decoded(codes, scales.view(torch.uint8).numpy())
    assert same_bits(mr.Twin.from_checkpoint(codes, scales, groups=groups).dequantize(), weight)
    assert same_bits(mr.build_twin(weight, groups=groups).dequantize(), weight)


@EVERY_PROPERTY
@given(st.lists(st.tuples(st.integers(0, 1023), st.integers(0, 0xFFFF)), max_size=12), st.integers(0, 2**31))
def test_a_twin_is_exact_or_refused_for_any_bits(changes: list[tuple[int, int]], seed: int) -> None:
    """Cases 2, 3, 6: whatever bits stand where, a twin is exact or refused for the right reason."""
    weight = exact_weight(1, 32, 32, seed=seed)
    for place, pattern in changes:
        weight.view(-1)[place] = bf16(pattern)
    try:
        twin = mr.build_twin(weight)
    except mr.NotExact as error:
        assert (error.reason is mr.Reason.NOT_FINITE) == (not bool(weight.isfinite().all()))  # noqa: PT017
    else:
        assert same_bits(twin.dequantize(), weight)


def test_overwritten_twin_has_the_others_bits_at_its_own_address() -> None:
    """Codes and exponents are those of the other, where graphs expect them; the other is left as it is."""
    twin, other = (mr.build_twin(exact_weight(2, 64, 96, seed=seed), groups=2) for seed in (1, 2))
    expected, addresses = other.dequantize(), (twin.packed.data_ptr(), twin.exponents.data_ptr())
    assert not same_bits(twin.dequantize(), expected)
    twin.overwrite(other)
    assert same_bits(twin.dequantize(), expected)
    assert same_bits(other.dequantize(), expected)
    assert (twin.packed.data_ptr(), twin.exponents.data_ptr()) == addresses


def test_twin_of_another_shape_is_not_taken() -> None:
    """Also where the bytes would be broadcast or are as many; nothing is written."""
    twin, other = (mr.build_twin(exact_weight(groups, 64, 96), groups=groups) for groups in (2, 1))
    before = twin.dequantize()
    with pytest.raises(ValueError, match="cannot take the bytes"):
        twin.overwrite(other)
    assert same_bits(twin.dequantize(), before)
