"""On a GPU: the check before serving, graphs, streams and compilation, with whatever backend and plans it has."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
import torch

from memreclaim_kernels import ops, plan, reference, selfcheck, testing
from memreclaim_kernels.blocks import WeightShape

if TYPE_CHECKING:
    from memreclaim_kernels.selfcheck import Check

pytestmark = pytest.mark.gpu

SHAPE = WeightShape(2, 1024, 4096)
ROWS = (1, 2, 6, 8, 9, 16, 17, 33, 64, 100, 129, 192, 193, 700)


@pytest.fixture(scope="module")
def checks() -> tuple[Check, ...]:
    """The verdicts of this GPU, which decide what serves in the tests below."""
    plan.forget()
    device = torch.device("cuda")
    selfcheck.check_backend(device)
    return selfcheck.check(SHAPE, device, max_rows=192)


@pytest.fixture(scope="module")
def twin() -> tuple[torch.Tensor, torch.Tensor]:
    """A twin as checkpoints have it."""
    return testing.generate_twin(SHAPE, device="cuda", seed=5)


def serve(o: torch.Tensor, twin: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
    """Project by the plan of the call."""
    return ops.project(o, *twin, ops.plan_for(o, twin[0]))


def test_what_serves_has_the_bits_of_the_stock_path(
    checks: tuple[Check, ...], twin: tuple[torch.Tensor, torch.Tensor]
) -> None:
    """At every row count up to 192, and some above, what serves gives the bits of ``einsum``, by kernel or not."""
    weight = ops.dequantize(*twin)
    for rows in (*range(1, 193), 193, 700, 4096):
        o = testing.generate_activations(rows, SHAPE, seed=rows, device="cuda")
        testing.assert_same_bits(serve(o, twin), torch.einsum("tgd,grd->tgr", o, weight), f"{rows} rows")
    device = plan.device_of(weight.device)
    assert all(plan.select(rows, *SHAPE, device=device).reason for check in checks for rows in check.dequantised)


@pytest.mark.usefixtures("checks")
@pytest.mark.parametrize("rows", ROWS)
def test_fused_sums_are_within_rounding(rows: int, twin: tuple[torch.Tensor, torch.Tensor]) -> None:
    """Each plan of fused numerics has a relative error of at most 2e-3 and gives the same bits twice."""
    o = testing.generate_activations(rows, SHAPE, device="cuda")
    expected = torch.einsum("tgd,grd->tgr", o.double(), ops.dequantize(*twin).double())
    for candidate in plan.candidates(rows, *SHAPE, device=plan.device_of(o.device), numerics="fused"):
        first = ops.grouped_projection(o, *twin, candidate.key)
        assert testing.relative_error(first, expected) <= 2e-3
        testing.assert_same_bits(ops.grouped_projection(o, *twin, candidate.key), first, candidate.key)


@pytest.mark.usefixtures("checks")
@pytest.mark.parametrize("rows", ROWS)
def test_graph_replay(rows: int, twin: tuple[torch.Tensor, torch.Tensor]) -> None:
    """A captured projection replays on new activations with the bits of an eager call."""
    o = testing.generate_activations(rows, SHAPE, device="cuda")
    serve(o, twin)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = serve(o, twin)
    for seed in (1, 2):
        o.copy_(testing.generate_activations(rows, SHAPE, seed=seed, device="cuda"))
        captured.fill_(float("nan"))
        graph.replay()
        testing.assert_same_bits(captured, serve(o, twin), f"{rows} rows")


@pytest.mark.usefixtures("checks")
def test_two_streams(twin: tuple[torch.Tensor, torch.Tensor]) -> None:
    """Target and draft on two streams, interleaved 1,000 times, give what one at a time gives (case 31)."""
    other = testing.generate_twin(SHAPE, device="cuda", seed=6)
    sides = [
        (testing.generate_activations(rows, SHAPE, device="cuda"), each) for rows, each in ((6, twin), (200, other))
    ]
    expected = [serve(*side) for side in sides]
    streams = [torch.cuda.Stream() for _ in sides]
    torch.cuda.synchronize()
    wrong = torch.zeros(2, dtype=torch.int64, device="cuda")
    for _ in range(1000):
        for at, (stream, side) in enumerate(zip(streams, sides, strict=True)):
            with torch.cuda.stream(stream):
                wrong[at] += (serve(*side).view(torch.int16) != expected[at].view(torch.int16)).sum()
    torch.cuda.synchronize()
    assert wrong.tolist() == [0, 0]


@pytest.mark.usefixtures("checks")
def test_kernels_of_the_twin_agree_with_the_reference(twin: tuple[torch.Tensor, torch.Tensor]) -> None:
    """Encode, prove and dequantise of the backend that serves do what the reference does, at full size."""
    weight = ops.dequantize(*twin)
    testing.assert_same_bits(weight, reference.dequantize(*twin))
    encoded = ops.encode(weight)
    assert [torch.equal(ours, theirs) for ours, theirs in zip(encoded, reference.encode(weight), strict=True)] == [
        True,
        True,
    ]
    assert ops.prove(*encoded, weight).tolist() == [0, -1]
    weight.view(torch.int16)[1, 1000, 4000] ^= 1
    assert ops.prove(*encoded, weight).tolist() == [1, (1024 + 1000) * 4096 + 4000]


@pytest.mark.usefixtures("checks")
@pytest.mark.parametrize("rows", [1, 6, 64])
def test_compiled_model(rows: int, twin: tuple[torch.Tensor, torch.Tensor]) -> None:
    """Inside ``torch.compile`` the op gives the eager bits."""
    o = testing.generate_activations(rows, SHAPE, device="cuda")

    def model(o: torch.Tensor) -> torch.Tensor:
        return ops.planned_projection(o, *twin, "decode", "identical", "bmm").flatten(1)

    testing.assert_same_bits(torch.compile(model, fullgraph=True)(o), model(o))


@pytest.mark.usefixtures("checks")
def test_many_rows(twin: tuple[torch.Tensor, torch.Tensor]) -> None:
    """65,536 rows, more than 2**31 bytes of activations with their row stride, are projected to the last one."""
    rows = 65536
    o = torch.zeros((rows, 2 * 4096 + 8192), dtype=torch.bfloat16, device="cuda")[:, :8192].unflatten(1, (2, 4096))
    o[-3:] = testing.generate_activations(3, SHAPE, device="cuda")
    for key in ("mid:triton:chain:block_m=64", ops.plan_for(o, twin[0]).key):
        out = ops.grouped_projection(o, *twin, key)
        assert int(out[:-3].count_nonzero()) == 0
        expected = torch.einsum("tgd,grd->tgr", o[-3:].double(), ops.dequantize(*twin).double())
        assert testing.relative_error(out[-3:], expected) <= 2e-3
