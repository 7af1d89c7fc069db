"""Fixtures of the core's tests."""

from __future__ import annotations

import gc

import hypothesis  # noqa: F401  its first import looks for referrers, which a frozen heap hides
import pytest
import torch


@pytest.fixture(scope="session", autouse=True)
def _young_heap() -> None:
    """Leave what was imported out of later collections: each reclaim collects garbage.

    0.2 s with torch's own objects.
    """
    gc.collect()
    gc.freeze()


@pytest.fixture(
    params=[
        "cpu",
        pytest.param(
            "cuda", marks=pytest.mark.skipif("not __import__('torch').cuda.is_available()", reason="torch finds no GPU")
        ),
    ]
)
def device(request: pytest.FixtureRequest) -> torch.device:
    """Every device that there is."""
    return torch.device(request.param)
