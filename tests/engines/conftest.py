"""A tiny checkpoint of V4.1's layout, written once per session, and a fresh model of it for each test."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from memreclaim.engines import reference as ref

if TYPE_CHECKING:
    from pathlib import Path


@pytest.fixture(scope="session")
def config() -> ref.ModelConfig:
    """Two layers and a draft block, ``wo_a`` [128, 128]."""
    return ref.ModelConfig.tiny()


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory: pytest.TempPathFactory, config: ref.ModelConfig) -> Path:
    """Folder of the tiny checkpoint; tests only read it."""
    return ref.write_random_checkpoint(tmp_path_factory.mktemp("engine") / "tiny", config, seed=0)


@pytest.fixture
def model(checkpoint: Path) -> ref.ReferenceModel:
    """The tiny model, loaded as engines do."""
    return ref.load_model(checkpoint)


@pytest.fixture
def pool(config: ref.ModelConfig) -> ref.PagedPool:
    """A pool of 1,024 tokens in extents of 128."""
    return ref.PagedPool(config, capacity_tokens=1024, paging=ref.Paging(extent_tokens=128))
