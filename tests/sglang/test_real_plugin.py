"""The plug-in in the real engine: discovery, hooks, and that nothing happens when it is off."""

from __future__ import annotations

import ast
import os
import subprocess
import sys
from importlib.metadata import entry_points
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from memreclaim.engines.sglang import dispatch, hooks, lines, plugin

if TYPE_CHECKING:
    from sglang_engine import Engine

TESTS = str(Path(__file__).parents[1])
RELEASED = hooks.of_line("released")


def python(code: str, **environment: str) -> str:
    """Output of a fresh interpreter that can import the tests' helpers."""
    env = {**os.environ, **environment, "PYTHONPATH": os.pathsep.join([TESTS, os.environ.get("PYTHONPATH", "")])}
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", code], env=env, capture_output=True, text=True, check=False, timeout=300
    )
    assert done.returncode == 0, done.stderr[-4000:]
    return done.stdout


@pytest.mark.cpu
def test_the_engine_discovers_the_plug_in_by_its_entry_point() -> None:
    """Installing the package is all that discovery needs."""
    (found,) = [one for one in entry_points(group="sglang.srt.plugins") if one.name == "memreclaim"]

    assert found.load() is plugin.register


@pytest.mark.cpu
def test_the_installed_engine_is_the_one_that_was_read() -> None:
    """Version and fingerprints of 0.5.23 agree with what is on record."""
    assert lines.installed() == lines.Line("0.5.23", "released", ())


@pytest.mark.cpu
def test_what_is_on_record_can_be_recorded_again() -> None:
    """``known.json`` is what the recorder writes for the real release."""
    from memreclaim.engines.sglang import drift

    root = drift.package_root()
    assert root is not None

    assert lines.record(root) == Path(lines.__file__).with_name("known.json").read_text()


@pytest.mark.cpu
@pytest.mark.usefixtures("engine")
@pytest.mark.parametrize("hook", RELEASED, ids=lambda hook: hook.target.rpartition(".")[2])
def test_each_hook_is_in_place(hook: hooks.Hook) -> None:
    """The engine swallows failures, so each live target is looked at."""
    assert hooks.missing([hook]) == []


@pytest.mark.cpu
def test_both_names_of_the_dispatch_reach_ours(engine: Engine) -> None:
    """The draft module copied the function before the plug-in was loaded."""
    name = "_apply_wo_a_bf16_matmul"

    assert hooks._reaches(getattr(engine.v4, name), dispatch.apply_wo_a)
    assert hooks._reaches(getattr(engine.dspark, name), dispatch.apply_wo_a)


@pytest.mark.cpu
def test_a_hook_that_was_taken_away_is_missing(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    """The check can fail: one copy of the dispatch without our function is named."""
    name = "_apply_wo_a_bf16_matmul"
    monkeypatch.setattr(engine.dspark, name, getattr(engine.v4, name).__wrapped__)

    assert hooks.missing(RELEASED) == [f"sglang.srt.models.deepseek_v4_dspark.{name}"]


@pytest.mark.integration
def test_a_draft_imported_after_the_plug_in_has_the_hook_too() -> None:
    """The other order of imports, in a process of its own."""
    code = """
import sglang_engine
sglang_engine.declare_torchvision_operators()
from sglang.srt.plugins import load_plugins
load_plugins()
import sys
assert "sglang.srt.models.deepseek_v4_dspark" not in sys.modules
import sglang.srt.models.deepseek_v4_dspark
from memreclaim.engines.sglang import hooks
print(hooks.missing(hooks.of_line("released")))
"""
    assert python(code, MEMRECLAIM="on").splitlines()[-1] == "[]"


@pytest.mark.integration
def test_off_means_that_nothing_is_registered_or_imported() -> None:
    """With MEMRECLAIM unset the entry point returns at once."""
    code = """
import sys
import sglang_engine
sglang_engine.declare_torchvision_operators()
import sglang.srt.plugins
from sglang.srt.plugins.hook_registry import HookRegistry
before = set(sys.modules)
sglang.srt.plugins.load_plugins()
print(sorted(set(sys.modules) - before))
print(dict(HookRegistry._hooks))
"""
    imported, registered = python(code).splitlines()[-2:]

    allowed = {
        "memreclaim",
        "memreclaim._version",
        "memreclaim.engines",
        "memreclaim.errors",
        "memreclaim.engines.sglang",
        "memreclaim.engines.sglang.plugin",
    }
    ours = {
        name
        for name in ast.literal_eval(imported)
        if name.startswith(("memreclaim", "torch", "prometheus_client", "structlog"))
    }
    assert ours <= allowed
    assert registered == "{}"


@pytest.mark.integration
def test_a_process_without_weights_gets_one_hook() -> None:
    """The launcher's process does not import the models on our account."""
    code = """
import sys
import sglang_engine
sglang_engine.declare_torchvision_operators()
from sglang.srt.plugins.hook_registry import HookRegistry
from memreclaim.engines.sglang import plugin
namespace = {"__name__": "sglang.srt.entrypoints.engine", "plugin": plugin}
exec("plugin.register()", namespace)
print(list(HookRegistry._hooks), "sglang.srt.models.deepseek_v4" in sys.modules)
"""
    assert python(code, MEMRECLAIM="on").splitlines()[-1] == f"{[hooks.LOAD]} False"
