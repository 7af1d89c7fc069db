"""The projection kernels against float64, at every family, order of sums, tile and stride."""

from __future__ import annotations

import pytest
import torch

from memreclaim_kernels import ops, plan, reference, testing
from memreclaim_kernels.blocks import WeightShape
from memreclaim_kernels.testing import Case, Stride

KERNELS = {
    "gemv": ("gemv:triton:gemv:", 1),
    "gemv_free": ("gemv:triton:free:warps=8", 1),
    "small_1": ("small:triton:chain:", 1),
    "small_8": ("small:triton:chain:block_k=64,block_n=32", 8),
    "small_splits": ("small:triton:splits8:block_k=32", 3),
    "mid": ("mid:triton:chain:", 9),
    "mid_wide": ("mid:triton:chain:block_k=64,block_m=32,block_n=64", 33),
    "mid_split_k": ("mid:triton:free:block_k=64,block_n=64,split_k=4", 17),
    "large": ("large:triton:chain:block_m=64,block_n=32", 65),
}
"""Plan and row count of each kernel."""


def shape_for(name: str) -> WeightShape:
    """A small shape that the kernel takes: depths that no tile divides where the order of sums allows it."""
    if name == "gemv":
        return WeightShape(1, 32, 1024)
    return WeightShape(1, 32, 256) if name == "small_splits" else WeightShape(2, 32, 288)


def project(name: str, case: Case) -> torch.Tensor:
    """Run a kernel by its name."""
    return ops.grouped_projection(*case, KERNELS[name][0])


@pytest.mark.parametrize("name", KERNELS)
def test_exact_sums(kernel_device: torch.device, name: str) -> None:
    """Where fp32 holds every partial sum exactly, each kernel gives the bits of the rounded float64 result."""
    case = testing.generate_case(
        "exact", KERNELS[name][1], shape_for(name), stride=Stride(row_pad=8), device=kernel_device
    )
    weight = reference.dequantize(case.codes, case.exponents)
    testing.assert_same_bits(project(name, case), testing.project_float64(case, weight).bfloat16(), name)


@pytest.mark.parametrize("name", KERNELS)
def test_relative_error(kernel_device: torch.device, name: str) -> None:
    """On random data the relative error against float64 is that of bf16 rounding, at most 2e-3."""
    case = testing.generate_case("normal", KERNELS[name][1], shape_for(name), device=kernel_device)
    weight = reference.dequantize(case.codes, case.exponents)
    assert testing.relative_error(project(name, case), testing.project_float64(case, weight)) <= 2e-3


@pytest.mark.parametrize("stride", list(testing.enumerate_strides()), ids=str)
@pytest.mark.parametrize("name", ["gemv_free", "small_8", "mid"])
def test_strides(kernel_device: torch.device, name: str, stride: Stride) -> None:
    """Padded rows, padded groups and one group shared by all give what contiguous activations give (case 12)."""
    shape = WeightShape(2, 32, 96)
    case = testing.generate_case("exact", KERNELS[name][1], shape, stride=stride, device=kernel_device)
    dense = case._replace(o=case.o.contiguous())
    assert case.o.stride() != dense.o.stride() or stride == Stride() or name == "gemv_free"
    testing.assert_same_bits(project(name, case), project(name, dense), name)


@pytest.mark.parametrize("shape", list(testing.enumerate_small_shapes()), ids=str)
@pytest.mark.parametrize("name", ["gemv_free", "small_8", "mid_split_k"])
def test_shapes(kernel_device: torch.device, name: str, shape: WeightShape) -> None:
    """Other ranks and depths than 1024 x 4096 work, down to one block (case 13)."""
    case = testing.generate_case("exact", KERNELS[name][1], shape, device=kernel_device)
    weight = reference.dequantize(case.codes, case.exponents)
    testing.assert_same_bits(project(name, case), testing.project_float64(case, weight).bfloat16(), name)


@pytest.mark.parametrize("kind", ["weak", "faint", "zeros"])
@pytest.mark.parametrize("name", ["gemv_free", "small_8", "mid"])
def test_small_values(kernel_device: torch.device, name: str, kind: str) -> None:
    """Subnormal weights, subnormal activations and zeros of both signs are not flushed (case 4)."""
    case = testing.generate_case(kind, KERNELS[name][1], WeightShape(2, 32, 96), device=kernel_device)
    weight = reference.dequantize(case.codes, case.exponents)
    expected = testing.project_float64(case, weight)
    assert float(expected.abs().max()) > 0
    # bf16 subnormals have an absolute step of 2**-133, everything else a relative one.
    assert torch.allclose(
        project(name, case).double(), expected, rtol=2.0**-7, atol=2.0**-133 + 1e-5 * expected.abs().max()
    )


@pytest.mark.parametrize(("name", "groups"), [("gemv_free", 4), ("small_8", 4), ("mid", 1), ("mid", 4), ("mid", 8)])
def test_groups(kernel_device: torch.device, name: str, groups: int) -> None:
    """Each group is projected by its own matrix, at every group count a rank can have (case 10)."""
    case = testing.generate_case("exact", KERNELS[name][1], WeightShape(groups, 32, 32), device=kernel_device)
    weight = reference.dequantize(case.codes, case.exponents)
    testing.assert_same_bits(project(name, case), testing.project_float64(case, weight).bfloat16(), name)


@pytest.mark.parametrize("name", ["gemv_free", "small_8", "mid_split_k"])
def test_two_runs_agree(kernel_device: torch.device, name: str) -> None:
    """The same call gives the same bits again, whatever was in memory before."""
    case = testing.generate_case("normal", KERNELS[name][1], WeightShape(1, 64, 96), device=kernel_device)
    testing.assert_same_bits(project(name, case), project(name, case), name)


def test_values_past_the_activations_are_not_read(kernel_device: torch.device) -> None:
    """Memory between and behind the rows is NaN in these cases, and no NaN comes out."""
    case = testing.generate_case("normal", 9, WeightShape(2, 32, 96), stride=Stride(3, 5), device=kernel_device)
    assert bool(project("mid", case).isfinite().all())


@pytest.mark.parametrize("name", ["gemv", "small_8"])
def test_too_many_rows_are_refused(kernel_device: torch.device, name: str) -> None:
    """A family called with more rows than it takes refuses: it would leave rows unwritten."""
    case = testing.generate_case("normal", 9, shape_for(name), device=kernel_device)
    with pytest.raises(ValueError, match="takes"):
        project(name, case)


@pytest.mark.gpu
@pytest.mark.parametrize("rows", [1, 2, 8, 9, 16, 33, 64, 65, 129, 192, 193, 512])
@pytest.mark.parametrize("kind", testing.KINDS)
def test_chain_has_the_bits_of_cublas(rows: int, kind: str) -> None:
    """On this GPU the chain gives the bits of ``torch.einsum``, or the check on the device keeps it from serving."""
    shape = next(testing.enumerate_shapes())
    device = torch.device("cuda")
    case = testing.generate_case(kind, rows, shape, stride=Stride(row_pad=64), device=device)
    weight = ops.dequantize(case.codes, case.exponents)
    expected = torch.einsum("tgd,grd->tgr", case.o, weight)
    for candidate in plan.candidates(rows, *shape, device=plan.device_of(device)):
        difference = testing.first_difference(ops.grouped_projection(*case, candidate.key), expected)
        verdict = plan.verified(candidate, rows, shape, plan.device_of(device))
        assert difference is None or verdict is None or not verdict.same, f"{candidate.key}: {difference}"
