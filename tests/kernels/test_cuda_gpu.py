"""The CUDA kernels on a GPU: bits, float64, poison, determinism, graphs, streams, strides, many rows."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

import pytest
import torch

from memreclaim_kernels import blocks, cuda, reference, testing
from memreclaim_kernels.blocks import WeightShape

if TYPE_CHECKING:
    from collections.abc import Callable

    Kernel = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor], None]

pytestmark = pytest.mark.gpu

SHAPE = WeightShape(2, 1024, 4096)
CHAIN_ROWS = (1, 7, 8, 9, 16, 33, 64, 65, 100, 128, 129, 192, 193, 256, 300, 512, 700, 1024, 2049)
Twin = tuple[torch.Tensor, torch.Tensor]


@pytest.fixture(scope="module")
def twin() -> Twin:
    """A twin as checkpoints have it, complete before any kernel reads it."""
    made = testing.generate_twin(SHAPE, device="cuda", seed=3)
    torch.cuda.synchronize()
    return made


@pytest.fixture(scope="module")
def weight(twin: Twin) -> torch.Tensor:
    """Its bf16 weight, by the reference."""
    return reference.dequantize(*(part.cpu() for part in twin)).cuda()


def run(kernel: Kernel, o: torch.Tensor, twin: Twin) -> torch.Tensor:
    """Call into a poisoned result."""
    shape = blocks.shape_of(twin[0])
    out = torch.full((o.shape[0], shape.groups, shape.rank), float("nan"), dtype=torch.bfloat16, device="cuda")
    kernel(o, *twin, out)
    return out


def chain(rows: int, shape: WeightShape = SHAPE) -> Kernel:
    """The kernel that keeps cuBLAS's order at a row count; skips where the GPU has no wgmma."""
    if torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("wgmma exists on compute capability 9.0 only")
    return cuda.mid if cuda.family_of(rows, shape) == "mid" else cuda.large


def families() -> list[tuple[str, int]]:
    """Each family with a row count."""
    return [
        ("gemv", 1),
        ("small", 1),
        ("small", 5),
        ("small", 8),
        *(("chain", rows) for rows in (3, 40, 100, 200, 600)),
    ]


def kernel_of(family: str, rows: int) -> Kernel:
    """The launch function of a family."""
    return {"gemv": cuda.gemv, "small": cuda.small}.get(family) or chain(rows)


@pytest.mark.parametrize("exponents", [(115, 126), (0, 11), (130, 254)])
def test_dequantize_prove_and_encode_are_the_reference(exponents: tuple[int, int]) -> None:
    """Decoded bits, proofs and encoded bytes equal the reference's, at checkpoint and extreme exponents."""
    shape = WeightShape(2, 256, 1024)
    codes, scales = testing.generate_twin(shape, exponents=exponents, seed=1)
    expected = reference.dequantize(codes, scales)
    out = torch.full(shape, float("nan"), dtype=torch.bfloat16, device="cuda")
    cuda.dequantize(codes.cuda(), scales.cuda(), out)
    assert torch.equal(expected.view(torch.int16), out.cpu().view(torch.int16))
    result = torch.zeros(2, dtype=torch.int64, device="cuda")
    cuda.prove(codes.cuda(), scales.cuda(), out, result)
    assert result.tolist() == [0, -1]
    out.view(torch.int16)[1, 77, 33] ^= 1
    cuda.prove(codes.cuda(), scales.cuda(), out, result)
    assert result.tolist() == [1, (256 + 77) * 1024 + 33]
    encoded = torch.empty_like(codes, device="cuda"), torch.empty_like(scales, device="cuda")
    cuda.encode(expected.cuda(), *encoded)
    for actual, want in zip(encoded, reference.encode(expected), strict=True):
        assert torch.equal(want, actual.cpu())


@pytest.mark.parametrize("rows", CHAIN_ROWS)
def test_chain_has_the_bits_of_bmm(rows: int, twin: Twin, weight: torch.Tensor) -> None:
    """Mid and large differ from cuBLAS in no bit, contiguous, with padded rows, and with one group for all."""
    kernel = chain(rows)
    wide = torch.randn(rows, 2, 4096 + 64, device="cuda").bfloat16()
    for o in (wide[..., :4096], wide[..., :4096].contiguous(), wide[:, :1, :4096].expand(-1, 2, -1)):
        expected = torch.bmm(o.transpose(0, 1), weight.transpose(1, 2)).transpose(0, 1)
        testing.assert_same_bits(run(kernel, o, twin), expected, f"{rows} rows, stride {o.stride()}")


@pytest.mark.parametrize(("family", "rows"), families())
def test_error_is_bf16_rounding(family: str, rows: int, twin: Twin, weight: torch.Tensor) -> None:
    """Against float64 the relative error is at most 2e-3; two runs give the same bits."""
    kernel = kernel_of(family, rows)
    o = torch.randn(rows, 2, 4096, device="cuda").bfloat16()
    first, second = run(kernel, o, twin), run(kernel, o, twin)
    expected = torch.einsum("tgd,grd->tgr", o.double(), weight.double())
    assert float((first.double() - expected).norm() / expected.norm()) <= 2e-3
    testing.assert_same_bits(first, second, "second run")


@pytest.mark.parametrize(("family", "rows"), families())
def test_wide_exponents_take_the_slow_decoder(family: str, rows: int) -> None:
    """Exponents above 134, which need two multiplications, give finite values within bf16 rounding of float64."""
    kernel = kernel_of(family, rows)
    codes, exponents = testing.generate_twin(SHAPE, exponents=(120, 150), device="cuda", seed=9)
    decoded = reference.dequantize(codes.cpu(), exponents.cpu()).cuda().double()
    o = torch.randn(rows, 2, 4096, device="cuda").bfloat16()
    expected = torch.einsum("tgd,grd->tgr", o.double(), decoded)
    actual = run(kernel, o, (codes, exponents)).double()
    assert float((actual - expected).norm() / expected.norm()) <= 2e-3


