"""The custom ops: what they compute on a CPU, their fakes, and that nothing gets past their checks."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from memreclaim_kernels import ops, plan, reference, testing
from memreclaim_kernels.blocks import WeightShape
from memreclaim_kernels.testing import Case, Stride

pytestmark = pytest.mark.cpu

SHAPE = WeightShape(2, 64, 96)
DEQUANT = "dequant:reference:chain:"


@pytest.fixture
def case() -> Case:
    """Five rows with padding between them."""
    return testing.generate_case("normal", 5, SHAPE, stride=Stride(row_pad=8))


@pytest.mark.parametrize("stride", list(testing.enumerate_strides()), ids=str)
@pytest.mark.parametrize("rows", [1, 2, 8, 9, 16, 17, 65])
def test_cpu_projection_has_the_bits_of_the_stock_path(rows: int, stride: Stride) -> None:
    """On a CPU every row count and stride gives the bits of ``einsum`` on the dequantised weight (cases 12 and 13)."""
    case = testing.generate_case("normal", rows, SHAPE, stride=stride)
    weight = reference.dequantize(case.codes, case.exponents)
    chosen = ops.plan_for(case.o, case.codes)
    testing.assert_same_bits(ops.project(*case, chosen), torch.einsum("tgd,grd->tgr", case.o, weight))


def test_all_ways_in_agree(case: Case) -> None:
    """The direct call, the dispatcher, a bare path and the op that plans by itself give the same bits."""
    chosen = ops.plan_for(case.o, case.codes)
    expected = ops.project(*case, chosen)
    testing.assert_same_bits(ops.grouped_projection(*case, chosen.key), expected)
    testing.assert_same_bits(ops.grouped_projection(*case, "dequant"), expected)
    testing.assert_same_bits(ops.planned_projection(*case, "decode", "identical", "bmm"), expected)


@pytest.mark.parametrize("key", [DEQUANT, "mid:triton:chain:", "empty:reference:chain:"])
def test_no_rows_return_at_once(case: Case, key: str) -> None:
    """0 rows give an empty result without asking any kernel, even one that is not there."""
    out = ops.grouped_projection(case.o[:0], case.codes, case.exponents, key)
    assert ((0, 2, 64), torch.bfloat16) == (tuple(out.shape), out.dtype)


def test_output_is_contiguous_and_new(case: Case) -> None:
    """Each call returns memory of its own."""
    first, second = (ops.grouped_projection(*case, DEQUANT) for _ in range(2))
    assert first.is_contiguous()
    assert first.data_ptr() != second.data_ptr()
    assert ops.dequantize(*case[1:]).data_ptr() != ops.dequantize(*case[1:]).data_ptr()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"o": torch.zeros(5, 2, 96)}, "bfloat16"),
        ({"o": torch.zeros(5, 192, dtype=torch.bfloat16)}, "bfloat16"),
        ({"o": torch.zeros(5, 1, 96, dtype=torch.bfloat16)}, r"\[T, 2, 96\]"),
        ({"o": torch.zeros(5, 2, 64, dtype=torch.bfloat16)}, r"\[T, 2, 96\]"),
        ({"o": torch.zeros(5, 96, 2, dtype=torch.bfloat16).mT}, "last stride"),
        ({"exponents": torch.zeros(2, 2, 2, dtype=torch.uint8)}, "do not fit"),
        ({"exponents": torch.zeros(2, 2, 3, dtype=torch.uint8, device="meta")}, "the twin on"),
    ],
)
def test_operands_that_do_not_fit_are_refused(case: Case, change: dict[str, torch.Tensor], message: str) -> None:
    """Wrong dtypes, shapes, strides and devices raise ``ValueError`` before anything runs."""
    with pytest.raises(ValueError, match=message):
        ops.project(*case._replace(**change), plan.parse(DEQUANT))


@pytest.mark.parametrize("key", ["fast", "small:cpp:chain:", "empty:reference:chain:"])
def test_plans_that_are_none_are_refused(case: Case, key: str) -> None:
    """A word that names no plan, or a plan without a kernel, raises ``ValueError``."""
    with pytest.raises(ValueError, match=r"names no plan|no path|no kernel"):
        ops.grouped_projection(*case, key)


def test_kernels_are_refused_on_a_cpu_without_the_interpreter(case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    """A CUDA plan for CPU tensors raises ``ValueError`` instead of reaching a compiler."""
    monkeypatch.setattr(ops, "is_interpreted", lambda: False)
    ops._resolve.cache_clear()
    with pytest.raises(ValueError, match="needs a CUDA device"):
        ops.grouped_projection(*case, "mid:triton:chain:block_m=64")


SAMPLES: dict[str, Any] = {
    "encode": lambda case: (reference.dequantize(*case[1:]),),
    "prove": lambda case: (*case[1:], reference.dequantize(*case[1:])),
    "dequantize": lambda case: case[1:],
    "grouped_projection": lambda case: (*case, DEQUANT),
    "planned_projection": lambda case: (*case, "decode", "identical", "bmm"),
}


@pytest.mark.parametrize("name", SAMPLES)
def test_opcheck(case: Case, name: str) -> None:
    """Torch's own checks of schema, fake and dispatch pass for every op."""
    op = getattr(torch.ops.memreclaim, name).default
    results = torch.library.opcheck(op, SAMPLES[name](case), raise_exception=True)
    assert {"SUCCESS"} == set(results.values())


@pytest.mark.parametrize("name", SAMPLES)
def test_fakes_run_nothing(case: Case, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Under FakeTensorMode each op gives the real shapes and dtypes, and the reference is not called."""
    expected = getattr(torch.ops.memreclaim, name).default(*SAMPLES[name](case))
    arguments = SAMPLES[name](case)
    for function in ("_decode_strip", "_encode_strip"):
        monkeypatch.setattr(reference, function, None)
    with FakeTensorMode() as mode:
        fakes = [mode.from_tensor(a) if isinstance(a, torch.Tensor) else a for a in arguments]
        actual = getattr(torch.ops.memreclaim, name).default(*fakes)
    pairs = zip(actual, expected, strict=True) if isinstance(expected, tuple) else [(actual, expected)]
    for fake, real in pairs:
        assert (real.shape, real.dtype, real.stride()) == (fake.shape, fake.dtype, fake.stride())


def test_projecting_fakes_goes_through_the_dispatcher(case: Case) -> None:
    """The direct call notices fake operands: it computes on nothing."""
    with FakeTensorMode() as mode:
        fakes = [mode.from_tensor(part) for part in case]
        out = ops.project(*fakes, plan.parse(DEQUANT))
    assert tuple(out.shape) == (5, 2, 64)
    assert type(out) is not torch.Tensor


def test_torch_compile(case: Case) -> None:
    """A compiled model that projects and adds gives the eager bits, in one graph, also at another row count."""
    chosen = ops.plan_for(case.o, case.codes)

    def model(o: torch.Tensor, codes: torch.Tensor, exponents: torch.Tensor) -> torch.Tensor:
        return ops.project(o, codes, exponents, chosen).flatten(1) + 1

    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    for rows in (5, 3):
        o = case.o[:rows]
        testing.assert_same_bits(compiled(o, *case[1:]), model(o, *case[1:]))


def test_proof_of_a_twin_that_is_not(case: Case) -> None:
    """The prove op names the first element that differs by its flat index."""
    weight = ops.dequantize(*case[1:])
    weight[1, 63, 95] = 3.140625
    assert [1, SHAPE.numel - 1] == ops.prove(*case[1:], weight).tolist()
