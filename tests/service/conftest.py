"""One tiny checkpoint for all tests of services."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from observed import CONFIG

from memreclaim.engines import reference as ref

if TYPE_CHECKING:
    from pathlib import Path


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random checkpoint of the tiny engine."""
    return ref.write_random_checkpoint(tmp_path_factory.mktemp("tiny") / "checkpoint", CONFIG)