@pytest.mark.parametrize(("family", "rows"), families())
def test_graph_replays_and_two_streams_agree(family: str, rows: int, twin: Twin) -> None:
    """A captured chain of calls replays to the same bits as eager calls, also while another stream runs the same."""
    kernel = kernel_of(family, rows)
    inputs = [torch.randn(rows, 2, 4096, device="cuda").bfloat16() for _ in range(4)]
    expected = [run(kernel, o, twin) for o in inputs]
    outs = [torch.empty_like(out) for out in expected]
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for o, out in zip(inputs, outs, strict=True):
            kernel(o, *twin, out)
    side, others = torch.cuda.Stream(), [torch.empty_like(out) for out in expected]
    side.wait_stream(torch.cuda.current_stream())
    for _ in range(3):
        for out in outs:
            out.fill_(float("nan"))
        graph.replay()
        with torch.cuda.stream(side):
            for o, out in zip(inputs, others, strict=True):
                kernel(o, *twin, out)
    torch.cuda.synchronize()
    for want, replayed, other in zip(expected, outs, others, strict=True):
        testing.assert_same_bits(replayed, want, "replay")
        testing.assert_same_bits(other, want, "second stream")


def test_rows_of_a_batch_do_not_depend_on_each_other(twin: Twin) -> None:
    """NaN activations of one token leave every other token's bits alone."""
    for family, rows in families():
        if rows < 2:
            continue
        o = torch.randn(rows, 2, 4096, device="cuda").bfloat16()
        clean = run(kernel_of(family, rows), o, twin)
        o[1] = float("nan")
        dirty = run(kernel_of(family, rows), o, twin)
        keep = torch.arange(rows, device="cuda") != 1
        testing.assert_same_bits(dirty[keep], clean[keep], family)


@pytest.mark.parametrize(("groups", "rows"), [(1, 192), (1, 700), (4, 3), (4, 150), (8, 50), (8, 130)])
def test_other_group_counts_have_the_bits_of_bmm(groups: int, rows: int) -> None:
    """The chain kernels differ from cuBLAS in no bit at TP1, TP8 and padded TP3 either."""
    shape = WeightShape(groups, 1024, 4096)
    kernel = chain(rows, shape)
    twin = testing.generate_twin(shape, device="cuda", seed=groups)
    decoded = torch.empty(shape, dtype=torch.bfloat16, device="cuda")
    cuda.dequantize(*twin, decoded)
    o = torch.randn(rows, groups, 4096, device="cuda").bfloat16()
    expected = torch.bmm(o.transpose(0, 1), decoded.transpose(1, 2)).transpose(0, 1)
    testing.assert_same_bits(run(kernel, o, twin), expected, f"{groups} groups")


def test_65536_rows(twin: Twin, weight: torch.Tensor) -> None:
    """The largest row count: the last rows have the bits of a smaller call."""
    kernel = chain(65536)
    o = torch.randn(65536, 2, 4096, device="cuda", dtype=torch.bfloat16)
    out = run(kernel, o, twin)
    expected = torch.bmm(o[-512:].transpose(0, 1), weight.transpose(1, 2)).transpose(0, 1)
    testing.assert_same_bits(out[-512:], expected, "last rows")
    assert not bool(torch.isnan(out).any())


@pytest.mark.parametrize("rows", [1, 2, 5, 8])
def test_mxfp8_is_the_quantised_bf16_result(rows: int, twin: Twin) -> None:
    """Scales are the smallest powers of two that hold 32 columns, codes the bf16 values over them; padding is zero."""
    o = torch.randn(rows, 2, 4096, device="cuda").bfloat16()
    q = torch.full((rows, 2048), 0xEE, dtype=torch.uint8, device="cuda")
    scales = torch.full((8192,), 0xEE, dtype=torch.uint8, device="cuda")
    cuda.small_mxfp8(o, *twin, q, scales)
    values = run(cuda.small, o, twin).float().view(rows, 64, 32)
    normalized = values.abs().amax(-1) * (1 / 448)
    exponent = torch.frexp(normalized).exponent + 126
    exponent = torch.where(torch.frexp(normalized).mantissa == 0.5, exponent - 0, exponent + 1)
    expected = (values * torch.exp2(127 - exponent.float())[..., None]).clamp(-448, 448).to(torch.float8_e4m3fn)
    assert torch.equal(expected.view(torch.uint8).view(rows, 2048), q)
    row, column = torch.arange(rows, device="cuda")[:, None], torch.arange(64, device="cuda")[None]
    place = column // 4 * 512 + row * 16 + column % 4
    assert torch.equal(exponent.to(torch.uint8), scales[place])
    scales[place] = 0
    assert int(scales.sum()) == 0


def test_prepare_then_capture_compiles_nothing(twin: Twin, monkeypatch: pytest.MonkeyPatch) -> None:
    """After ``prepare`` no kernel is compiled by a call it named."""
    cuda.prepare(0, SHAPE, rows=(1, 8, 40, 200))
    from memreclaim_kernels.cuda import _nvrtc

    monkeypatch.setattr(_nvrtc, "compile_source", partial(pytest.fail, "compiled"))
    for family, rows in (("gemv", 1), ("small", 8), ("chain", 40), ("chain", 200)):
        run(kernel_of(family, rows), torch.randn(rows, 2, 4096, device="cuda").bfloat16(), twin)
