"""Every e4m3 byte at every finite exponent, against a decoder that shares nothing with ours."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest
import torch

from memreclaim_kernels import blocks, ops, reference, testing

EXPONENTS = blocks.MAX_EXPONENT + 1


@pytest.fixture(scope="module")
def natural() -> torch.Tensor:
    """uint8 ``[32, 32 * 255]``: each 32x32 block holds all 256 codes four times, block b is for exponent b."""
    return torch.arange(1024).to(torch.uint8).view(32, 32).repeat(1, EXPONENTS)


@pytest.fixture(scope="module")
def twin(natural: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The same as a twin."""
    return blocks.pack(natural.unsqueeze(0)), torch.arange(EXPONENTS, dtype=torch.uint8).view(1, 1, -1)


@pytest.fixture(scope="module")
def expected(natural: torch.Tensor) -> np.ndarray:
    """bf16 bits by ml_dtypes' e4m3, float64 and ml_dtypes' rounding: every product is exact in float64."""
    codes = natural.numpy().view(ml_dtypes.float8_e4m3fn).astype(np.float64)
    scales = np.repeat(np.ldexp(1.0, np.arange(EXPONENTS) - blocks.EXPONENT_BIAS), 32)
    with np.errstate(over="ignore"):
        return (codes * scales).astype(ml_dtypes.bfloat16)


def assert_equal(actual: torch.Tensor, expected: np.ndarray) -> None:
    """The same bits, except that any NaN is as good as another."""
    bits = actual.contiguous().view(torch.int16).numpy().view(np.uint16)
    nan = np.isnan(expected.astype(np.float32))
    assert np.array_equal(nan, actual.isnan().numpy())
    wrong = np.argwhere((bits != expected.view(np.uint16)) & ~nan)
    assert wrong.tolist() == []


@pytest.mark.cpu
def test_all_pairs_are_covered(natural: torch.Tensor) -> None:
    """The fixture really holds every pair of code and exponent."""
    pairs = natural.int() * EXPONENTS + torch.arange(EXPONENTS).repeat_interleave(32)
    assert [code * EXPONENTS + exponent for code, exponent in testing.enumerate_codes()] == pairs.unique().tolist()


@pytest.mark.cpu
def test_rounding_occurs(expected: np.ndarray) -> None:
    """Some products are bf16 subnormals that are rounded, and some overflow, so that both are really compared."""
    values = np.abs(expected.astype(np.float64))
    assert np.count_nonzero((values > 0) & (values < 2.0**-126)) > 1000
    assert np.count_nonzero(np.isinf(values)) > 0


@pytest.mark.cpu
def test_reference_decode(natural: torch.Tensor, expected: np.ndarray) -> None:
    """The reference decoder gives every bf16 value exactly, subnormals and overflow included."""
    exponents = torch.arange(EXPONENTS, dtype=torch.uint8).repeat_interleave(32)
    assert_equal(reference.decode(natural, exponents.expand_as(natural)), expected)


@pytest.mark.cpu
def test_cpu_dequantize(twin: tuple[torch.Tensor, torch.Tensor], expected: np.ndarray) -> None:
    """The CPU op gives the same, at wide exponents (its careful path)."""
    assert_equal(ops.dequantize(*twin)[0], expected)


@pytest.mark.cpu
def test_cpu_dequantize_block_by_block(twin: tuple[torch.Tensor, torch.Tensor], expected: np.ndarray) -> None:
    """The CPU op gives the same when each exponent stands alone, so that its fast path serves all that it can."""
    codes, exponents = twin
    parts = [
        ops.dequantize(codes[:, :, at : at + 1].contiguous(), exponents[:, :, at : at + 1].contiguous())
        for at in range(EXPONENTS)
    ]
    assert_equal(torch.cat(parts, dim=2)[0], expected)


@pytest.mark.filterwarnings("ignore:overflow encountered:RuntimeWarning")  # numpy, at products that are infinite
def test_kernel_dequantize(
    kernel_device: torch.device, twin: tuple[torch.Tensor, torch.Tensor], expected: np.ndarray
) -> None:
    """The Triton kernel gives the same."""
    from memreclaim_kernels import dequant

    codes, exponents = (part.to(kernel_device) for part in twin)
    assert_equal(dequant.dequantize(codes, exponents)[0].cpu(), expected)


@pytest.mark.cpu
def test_pack_and_unpack_are_inverse() -> None:
    """Tile order is a permutation: packing and unpacking give every byte back, and no two bytes share a place."""
    natural = torch.randint(0, 256, (2, 64, 96), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    assert torch.equal(natural, blocks.unpack(blocks.pack(natural)))
    places = blocks.pack(torch.arange(512).view(1, 16, 32).remainder(256).to(torch.uint8))
    assert torch.bincount(places.view(-1).int(), minlength=256).tolist() == [2] * 256


@pytest.mark.cpu
def test_tile_order_is_the_documented_one() -> None:
    """The byte at each offset stands for the row and column that the module's formula names."""
    rows = torch.arange(16, dtype=torch.uint8).view(1, 16, 1).expand(1, 16, 32)
    columns = torch.arange(32, dtype=torch.uint8).view(1, 1, 32).expand(1, 16, 32)
    expected = []
    for offset in range(512):
        rest, half = divmod(offset, 2)
        rest, lo = divmod(rest, 2)
        rest, h = divmod(rest, 2)
        rest, s = divmod(rest, 2)
        g, t = divmod(rest, 4)
        expected.append((half * 8 + g, s * 16 + h * 8 + t * 2 + lo))
    actual = zip(blocks.pack(rows).view(-1).tolist(), blocks.pack(columns).view(-1).tolist(), strict=True)
    assert expected == list(actual)
