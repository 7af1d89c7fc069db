"""``memreclaim alerts export``: the alert rules as a file for Prometheus."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from memreclaim.cli.exit_codes import ExitCode

if TYPE_CHECKING:
    import argparse

    from memreclaim.cli.screen import Screen

SUMMARY = "write the alert rules for Prometheus"
FILE = "memreclaim.rules.yml"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare where to and which runbook the alerts point to."""
    from memreclaim.observe.alerts import RUNBOOK

    parser.add_argument("action", choices=("export",), help="what to do")
    parser.add_argument("--dir", type=Path, default=Path(), metavar="FOLDER", help="folder to write to (default: here)")
    parser.add_argument(
        "--runbook", default=RUNBOOK, metavar="URL", help="where the runbook stands (default: %(default)s)"
    )


def run(arguments: argparse.Namespace, screen: Screen) -> ExitCode:
    """Write the file."""
    from memreclaim.observe.alerts import ALERTS, rules

    path = arguments.dir / FILE
    path.write_text(rules(arguments.runbook), encoding="utf-8")
    screen.data({"schema_version": 1, "files": [str(path)], "alerts": [alert.full_name for alert in ALERTS]}, str(path))
    return ExitCode.OK
