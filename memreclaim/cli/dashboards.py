"""``memreclaim dashboards export``: Grafana dashboards as JSON."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from memreclaim.cli.exit_codes import ExitCode

if TYPE_CHECKING:
    import argparse

    from memreclaim.cli.screen import Screen

SUMMARY = "write the Grafana dashboards"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare where to."""
    parser.add_argument("action", choices=("export",), help="what to do")
    parser.add_argument("--dir", type=Path, default=Path(), metavar="FOLDER", help="folder to write to (default: here)")


def run(arguments: argparse.Namespace, screen: Screen) -> ExitCode:
    """Write one file per dashboard. Needs the ``dashboards`` extra."""
    from memreclaim.observe.dashboards import rendered

    written = []
    for name, text in rendered().items():
        path = arguments.dir / name
        path.write_text(text, encoding="utf-8")
        written.append(str(path))
    screen.data({"schema_version": 1, "files": written}, "\n".join(written))
    return ExitCode.OK
