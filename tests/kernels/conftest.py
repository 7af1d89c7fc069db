"""Kernel tests run on a GPU where there is one, and elsewhere in Triton's interpreter, with the same bodies."""

from __future__ import annotations

import os

import pytest
import torch

# Triton reads this when a kernel is defined, so it is set before any kernel module is imported.
if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"


@pytest.fixture(
    params=[pytest.param("cpu", marks=pytest.mark.cpu, id="interpreter"), pytest.param("cuda", marks=pytest.mark.gpu)]
)
def kernel_device(request: pytest.FixtureRequest) -> torch.device:
    """Where Triton kernels run: the CPU by way of the interpreter, or the GPU."""
    if request.param == "cpu" and torch.cuda.is_available():
        pytest.skip("Triton compiles for the GPU in this process, its interpreter is off")
    return torch.device(request.param)
