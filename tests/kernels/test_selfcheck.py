"""The check on the device: what agrees may serve, what differs in one bit may not, and the verdict says where."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
import torch

from memreclaim_kernels import blocks, ops, plan, reference, selfcheck, testing
from memreclaim_kernels.blocks import WeightShape

if TYPE_CHECKING:
    from collections.abc import Iterator

pytestmark = pytest.mark.cpu

SHAPE = WeightShape(2, 32, 64)
GPU = plan.Device("NVIDIA H200", (9, 0), 232448)
CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def pretended_gpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A CPU that plans take for an H200, whose kernels are the stock path itself."""
    plan.forget()
    monkeypatch.setattr(plan, "_is_installed", lambda backend: backend == "triton")
    monkeypatch.setattr(plan, "device_of", lambda _: GPU)
    monkeypatch.setattr(ops, "grouped_projection", right_kernel)
    yield
    plan.forget()


def right_kernel(o: torch.Tensor, codes: torch.Tensor, exponents: torch.Tensor, _key: str) -> torch.Tensor:
    """A kernel that keeps the stock path's bits."""
    return reference.grouped_projection(o, reference.dequantize(codes, exponents))


def wrong_at_12_rows(o: torch.Tensor, codes: torch.Tensor, exponents: torch.Tensor, key: str) -> torch.Tensor:
    """A kernel that gets the last bit of one output wrong, at one row count only."""
    out = right_kernel(o, codes, exponents, key)
    if o.shape[0] == 12:
        out.view(torch.int16)[11, 1, 31] ^= 1
    return out


def paths(rows: list[int]) -> list[str]:
    """What serves each row count now."""
    return [plan.select(count, *SHAPE, device=GPU).path for count in rows]


def test_kernels_that_agree_serve() -> None:
    """After the check every row count it covered is served by its kernel, those above are not."""
    checks = selfcheck.check(SHAPE, CPU, max_rows=32)
    assert [check.rows for check in checks] == [(1, 1), (2, 8), (9, 16), (17, 32)]
    assert [check.chosen.path for check in checks] == ["small", "small", "mid", "mid"]
    assert paths([1, 8, 9, 32, 33]) == ["small", "small", "mid", "mid", "dequant"]


def test_one_wrong_bit_at_one_row_count(monkeypatch: pytest.MonkeyPatch) -> None:
    """One bit at 12 rows keeps the kernel from 12 rows, and the plan names rows and coordinate."""
    monkeypatch.setattr(ops, "grouped_projection", wrong_at_12_rows)
    checks = selfcheck.check(SHAPE, CPU, max_rows=32)
    assert [check.dequantised for check in checks] == [(), (), (12,), ()]
    assert paths([11, 12, 13, 16]) == ["mid", "dequant", "mid", "mid"]
    reason = plan.select(12, *SHAPE, device=GPU).reason
    assert "12 rows" in reason
    assert "(11, 1, 31)" in reason


def test_one_wrong_bit_above_192_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where a few row counts stand for a bucket, one that differs keeps the kernel from all of it."""

    def wrong_at_257_rows(o: torch.Tensor, codes: torch.Tensor, exponents: torch.Tensor, key: str) -> torch.Tensor:
        out = right_kernel(o, codes, exponents, key)
        if o.shape[0] == 257:
            out.view(torch.int16)[256, 0, 0] ^= 1
        return out

    kernel = plan.Plan("large", "triton", "chain")
    real = plan.candidates
    monkeypatch.setattr(
        plan, "candidates", lambda rows, *a, **k: (kernel, *real(rows, *a, **k)) if rows > 192 else real(rows, *a, **k)
    )
    monkeypatch.setattr(selfcheck, "_buckets", lambda _: [(193, 512)])
    monkeypatch.setattr(testing, "KINDS", ("normal",))
    monkeypatch.setattr(ops, "grouped_projection", wrong_at_257_rows)
    (check,) = selfcheck.check(WeightShape(1, 32, 32), CPU)
    assert check.chosen.path == "dequant"
    assert set(check.dequantised) == set(selfcheck.rows_to_compare(193, 512))
    plan.forget()
    monkeypatch.setattr(ops, "grouped_projection", right_kernel)
    assert selfcheck.check(WeightShape(1, 32, 32), CPU)[0].chosen == kernel


def test_another_plan_serves_the_row_counts_that_the_first_does_not(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two plans that are each right at some row counts share a bucket, as where cuBLAS cuts K at some of them."""
    odd, even = (plan.Plan("mid", "triton", "chain", (("split", number),)) for number in (1, 2))

    def right_at_its_own(o: torch.Tensor, codes: torch.Tensor, exponents: torch.Tensor, key: str) -> torch.Tensor:
        out = right_kernel(o, codes, exponents, key)
        return out if (key == odd.key) == bool(o.shape[0] % 2) else out + 1

    real = plan.candidates
    monkeypatch.setattr(plan, "candidates", lambda *a, **k: (odd, even, real(*a, **k)[-1]))
    monkeypatch.setattr(testing, "generate_decode_twin", lambda shape, device: (*testing.generate_twin(shape), []))
    monkeypatch.setattr(ops, "grouped_projection", right_at_its_own)
    selfcheck.check(SHAPE, CPU, max_rows=8)
    assert [plan.select(rows, *SHAPE, device=GPU) for rows in (2, 3, 4)] == [even, odd, even]


