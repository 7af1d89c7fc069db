"""Every test says what it needs: it is marked ``cpu``, ``gpu`` or ``integration``; an unmarked one stops the run."""

from __future__ import annotations

import pytest
import torch

KINDS = frozenset({"cpu", "gpu", "integration"})


def pytest_configure() -> None:
    """Use one thread: tests run side by side, and sums must not depend on how many cores there are."""
    torch.set_num_threads(1)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Refuse tests of no kind or of two, and skip what needs a GPU where there is none."""
    unclassified = [item.nodeid for item in items if len(KINDS & {mark.name for mark in item.iter_markers()}) != 1]
    if unclassified:
        message = f"each test needs exactly one of the marks {', '.join(sorted(KINDS))}: {', '.join(unclassified)}"
        raise pytest.UsageError(message)
    if not torch.cuda.is_available():
        for item in items:
            if item.get_closest_marker("gpu"):
                item.add_marker(pytest.mark.skip(reason="needs an NVIDIA GPU, torch finds none"))
