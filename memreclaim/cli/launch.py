"""``memreclaim launch -- COMMAND...``: start an engine without a plug-in framework with our hooks in all processes.

A folder of ours with a ``sitecustomize.py`` is put on ``PYTHONPATH``; Python imports it in each process that inherits
the environment. The engine's files are not touched. With the plug-in framework there, only the environment is set.
"""

from __future__ import annotations

import argparse
import os
import shutil
from pathlib import Path
from typing import TYPE_CHECKING

from memreclaim.cli.exit_codes import ExitCode
from memreclaim.config import Mode, Settings
from memreclaim.errors import EngineError

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from rich.table import Table

    from memreclaim.cli.screen import Screen

SUMMARY = "start an engine with memreclaim in every process that it spawns"
_ELSEWHERE = frozenset({"ssh", "srun", "mpirun", "mpiexec", "docker", "podman", "kubectl", "sudo", "ray", "pdsh"})
"""Programs that start the engine in an environment of its own making; variables set here would not arrive."""
_ISOLATED = ("-I", "-E", "-S")
"""Options of Python that ignore PYTHONPATH or sitecustomize."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command."""
    parser.add_argument("--dry-run", action="store_true", help="print what would be set, and start nothing")
    parser.add_argument(
        "program", nargs=argparse.REMAINDER, metavar="-- COMMAND...", help="the engine's own command line"
    )


def run(arguments: argparse.Namespace, screen: Screen) -> ExitCode:
    """Replace this process by the command; raises :class:`EngineError` when the hooks could not reach its workers."""
    program = [*arguments.program]
    if program[:1] == ["--"]:
        del program[0]
    if not program:
        screen.complain("launch needs a command: memreclaim launch -- python -m sglang.launch_server ...")
        return ExitCode.USAGE
    environ = {**os.environ, "MEMRECLAIM": os.environ.get("MEMRECLAIM", "on")}
    if Settings.from_env(environ).mode is Mode.OFF:
        changes: dict[str, str] = {}
    else:
        changes = prepare(program, environ)
    if arguments.dry_run:
        screen.data({"schema_version": 1, "command": program, "environment": changes}, _table(program, changes))
        return ExitCode.OK
    os.execvpe(program[0], program, {**environ, **changes})  # noqa: S606  the operator's own command
    return ExitCode.ERROR  # only where exec is a stand-in


def prepare(program: Sequence[str], environ: Mapping[str, str]) -> dict[str, str]:
    """Variables to set for ``program``; raises :class:`EngineError` when they would not reach its processes."""
    from memreclaim.engines.sglang import hooks

    _refuse_unreachable(program)
    mode = {"MEMRECLAIM": environ["MEMRECLAIM"]}
    if hooks.has_framework():
        return mode
    folder = str(site_folder())
    paths = [folder, *(path for path in environ.get("PYTHONPATH", "").split(os.pathsep) if path not in ("", folder))]
    return {**mode, "PYTHONPATH": os.pathsep.join(paths)}


def site_folder() -> Path:
    """Folder with our ``sitecustomize.py``."""
    from memreclaim.engines.sglang import site

    return Path(site.__file__).parent


def _refuse_unreachable(program: Sequence[str]) -> None:
    name = Path(program[0]).name
    if shutil.which(program[0]) is None:
        raise EngineError(f"{program[0]} is not a program that can be started here")
    if name in _ELSEWHERE:
        raise EngineError(
            f"{name} starts the engine in another environment, which launch cannot reach: run memreclaim launch there, "
            "or forward MEMRECLAIM and PYTHONPATH to it"
        )
    if name == "env" and any(word in ("-i", "-", "--ignore-environment") for word in program[1:]):
        raise EngineError("env -i clears the environment, so the hooks would not reach the engine")
    if name.startswith("python"):
        for word in program[1:]:
            if not word.startswith("-") or word in ("-m", "-c"):
                break
            if any(option[1] in word[1:] for option in _ISOLATED if not word.startswith("--")):
                raise EngineError(f"python {word} ignores PYTHONPATH, so the hooks would not reach the engine")


def _table(program: Sequence[str], changes: Mapping[str, str]) -> Table:
    from rich.table import Table

    table = Table(title=f"memreclaim launch: {' '.join(program)}", title_justify="left", show_header=False)
    for name, value in changes.items():
        table.add_row(name, value)
    return table
