"""``memreclaim doctor``: versions, devices and engines, what is off and why."""

from __future__ import annotations

from typing import TYPE_CHECKING

from memreclaim import engines
from memreclaim.cli.exit_codes import ExitCode

if TYPE_CHECKING:
    import argparse

    from memreclaim.cli.screen import Screen

SUMMARY = "look at this machine: versions, devices, memory, engines; what is off and why"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the engine that must be usable."""
    parser.add_argument("--engine", choices=engines.names(), help="fail when this engine cannot be used here")


def run(arguments: argparse.Namespace, screen: Screen) -> ExitCode:
    """Examine and print; not ready when something asked for cannot work."""
    from memreclaim.doctor import Level, examine

    diagnosis = examine(arguments.engine)
    if screen.as_json:
        screen.data(diagnosis.to_dict())
    else:
        from rich.table import Table
        from rich.text import Text

        table = Table(title="memreclaim doctor", title_justify="left", show_header=False)
        colours = {Level.OK: "green", Level.OFF: "yellow", Level.BAD: "bold red"}
        for finding in diagnosis.findings:
            table.add_row(finding.name, Text(finding.level, style=colours[finding.level]), Text(finding.detail))
        screen.data({}, table)
    return ExitCode.OK if diagnosis.healthy else ExitCode.NOT_READY
