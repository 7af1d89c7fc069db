"""Tests against the real SGLang, in an environment of its own (``make test-sglang``); skipped where there is no SGLang."""

from __future__ import annotations

import os
from importlib import util
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from collections.abc import Iterator

    import engine as tiny

HAS_SGLANG = util.find_spec("sglang") is not None
if not HAS_SGLANG:
    collect_ignore_glob = ["test_real_*.py"]


@pytest.fixture(autouse=True)
def _no_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    """Settings come from each test, never from the shell."""
    for name in list(os.environ):
        if name.startswith(("MEMRECLAIM", "DSV41_WO_A")):
            monkeypatch.delenv(name)


@pytest.fixture(scope="session")
def engine() -> Iterator[tiny.Engine]:
    """The real engine's modules and process groups, made once: importing its models takes 7 s."""
    import engine as tiny

    yield tiny.start()
    tiny.stop()
