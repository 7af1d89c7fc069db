"""Switching on and staying off: one line, never an exception into the engine unless abort was asked for."""

from __future__ import annotations

import logging
import sys
from types import ModuleType, SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest

from memreclaim.doctor import Level, examine
from memreclaim.engines.sglang import activation, diagnosis, drift, hooks, lines, plugin, session
from memreclaim.engines.sglang.lines import Line

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = pytest.mark.cpu
KNOWN = Line("0.5.23", "released", ())
CHANGED = Line("0.5.23", "released", ("srt/models/deepseek_v4.py: MQALayer.forward has changed",))


class Registry:
    """As the engine's HookRegistry, without applying anything."""

    def __init__(self) -> None:
        """Start empty."""
        self._hooks: dict[str, list[Any]] = {}

    def register(self, target: str, hook: Any, hook_type: Any) -> None:
        """Note a hook."""
        self._hooks.setdefault(target, []).append((hook_type, hook, None))


@pytest.fixture
def registry(monkeypatch: pytest.MonkeyPatch) -> Registry:
    """An engine with a plug-in framework that was recognised."""
    made = Registry()
    module = ModuleType(hooks.REGISTRY)
    module.HookRegistry, module.HookType = made, lambda kind: kind  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, hooks.REGISTRY, module)
    monkeypatch.setattr(hooks, "import_module", _import_or(module))
    monkeypatch.setattr(hooks, "has_framework", lambda: True)
    monkeypatch.setattr(lines, "installed", lambda: KNOWN)
    return made


def _import_or(module: ModuleType) -> Any:
    from importlib import import_module

    return lambda name: module if name == hooks.REGISTRY else import_module(name)


def test_on_registers_every_hook_of_the_line(registry: Registry, monkeypatch: pytest.MonkeyPatch) -> None:
    """Once, however often the plug-in is called."""
    monkeypatch.setenv("MEMRECLAIM", "on")
    plugin.register()
    plugin.register()

    assert {target: len(found) for target, found in registry._hooks.items()} == {
        hook.target: 1 for hook in hooks.of_line("released")
    }
    assert session.session().settings.mode == "on"


@pytest.mark.parametrize("environ", [{}, {"MEMRECLAIM": "off"}, {"DSV41_WO_A_W8": "0"}], ids=str)
def test_off_registers_nothing(registry: Registry, monkeypatch: pytest.MonkeyPatch, environ: dict[str, str]) -> None:
    """Unset, off, and the older name at 0."""
    for name, value in environ.items():
        monkeypatch.setenv(name, value)
    plugin.register()

    assert registry._hooks == {}


def test_the_older_name_switches_on(registry: Registry, monkeypatch: pytest.MonkeyPatch) -> None:
    """W8 without DROP is twin mode."""
    monkeypatch.setenv("DSV41_WO_A_W8", "1")
    plugin.register()

    assert hooks.DISPATCH in registry._hooks
    assert session.session().settings.mode == "twin"


@pytest.mark.parametrize("failure", ["changed", "setting", "bug"])
def test_a_failure_leaves_one_line_and_no_hook(
    registry: Registry, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, failure: str
) -> None:
    """A changed engine, a bad setting, and an error of ours."""
    monkeypatch.setenv("MEMRECLAIM", "yes" if failure == "setting" else "on")
    if failure == "changed":
        monkeypatch.setattr(lines, "installed", lambda: CHANGED)
    elif failure == "bug":
        monkeypatch.setattr(lines, "installed", lambda: 1 / 0)
    with caplog.at_level(logging.WARNING, logger="memreclaim"):
        plugin.register()

    expected = {"changed": "MQALayer.forward has changed", "setting": "MEMRECLAIM: 'yes'", "bug": "ZeroDivisionError"}
    (record,) = caplog.records
    assert record.getMessage().startswith("engine_unsupported engine=sglang")
    assert expected[failure] in record.getMessage()
    assert registry._hooks == {}


