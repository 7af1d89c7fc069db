"""The committed rules are what the command writes; each has cases and a heading; real promtool agrees."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path

import pytest

from memreclaim.cli import COMMANDS
from memreclaim.observe.alerts import ALERTS, rules
from memreclaim.observe.families import SPECS

pytestmark = pytest.mark.cpu

FOLDER = Path(__file__).parents[2] / "dashboards"
CONTRACT = [
    "LayerMismatch",
    "ReclaimedLayerMismatch",
    "TargetDown",
    "RanksMissing",
    "RanksDiverged",
    "PoolBelowExpected",
    "AuditStale",
    "OperationErrors",
    "KernelSlow",
    "DeviceMemoryLow",
    "TagRefused",
]
needs_promtool = pytest.mark.skipif(shutil.which("promtool") is None, reason="needs Debian's prometheus for promtool")


def test_all_alerts_of_the_contract_are_there() -> None:
    """Eleven, in order."""
    assert [alert.name for alert in ALERTS] == CONTRACT


def test_committed_rules_are_the_exported_ones() -> None:
    """``memreclaim alerts export`` gives exactly what is committed."""
    assert rules() == (FOLDER / "memreclaim.rules.yml").read_text()


def test_each_alert_has_its_heading_with_three_answers() -> None:
    """What it means, how to check, what to do; and no heading is left over."""
    text = (FOLDER / "runbook.md").read_text()
    sections = dict(re.findall(r"^## (\w+)\n(.*?)(?=^## |\Z)", text, re.MULTILINE | re.DOTALL))
    assert list(sections) == [alert.full_name for alert in ALERTS]
    for name, section in sections.items():
        found = re.findall(r"^\*\*(.+?)\.\*\*", section, re.MULTILINE)
        assert found == ["What it means", "How to check", "What to do"], name


def test_remedies_name_commands_that_exist() -> None:
    """A command that nobody can run is no remedy, in the runbook or in the service's document."""
    for file in (FOLDER / "runbook.md", FOLDER.parent / "docs" / "service.md"):
        named = set(re.findall(r"^(?:\$ )?memreclaim (\w+)|`memreclaim (\w+)", file.read_text(), re.MULTILINE))
        assert named, file
        assert {one or other for one, other in named} <= set(COMMANDS), file


def test_each_alert_fires_and_stays_silent_in_a_case() -> None:
    """Every rule has a case with a notification, and one evaluation or series that gives none."""
    text = (FOLDER / "rules_test.yml").read_text()
    for alert in ALERTS:
        assert f"#{alert.full_name.lower()}" in text, f"{alert.name} never fires"
    silent = re.findall(r"alertname: Memreclaim(\w+)\n\s+exp_alerts: \[\]", text)
    beside = re.findall(r"- name: (\w+) .*(?:silent|and for no other|not )", text)
    assert set(CONTRACT) <= {*silent, *beside}


def test_expressions_ask_for_exported_metrics() -> None:
    """A renamed metric would silence its alert for ever."""
    for alert in ALERTS:
        for name in re.findall(r"memreclaim_(\w+)", alert.expression):
            assert name in SPECS or re.sub(r"_(sum|count)$", "", name) in SPECS, name


@needs_promtool
@pytest.mark.parametrize("command", ["check rules memreclaim.rules.yml", "test rules rules_test.yml"])
def test_promtool_agrees(command: str) -> None:
    """Debian's promtool checks the rules and runs their tests."""
    done = subprocess.run(["promtool", *command.split()], cwd=FOLDER, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.skipif(shutil.which("amtool") is None, reason="needs Debian's prometheus-alertmanager for amtool")
def test_amtool_accepts_the_shipped_configuration() -> None:
    """The Alertmanager of compose.yml would start."""
    done = subprocess.run(
        ["amtool", "check-config", str(FOLDER / "alertmanager.yml")], capture_output=True, check=False
    )
    assert done.returncode == 0, done.stderr
