"""What the doctor finds, and what makes it call the machine unfit."""

from __future__ import annotations

import json
import sys
from importlib import metadata
from typing import TYPE_CHECKING

import pytest
import torch

from memreclaim import doctor, engines
from memreclaim.cli import main
from memreclaim.cli.exit_codes import ExitCode
from memreclaim.doctor import Level, examine
from memreclaim_kernels import plan, tables

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = pytest.mark.cpu


def _levels(**arguments: object) -> dict[str, Level]:
    found = examine(environ=arguments.pop("environ", {}), **arguments)  # type: ignore[arg-type]
    return {finding.name: finding.level for finding in found.findings}


def test_names_versions_devices_memory_and_engines() -> None:
    """Everything that decides how memreclaim runs is looked at."""
    found = {finding.name: finding for finding in examine(environ={}).findings}
    assert {"memreclaim", "python", "torch", "triton", "settings", "memory"} <= set(found)
    assert found["torch"].detail == metadata.version("torch")
    assert {f"engine {name}" for name in engines.names()} <= set(found)
    assert any(name == "device" or name.startswith("cuda:") for name in found)


def test_says_that_it_is_off_by_default() -> None:
    """Without the variable nothing is reclaimed, and the doctor says which one to set."""
    (settings,) = (finding for finding in examine(environ={}).findings if finding.name == "settings")
    assert (settings.level, "MEMRECLAIM=on" in settings.detail) == (Level.OFF, True)
    assert _levels(environ={"MEMRECLAIM": "on"})["settings"] is Level.OK


@pytest.mark.parametrize("environ", [{"MEMRECLAIM": "yes"}, {"MEMRECLAIM_NUMERIC": "fused"}, {"MEMRECLAIM_DRAFT": "1"}])
def test_bad_settings_are_named(environ: dict[str, str]) -> None:
    """A bad value and a misspelt variable are bad, and named."""
    diagnosis = examine(environ=environ)
    (settings,) = (finding for finding in diagnosis.findings if finding.name == "settings")
    assert not diagnosis.healthy
    assert settings.detail.startswith(next(iter(environ)))


def test_an_absent_engine_is_bad_only_when_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without an engine the rest works; with --engine its absence is what is wrong."""
    absent = engines.Found("sglang", None, installed=False, supported=False, note="not installed")
    monkeypatch.setattr(engines, "found", lambda: (absent,))
    assert _levels()["engine sglang"] is Level.OFF
    assert _levels(engine="sglang")["engine sglang"] is Level.BAD


H200 = plan.Device("NVIDIA H200", (9, 0), 232448)


@pytest.mark.parametrize(
    ("device", "backend", "level", "words"),
    [
        (H200, "triton", Level.OK, "triton, "),
        (plan.Device("Unknown GPU", (9, 0), 232448), "triton", Level.OK, "no table for this GPU"),
        (plan.Device("Tesla V100", (7, 0), 98304), "reference", Level.OFF, "no kernels for this GPU"),
    ],
)
def test_says_which_kernels_serve(
    device: plan.Device, backend: str, level: Level, words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each GPU has the backend that its plans choose, and the table that was measured for it, if any."""
    monkeypatch.setattr(plan, "device_of", lambda _device: device)
    monkeypatch.setattr(plan, "backend_for", lambda _device: backend)
    found = doctor._kernels(0)
    assert (found.name, found.level) == ("kernels cuda:0", level)
    assert words in found.detail


def test_a_tuned_table_that_is_not_valid_is_bad(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The file is named, since its plans would be missing."""
    (tmp_path / "mine.json").write_text("{}")
    monkeypatch.setattr(plan, "device_of", lambda _device: H200)
    monkeypatch.setattr(plan, "backend_for", lambda _device: "triton")
    monkeypatch.setattr(tables, "user_folder", lambda: tmp_path)
    tables.for_device.cache_clear()
    found = doctor._kernels(0)
    tables.for_device.cache_clear()
    assert (found.level, "mine.json" in found.detail) == (Level.BAD, True)


def test_unreadable_meminfo_is_unknown(tmp_path: Path) -> None:
    """A machine without /proc/meminfo, or with a strange one, is said to be unknown."""
    (missing,) = doctor._memory(tmp_path / "meminfo")
    (tmp_path / "meminfo").write_text("MemTotal: lots\n")
    (strange,) = doctor._memory(tmp_path / "meminfo")
    assert missing.level is strange.level is Level.OFF
    assert "unknown" in missing.detail


def test_missing_packages(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without triton things are off; without torch nothing works."""

    def version(name: str) -> str:
        raise metadata.PackageNotFoundError(name)

    monkeypatch.setattr(metadata, "version", version)
    monkeypatch.setitem(sys.modules, "torch", None)
    levels = _levels()
    assert (levels["triton"], levels["torch"], levels["device"]) == (Level.OFF, Level.BAD, Level.BAD)


def test_command_prints_table_or_json(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """Both forms hold the same findings, and the exit code says whether something asked for cannot work."""
    monkeypatch.delenv("MEMRECLAIM", raising=False)
    assert main(["doctor", "--json"]) == ExitCode.OK
    found = json.loads(capsys.readouterr().out)
    assert (found["schema_version"], found["healthy"]) == (1, True)
    assert main(["doctor"]) == ExitCode.OK
    table = capsys.readouterr().out
    assert all(finding["name"] in table for finding in found["findings"])
    monkeypatch.setenv("MEMRECLAIM", "perhaps")
    assert main(["doctor"]) == ExitCode.NOT_READY


def test_a_torch_without_what_tags_are_made_with_is_bad(monkeypatch: pytest.MonkeyPatch) -> None:
    """What tags use of torch beyond its documented interface is looked for, and named when it is gone."""
    assert _levels()["torch seams"] is Level.OK
    monkeypatch.delattr(torch._C, "_storage_Use_Count")
    (seams,) = (finding for finding in examine(environ={}).findings if finding.name == "torch seams")
    assert (seams.level, seams.detail.split("has no ")[1]) == (Level.BAD, "_C._storage_Use_Count")