def test_kernel_that_cannot_run(monkeypatch: pytest.MonkeyPatch) -> None:
    """A kernel that does not compile here is no error of the service: its rows dequantise."""

    def broken(*_: object) -> torch.Tensor:
        message = "ptxas is missing"
        raise RuntimeError(message)

    monkeypatch.setattr(ops, "grouped_projection", broken)
    checks = selfcheck.check(SHAPE, CPU, max_rows=8)
    assert [check.chosen.path for check in checks] == ["dequant", "dequant"]
    assert "ptxas is missing" in checks[0].chosen.reason


def test_free_sums_need_to_be_close_only(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fused numerics pass with another order of sums, and fail when a result is off by more than rounding."""
    flip_one_last_bit = wrong_at_12_rows
    monkeypatch.setattr(ops, "grouped_projection", flip_one_last_bit)
    checks = selfcheck.check(SHAPE, CPU, numerics="fused", max_rows=16)
    assert [check.verdicts[0][1].same for check in checks] == [True, True, True]
    monkeypatch.setattr(ops, "grouped_projection", lambda *args: right_kernel(*args) * 1.01)
    plan.forget()
    checks = selfcheck.check(SHAPE, CPU, numerics="fused", max_rows=16)
    assert [check.verdicts[0][1].same for check in checks] == [False, False, False]
    assert [check.chosen.path for check in checks] == ["dequant"] * 3


def test_a_wrong_decoder_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """A kernel that decodes one code wrong at one exponent does not serve, though no checkpoint holds that exponent."""

    def wrong_at_one_code(o: torch.Tensor, codes: torch.Tensor, exponents: torch.Tensor, key: str) -> torch.Tensor:
        odd = exponents.repeat_interleave(2, 1).unsqueeze(3) == 201
        return right_kernel(o, torch.where(odd & (codes == 0x5A), 0x5B, codes), exponents, key)

    monkeypatch.setattr(ops, "grouped_projection", wrong_at_one_code)
    shape = WeightShape(2, 128, 1024)
    checks = selfcheck.check(shape, CPU, max_rows=8)
    assert [check.chosen.path for check in checks] == ["dequant", "dequant"]
    assert "decode" in checks[0].chosen.reason


def test_one_hot_columns_hold_every_code_at_every_exponent() -> None:
    """The decode check misses no pair of code and exponent that can be served, NaN codes apart."""
    shape = WeightShape(2, 128, 1024)
    codes, exponents, columns = testing.generate_decode_twin(shape)
    grid = exponents.repeat_interleave(32, 1).repeat_interleave(32, 2)[..., columns]
    pairs = {divmod(pair, 256) for pair in (grid.int() * 256 + blocks.unpack(codes)[..., columns]).unique().tolist()}
    numbers = set(range(256)) - {0x7F, 0xFF}
    assert {(exponent, code) for exponent in range(247) for code in numbers} <= pairs


def test_right_backend_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    """Encode, prove and dequantise that do what the reference does stay in use."""
    assert selfcheck.check_backend(CPU) == "triton"
    monkeypatch.setattr(plan, "device_of", lambda _: plan.CPU)
    assert selfcheck.check_backend(CPU) == "reference"


def test_backend_is_checked_before_its_first_use(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first encode, prove or dequantise on a device checks the backend, once, and a wrong one gives no result."""
    calls: list[str] = []

    def wrong(*_: torch.Tensor) -> torch.Tensor:
        calls.append("wrong")
        return torch.zeros(1)

    real = ops._function
    monkeypatch.setattr(ops, "_function", lambda backend, name: wrong if backend == "triton" else real(backend, name))
    for function in ("encode", "prove", "dequantize"):
        monkeypatch.setattr(ops, function, getattr(ops, f"_{function}_cuda"))
    codes, exponents = testing.generate_twin(SHAPE)
    expected = reference.dequantize(codes, exponents)
    for _ in range(2):
        testing.assert_same_bits(ops.dequantize(codes, exponents), expected)
    assert calls == ["wrong"]
    assert {GPU} == plan.checked


@pytest.mark.parametrize("name", ["dequantize", "encode", "prove"])
@pytest.mark.parametrize("fault", ["wrong", "raises"])
def test_wrong_backend_is_disabled(monkeypatch: pytest.MonkeyPatch, name: str, fault: str) -> None:
    """A backend whose encode, prove or dequantise is wrong, or cannot run, is not used again."""
    right = getattr(ops, name)

    def wrong(*args: torch.Tensor) -> object:
        if fault == "raises":
            message = "no kernel image is available"
            raise RuntimeError(message)
        result = right(*args)
        part = result[1] if isinstance(result, tuple) else result
        part.view(torch.uint8).view(-1)[-1] ^= 1
        return result

    monkeypatch.setattr(ops, name, wrong)
    assert selfcheck.check_backend(CPU) == "reference"
    assert plan.backend_for(GPU) == "reference"


def test_another_engines_bits_need_its_stock_path() -> None:
    """SGLang's bits cannot be checked against cuBLAS: without its own path the check refuses."""
    with pytest.raises(ValueError, match="sglang"):
        selfcheck.check(SHAPE, CPU, stock="sglang")


def test_the_given_stock_path_is_what_counts() -> None:
    """The comparison is with the path that was given, not with ours."""

    def other(o: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return -reference.grouped_projection(o, weight)

    checks = selfcheck.check(SHAPE, CPU, stock_path=other, max_rows=8)
    assert [check.chosen.path for check in checks] == ["dequant", "dequant"]


def test_a_cpu_has_nothing_to_check(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a CPU the stock path serves anyway."""
    monkeypatch.setattr(plan, "device_of", lambda _: plan.CPU)
    assert selfcheck.check(SHAPE, CPU) == ()


def test_every_row_count_up_to_192_is_compared() -> None:
    """CuBLAS may change its algorithm at any row count, so none is left out where kernels serve decode and verify."""
    compared = {
        rows
        for first, last in zip((1, 2, 9, 17, 33, 65, 129), (1, 8, 16, 32, 64, 128, 192), strict=True)
        for rows in selfcheck.rows_to_compare(first, last)
    }
    assert set(range(1, 193)) == compared
    assert {193, 256, 512} <= set(selfcheck.rows_to_compare(193, 512))


@pytest.mark.parametrize("kind", testing.KINDS)
def test_kinds_are_what_they_say(kind: str) -> None:
    """Each adversarial kind really has the property it is named for."""
    case = testing.generate_case(kind, 64, SHAPE)
    weight = reference.dequantize(case.codes, case.exponents)
    out = testing.project_float64(case, weight)
    largest = float(out.abs().max())
    expected = {
        "normal": lambda: 1 < largest < 1e6,
        "tiny": lambda: 0 < largest < 2.0**-40,
        "huge": lambda: 2.0**50 < largest < 2.0**120,
        "overflow": lambda: bool(out.bfloat16().isinf().any()),
        "cancelling": lambda: largest < 0.05 * float(case.o.double().abs().sum(2).max() * weight.double().abs().max()),
        "zeros": lambda: bool((case.o == 0).float().mean() > 0.5) and bool((weight == 0).float().mean() > 0.4),
        "weak": lambda: bool(((weight != 0) & (weight.abs() < 2.0**-126)).any()) and largest > 0,
        "faint": lambda: bool(((case.o != 0) & (case.o.abs() < 2.0**-126)).any()) and largest > 0,
        "exact": lambda: torch.equal(out, out.float().double()) and torch.equal(out * 8, (out * 8).round()),
    }
    assert expected[kind]()


def test_differences_are_named() -> None:
    """The bitwise comparison names coordinate and both values, tells zeros apart, and lets a NaN equal a NaN."""
    expected = torch.tensor([[1.0, 0.0], [float("nan"), 3.0]], dtype=torch.bfloat16)
    testing.assert_same_bits(expected.clone(), expected)
    other = expected.clone()
    other.view(torch.int16)[1, 0] = -1
    testing.assert_same_bits(other, expected)
    other[0, 1] = -0.0
    assert (
        testing.first_difference(other, expected)
        == "1 of 4 differ, the first at (0, 1): -0.0 (0x8000), expected 0.0 (0x0000)"
    )
    with pytest.raises(AssertionError, match=r"twin: .*\(2,\)"):
        testing.assert_same_bits(other[0], expected, "twin")