@pytest.mark.usefixtures("registry")
@pytest.mark.parametrize("setting", ["on", "yes"])
def test_abort_ends_the_process(monkeypatch: pytest.MonkeyPatch, setting: str) -> None:
    """By SystemExit: the engine swallows exceptions of plug-ins."""
    monkeypatch.setenv("MEMRECLAIM", setting)
    monkeypatch.setenv("MEMRECLAIM_ON_MISMATCH", "abort")
    monkeypatch.setattr(lines, "installed", lambda: CHANGED)

    with pytest.raises(SystemExit, match="memreclaim"):
        plugin.register()


def test_a_process_that_holds_no_weights_gets_the_load_hook_only(
    registry: Registry, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Called from the detokenizer's module."""
    monkeypatch.setenv("MEMRECLAIM", "on")
    namespace = {"__name__": "sglang.srt.managers.detokenizer_manager", "activate": activation.activate}
    exec("activate()", namespace)  # noqa: S102  the caller's module is what is tested

    assert list(registry._hooks) == [hooks.LOAD]


def findings(monkeypatch: pytest.MonkeyPatch, line: Line, environ: dict[str, str]) -> dict[str, tuple[str, str]]:
    """Diagnosis of an installed engine."""
    from pathlib import Path

    monkeypatch.setattr(drift, "package_root", lambda: Path("/"))
    monkeypatch.setattr(lines, "installed", lambda: line)
    return {one.name: (one.level.value, one.detail) for one in diagnosis.diagnose(environ)}


def test_doctor_names_what_changed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Before a boot, with the same sentence."""
    assert findings(monkeypatch, CHANGED, {}) == {"sglang readers": ("bad", CHANGED.problems[0])}


def test_doctor_sees_that_the_plug_in_is_filtered_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """``SGLANG_PLUGINS`` may leave it out."""
    monkeypatch.setattr(hooks, "has_framework", lambda: True)
    entry = SimpleNamespace(name="memreclaim", value="memreclaim.engines.sglang.plugin:register")
    monkeypatch.setattr(diagnosis, "entry_points", lambda **_: [entry])

    good = findings(monkeypatch, KNOWN, {"MEMRECLAIM": "on", "SGLANG_PLUGINS": "other, memreclaim"})
    filtered = findings(monkeypatch, KNOWN, {"SGLANG_PLUGINS": "other"})

    assert good["sglang plug-in"][0] == "ok"
    assert filtered["sglang plug-in"] == ("bad", "SGLANG_PLUGINS=other leaves out memreclaim")


def test_doctor_sees_a_missing_entry_point_and_a_missing_framework(monkeypatch: pytest.MonkeyPatch) -> None:
    """Sources on the path are no installation; an older line needs launch."""
    monkeypatch.setattr(diagnosis, "entry_points", lambda **_: [])
    monkeypatch.setattr(hooks, "has_framework", lambda: True)
    assert findings(monkeypatch, KNOWN, {})["sglang plug-in"][0] == "bad"

    monkeypatch.setattr(hooks, "has_framework", lambda: False)
    level, detail = findings(monkeypatch, Line("0.5.20", "einsum", ()), {})["sglang plug-in"]
    assert (level, "memreclaim launch" in detail) == ("ok", True)


def test_doctor_of_the_whole_machine_includes_it(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """An engine that was asked for and cannot be used makes the diagnosis bad."""
    import sglang_older

    sglang_older.write(tmp_path, "0.5.20", sglang_older.EINSUM.replace("is_decode=False", "is_decode, layer"))
    monkeypatch.setattr(drift, "package_root", lambda: tmp_path / "sglang")
    monkeypatch.setattr(lines.metadata, "version", lambda _name: "0.5.20")
    found = SimpleNamespace(name="sglang", version="0.5.20", installed=True, supported=True, note="")
    monkeypatch.setattr("memreclaim.doctor.engines.found", lambda: (found,))

    diagnosed = examine("sglang", {})

    assert not diagnosed.healthy
    (problem,) = [one for one in diagnosed.findings if one.name == "sglang readers"]
    assert problem.level is Level.BAD
    assert "without a default" in problem.detail
