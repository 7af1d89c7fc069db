"""The CUDA C++ backend seen from plans: legality is known without a GPU, and its absence is no error."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from memreclaim_kernels import native, plan, testing

if TYPE_CHECKING:
    from collections.abc import Iterator

pytestmark = pytest.mark.cpu

H200 = plan.Device("NVIDIA H200", (9, 0), 232448)
SHAPE = (2, 1024, 4096)
UNAVAILABLE = native.unavailable


@pytest.fixture(autouse=True)
def fresh(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A machine that has both backends."""
    plan.forget()
    monkeypatch.setattr(native, "unavailable", lambda _: None)
    yield
    plan.forget()


@pytest.mark.parametrize(
    ("key", "rows", "shape", "word"),
    [
        ("gemv:cuda:gemv:", 1, (2, 1024, 2048), "4096"),
        ("gemv:cuda:gemv:", 2, SHAPE, "1 row"),
        ("gemv:cuda:chain:", 1, SHAPE, "order"),
        ("small:cuda:splits8:", 9, SHAPE, "8 rows"),
        ("small:cuda:splits8:", 8, (2, 1024, 1536), "1024"),
        ("small:cuda:chain:", 8, SHAPE, "order"),
        ("mid:cuda:splits8:", 16, SHAPE, "order"),
        ("mid:cuda:chain:", 4096, SHAPE, "one wave"),
        ("mid:cuda:chain:", 16, (2, 1024, 3072), "depth"),
        ("large:cuda:chain:", 700, (2, 96, 4096), "rank"),
        ("large:cuda:chain:splits=5", 700, SHAPE, "stages of 128"),
        ("dequant:cuda:chain:", 0, SHAPE, "0 rows"),
    ],
)
def test_illegal_plans_are_refused(key: str, rows: int, shape: tuple[int, int, int], word: str) -> None:
    """A call that a CUDA kernel does not take is refused with its reason."""
    refusal = plan.plan_supports(plan.parse(key), rows, *shape, H200)
    assert refusal is not None
    assert word in refusal


def test_offers_come_before_the_portable_kernels_and_are_legal() -> None:
    """Where this backend has a kernel it is asked first, and every row count still has legal plans only."""
    for rows in testing.enumerate_rows():
        for stock in ("bmm", "sglang"):
            plans = plan.candidates(rows, *SHAPE, device=H200, stock=stock)
            assert all(plan.plan_supports(each, rows, *SHAPE, H200) is None for each in plans)
            assert plans[-1].path == "dequant"
    first = [plan.candidates(rows, *SHAPE, device=H200, stock="sglang")[0] for rows in (1, 2, 8)]
    assert [(each.path, each.backend) for each in first] == [("gemv", "cuda"), ("small", "cuda"), ("small", "cuda")]


def test_without_nvrtc_the_portable_kernels_are_offered(monkeypatch: pytest.MonkeyPatch) -> None:
    """A missing compiler means other plans, and nothing is raised."""
    monkeypatch.setattr(native, "unavailable", lambda _: "no NVRTC")
    assert {"triton"} == {each.backend for each in plan.candidates(4, *SHAPE, device=H200, stock="sglang")}
    assert plan.backend_for(H200) == "triton"


def test_it_needs_a_gpu_with_bf16_mma() -> None:
    """Neither a CPU nor a GPU before sm80 can use it, whatever compilers there are."""
    for device in (plan.CPU, plan.Device("Tesla T4", (7, 5))):
        assert "8.0" in (UNAVAILABLE(device) or "")
