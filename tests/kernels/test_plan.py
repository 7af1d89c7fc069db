"""Plans: every row count has one path, and no kernel serves identical numerics that was not compared on the device."""

from __future__ import annotations

from typing import TYPE_CHECKING, get_args

import pytest
import torch

from memreclaim_kernels import plan, testing
from memreclaim_kernels.plan import Device, Plan, Verdict

if TYPE_CHECKING:
    from collections.abc import Iterator

pytestmark = pytest.mark.cpu

DEVICES = {
    "h200": Device("NVIDIA H200", (9, 0), 232448),
    "gb10": Device("NVIDIA GB10", (12, 1), 101376),
    "unknown": Device("NVIDIA Something New", (11, 0)),
    "sm80": Device("NVIDIA A100-SXM4-80GB", (8, 0), 166912),
}
SHAPE = (2, 1024, 4096)
SAME = Verdict(same=True, rows=(1,), elements=1)
ROWS = [0, *testing.enumerate_rows()]


@pytest.fixture(autouse=True)
def fresh(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """No verdict of another test counts, and only the portable kernels are looked at."""
    plan.forget()
    monkeypatch.setattr(plan, "_is_installed", lambda backend: backend == "triton")
    yield
    plan.forget()


def approve(device: Device, shape: tuple[int, int, int] = SHAPE, stock: plan.Stock = "bmm") -> None:
    """Record that every candidate was found equal to the stock path."""
    for rows in range(1, plan.MID_ROWS + 2):
        for numerics in get_args(plan.Numerics):
            for candidate in plan.candidates(rows, *shape, device=device, stock=stock, numerics=numerics):
                plan.record(candidate, rows, shape, device, SAME)


@pytest.mark.parametrize("numerics", ["identical", "fused"])
@pytest.mark.parametrize("phase", ["decode", "verify", "draft", "prefill"])
@pytest.mark.parametrize("groups", [1, 2, 4, 8])
@pytest.mark.parametrize("name", DEVICES)
def test_every_row_count_has_one_legal_path(name: str, groups: int, phase: plan.Phase, numerics: plan.Numerics) -> None:
    """Whatever the device, groups, phase and numerics, each row count gets one plan, and that plan may run it."""
    device = DEVICES[name]
    approve(device, (groups, 1024, 4096))
    for rows in ROWS:
        chosen = plan.select(rows, groups, 1024, 4096, device=device, phase=phase, numerics=numerics)
        assert plan.plan_supports(chosen, rows, groups, 1024, 4096, device) is None
        assert chosen == plan.select(rows, groups, 1024, 4096, device=device, phase=phase, numerics=numerics)


@pytest.mark.parametrize("groups", [1, 2, 4, 8])
@pytest.mark.parametrize("name", DEVICES)
@pytest.mark.parametrize("numerics", ["identical", "fused"])
def test_no_row_count_up_to_192_dequantises_when_verified(name: str, groups: int, numerics: plan.Numerics) -> None:
    """16 rows, and all others of decode, verify and draft, are served by a kernel once it was compared (case 12)."""
    device = DEVICES[name]
    approve(device, (groups, 1024, 4096))
    paths = {
        rows: plan.select(rows, groups, 1024, 4096, device=device, numerics=numerics).path for rows in range(1, 193)
    }
    assert [rows for rows, path in paths.items() if path == "dequant"] == []


@pytest.mark.parametrize("name", DEVICES)
def test_unverified_kernels_do_not_serve_identical(name: str) -> None:
    """Before the comparison every row count dequantises, and the plan says why."""
    for rows in ROWS[1:]:
        chosen = plan.select(rows, *SHAPE, device=DEVICES[name])
        assert chosen.path == "dequant"
        assert ("not compared" in chosen.reason) == (rows <= plan.MID_ROWS)


def test_one_differing_bit_keeps_a_row_count_on_the_stock_path() -> None:
    """A kernel that differs at 16 rows dequantises there, says where, and serves the other row counts."""
    device = DEVICES["h200"]
    approve(device)
    kernel = plan.candidates(16, *SHAPE, device=device)[0]
    plan.record(kernel, 16, SHAPE, device, Verdict(same=False, rows=(16,), elements=9, difference="at (3, 1, 7)"))
    paths = [plan.select(rows, *SHAPE, device=device).path for rows in (8, 15, 16, 17)]
    assert paths == ["small", "mid", "dequant", "mid"]
    assert "at (3, 1, 7)" in plan.select(16, *SHAPE, device=device).reason


def test_a_verdict_holds_for_its_device_and_shape_only() -> None:
    """Bits that agree on one GPU, or for one weight shape, say nothing about another."""
    approve(DEVICES["h200"])
    assert plan.select(16, *SHAPE, device=DEVICES["sm80"]).path == "dequant"
    assert plan.select(16, 4, 1024, 4096, device=DEVICES["h200"]).path == "dequant"


def test_a_verdict_holds_for_the_stock_path_it_was_made_with() -> None:
    """Bits that agree with cuBLAS say nothing about SGLang's own kernels, nor its decode about its verify."""
    device = DEVICES["h200"]
    approve(device)
    assert plan.select(4, *SHAPE, device=device, stock="bmm").path == "small"
    assert plan.select(4, *SHAPE, device=device, stock="sglang", phase="verify").path == "dequant"
    assert plan.select(4, *SHAPE, device=device, stock="sglang", phase="prefill").path == "small"
    kernel = plan.candidates(4, *SHAPE, device=device, stock="sglang")[0]
    plan.record(kernel, 4, SHAPE, device, SAME, against=plan.compared_with("verify", "sglang"))
    assert plan.select(4, *SHAPE, device=device, stock="sglang", phase="verify") == kernel
    assert plan.select(4, *SHAPE, device=device, stock="sglang", phase="decode").path == "dequant"


def test_prefill_never_takes_free_sums() -> None:
    """Fused numerics end at prefill: its candidates keep the stock path's order."""
    for rows in (1, 8, 64, 192):
        plans = plan.candidates(rows, *SHAPE, device=DEVICES["gb10"], phase="prefill", numerics="fused")
        assert {"chain"} == {candidate.order for candidate in plans}


def test_fused_kernels_serve_once_they_were_found_right() -> None:
    """Free sums need no bit comparison, but a kernel that never ran here, or was wrong, does not serve."""
    device = DEVICES["gb10"]
    kernel = plan.candidates(6, *SHAPE, device=device, numerics="fused")[0]
    assert kernel.order == "free"
    assert plan.select(6, *SHAPE, device=device, numerics="fused").path == "dequant"
    plan.record(kernel, 6, SHAPE, device, Verdict(same=True, rows=(6,), elements=1))
    assert kernel == plan.select(6, *SHAPE, device=device, numerics="fused")
    plan.record(kernel, 6, SHAPE, device, Verdict(same=False, rows=(6,), elements=1, difference="relative error"))
    assert kernel != plan.select(6, *SHAPE, device=device, numerics="fused")


@pytest.mark.parametrize(
    ("rows", "phase", "shape", "expected"),
    [
        (1, "decode", SHAPE, ["gemv", "chain"]),
        (2, "verify", SHAPE, ["splits8", "chain"]),
        (8, "draft", SHAPE, ["splits8", "chain"]),
        (9, "verify", SHAPE, ["chain"]),
        (1, "prefill", SHAPE, ["chain"]),
        (8, "decode", (4, 1024, 4096), ["chain"]),
        (1, "decode", (2, 1024, 2048), ["chain"]),
    ],
)
def test_sglang_order_of_sums(
    rows: int, phase: plan.Phase, shape: tuple[int, int, int], expected: list[plan.Order]
) -> None:
    """SGLang's own kernels may serve 1 and 2..8 rows of the (2, 4096) shape outside prefill; all else is cuBLAS."""
    device = DEVICES["h200"]
    plans = plan.candidates(rows, *shape, device=device, phase=phase, stock="sglang")
    orders = list(dict.fromkeys(p.order for p in plans[:-1]))
    assert expected == orders


def test_cpu_dequantises() -> None:
    """On a CPU every row count is the reference: decode, then the stock product."""
    assert {Plan("dequant", "reference")} == {plan.select(rows, *SHAPE, device=plan.CPU) for rows in ROWS[1:]}
    assert plan.device_of(torch.device("cpu")) == plan.CPU


def test_no_rows_is_a_path_of_its_own() -> None:
    """0 rows run nothing, on any device."""
    assert {"empty"} == {plan.select(0, *SHAPE, device=device).path for device in (plan.CPU, *DEVICES.values())}


@pytest.mark.parametrize(
    ("key", "rows", "shape", "reason"),
    [
        ("gemv:triton:gemv:", 2, SHAPE, "1 row"),
        ("gemv:triton:gemv:", 1, (2, 1024, 512), "1024"),
        ("small:triton:chain:", 9, SHAPE, "8 rows"),
        ("small:triton:splits8:", 2, (2, 1024, 288), "256"),
        ("mid:triton:chain:split_k=2", 16, SHAPE, "order"),
        ("mid:triton:chain:block_m=48", 16, SHAPE, "powers of two"),
        ("mid:triton:chain:block_k=16", 16, SHAPE, "32 columns"),
        ("mid:triton:chain:block_m=128,block_n=128,stages=4,block_k=128", 16, SHAPE, "shared memory"),
        ("mid:triton:chain:", 16, (2, 1000, 4096), "multiples of 32"),
        ("mid:triton:chain:", 0, SHAPE, "0 rows"),
        ("mid:reference:chain:", 16, SHAPE, "no mid kernel"),
        ("empty:reference:chain:", 1, SHAPE, "0 rows"),
    ],
)
def test_illegal_plans_are_refused(key: str, rows: int, shape: tuple[int, int, int], reason: str) -> None:
    """A plan that a kernel does not take is refused with its reason, before any launch."""
    refusal = plan.plan_supports(plan.parse(key), rows, *shape, DEVICES["gb10"])
    assert refusal is not None
    assert reason in refusal


def test_old_gpus_and_cpus_run_no_kernel() -> None:
    """Below sm80 there is no bf16 MMA, and on a CPU no kernel at all: only dequantisation is offered."""
    for device in (Device("Tesla T4", (7, 5)), plan.CPU):
        for rows in ROWS[1:]:
            assert [p.path for p in plan.candidates(rows, *SHAPE, device=device)] == ["dequant"]
        assert plan.backend_for(device) == "reference"


def test_tables_for_gb10_stay_under_its_shared_memory() -> None:
    """Every published GB10 tile is legal on a GPU with 99 KB a block, and is offered before the heuristic."""
    for rows in range(1, 193):
        first = plan.candidates(rows, *SHAPE, device=DEVICES["gb10"], numerics="fused")[0]
        assert "published" in first.source
        assert plan.plan_supports(first, rows, *SHAPE, DEVICES["gb10"]) is None


def test_a_disabled_backend_is_not_offered() -> None:
    """A backend that cannot be used in this process is left out everywhere."""
    approve(DEVICES["h200"])
    plan.disable("triton", "no compiler")
    assert plan.select(16, *SHAPE, device=DEVICES["h200"]).path == "dequant"
    assert plan.backend_for(DEVICES["h200"]) == "reference"


def test_keys_and_plans_are_the_same_thing() -> None:
    """A plan survives the trip through its key, and words that name no plan are refused."""
    for rows in ROWS:
        for candidate in plan.candidates(rows, *SHAPE, device=DEVICES["gb10"], stock="sglang"):
            assert candidate == plan.parse(candidate.key)
    for word in ("fast", "small:cpp:chain:", "small:triton:random:", "small:triton:chain:block_k=x"):
        with pytest.raises(ValueError, match=r"names no plan|invalid literal"):
            plan.parse(word)


def test_listeners_hear_each_choice_once() -> None:
    """A listener is called once per shape, bucket and plan, however often the plan is asked for, and can be removed."""
    heard: list[tuple[int, str]] = []
    remove = plan.on_select(lambda chosen, rows, _shape, _device: heard.append((rows, chosen.path)))
    for rows in (9, 9, 12, 16, 17):
        plan.select(rows, *SHAPE, device=DEVICES["h200"])
    remove()
    plan.select(64, *SHAPE, device=DEVICES["h200"])
    assert heard == [(9, "dequant"), (17, "dequant")]


def test_buckets_partition_the_row_counts() -> None:
    """Each row count lies in one bucket, whose ends are in it too."""
    for rows in range(2100):
        first, last = plan.bucket_of(rows)
        assert first <= rows <= last
        assert (first, last) == plan.bucket_of(first) == plan.bucket_of(last)
    assert plan.bucket_of(10**6)[0] == 65537
