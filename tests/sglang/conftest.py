"""Tests of the SGLang adapter.

Modules named ``test_real_*`` need the real engine in an environment of its own (``make test-sglang``); the others run
anywhere.
"""

from __future__ import annotations

import gc
import os
import warnings
from typing import TYPE_CHECKING, Any

import pytest

from memreclaim import Settings
from memreclaim.engines.sglang import drift, lines, occupation, session, updates

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    import torch
    from sglang_engine import Engine

    from memreclaim.engines.sglang.session import Session

if drift.package_root() is None:
    collect_ignore_glob = ["test_real_*.py"]


@pytest.fixture(autouse=True)
def _no_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    """Settings come from each test, never from the shell."""
    for name in list(os.environ):
        if name.startswith(("MEMRECLAIM", "DSV41_WO_A")):
            monkeypatch.delenv(name)


@pytest.fixture(scope="session")
def engine() -> Iterator[Engine]:
    """The real engine with our hooks, made once: importing its models takes 7 s. The draft is imported before."""
    import sglang_engine

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the engine's own, about what a CPU lacks
        started = sglang_engine.start()
        os.environ["MEMRECLAIM"] = "on"
        try:
            from sglang.srt.plugins import load_plugins

            load_plugins()
        finally:
            del os.environ["MEMRECLAIM"]
    # The engine's half million objects stay for good; each reclaim collects garbage, which takes 0.5 s otherwise.
    gc.collect()
    gc.freeze()
    yield started
    gc.unfreeze()
    sglang_engine.stop()


@pytest.fixture
def load(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Any]:
    """Run the real ``load_model`` of a real runner over a tiny model."""

    def run(model: torch.nn.Module, **attributes: Any) -> Any:
        runner = engine.runner(model, monkeypatch, **attributes)
        runner.load_model()
        return runner

    return run


@pytest.fixture
def start(engine: Engine) -> Callable[..., Session]:  # noqa: ARG001
    """Begin a rank's life anew with the given settings."""

    def begin(**settings: Any) -> Session:
        updates._open.clear()
        occupation._saved.clear()
        if session._session is not None:
            session._session.pause.close()
        session.configure(lines.installed(), Settings(**settings))
        return session.session()

    return begin
