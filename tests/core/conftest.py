"""Fixtures of the core's tests."""

from __future__ import annotations

import pytest
import torch


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.skipif("not __import__('torch').cuda.is_available()", reason="torch finds no GPU"))])
def device(request: pytest.FixtureRequest) -> torch.device:
    """Every device that there is."""
    return torch.device(request.param)
