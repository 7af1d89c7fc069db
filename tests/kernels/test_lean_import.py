"""Importing the package is cheap: no Triton, no CUDA, no NVRTC."""

from __future__ import annotations

import subprocess
import sys

import pytest

pytestmark = pytest.mark.integration

SCRIPT = """
import sys
import memreclaim_kernels
import memreclaim_kernels.ops, memreclaim_kernels.selfcheck, memreclaim_kernels.testing
import torch
codes, exponents = memreclaim_kernels.testing.generate_twin(memreclaim_kernels.blocks.WeightShape(1, 32, 32))
memreclaim_kernels.ops.grouped_projection(torch.zeros(2, 1, 32).bfloat16(), codes, exponents, "dequant")
loaded = [name for name in sys.modules if name.split(".")[0] == "triton" or name.startswith("memreclaim_kernels.cuda")]
assert not loaded, loaded
assert not torch.cuda.is_initialized()
"""


def test_import_and_cpu_use_load_no_triton() -> None:
    """In a fresh process, ops, plans and a CPU projection load no Triton and start no CUDA."""
    done = subprocess.run([sys.executable, "-c", SCRIPT], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")
