"""The Triton kernels compile for GPUs that are not here, and keep what their order of sums rests on."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("triton")
pytestmark = pytest.mark.integration

DOTS = ("small", "small_splits", "mid", "mid_wgmma")
TARGETS = {
    80: ("gemv", "dequant", "prove", "encode", "small", "mid"),
    89: ("dequant",),
    90: ("small_splits", "mid_wgmma"),
    121: ("mid",),
}
"""All kernels below sm89, where there is no fp8 type; above, those whose instructions differ."""


@pytest.fixture(scope="module")
def built() -> list[dict[str, Any]]:
    """What the compiler made of each kernel, in a process where Triton does not interpret."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment["PYTHONPATH"] = os.pathsep.join(sys.path)
    words = [f"{target}:{kernel}" for target, kernels in TARGETS.items() for kernel in kernels]
    command = [sys.executable, str(Path(__file__).with_name("offline.py")), *words]
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=environment)
    assert done.returncode == 0, done.stderr
    return [json.loads(line) for line in done.stdout.splitlines()]


def test_kernels_compile_without_fp8_types_and_without_flushing(built: list[dict[str, Any]]) -> None:
    """Every kernel compiles, uses no fp8 conversion, flushes no subnormal and fits in 99 KB of shared memory."""
    assert sum(map(len, TARGETS.values())) == len(built)
    assert [kernel for kernel in built if kernel["flushes"] or kernel["fp8"]] == []
    assert [kernel for kernel in built if kernel["shared"] > 99 * 1024] == []


def test_chain_keeps_the_order_of_bf16_operands(built: list[dict[str, Any]]) -> None:
    """MMA operands are packed 2 columns wide, so that each step takes the next 16 columns, as with a bf16 weight."""
    for kernel in built:
        if kernel["kernel"] in DOTS:
            assert kernel["mma"], kernel
            assert kernel["operand_width"] in ([], [2]), kernel


def test_gemv_does_not_fuse_its_sums(built: list[dict[str, Any]]) -> None:
    """The gemv multiplies and adds separately, like the kernel whose order it keeps."""
    assert [kernel["fused"] for kernel in built if kernel["kernel"] == "gemv"] == [0]
