"""The command line.

One module per command. Each has ``SUMMARY``, ``add_arguments(parser)`` and ``run(arguments, screen) -> exit code``,
and imports what is heavy inside ``run``: help and completion answer without torch. A command is offered when its
module is in :data:`COMMANDS`.
"""

from __future__ import annotations

import argparse
import os
import sys
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Protocol, cast

from memreclaim._version import __version__
from memreclaim.cli.exit_codes import ExitCode
from memreclaim.cli.screen import Screen
from memreclaim.errors import MemreclaimError, NotExact

if TYPE_CHECKING:
    from collections.abc import Sequence

COMMANDS = ("demo", "survey", "serve", "status", "doctor", "launch", "dashboards", "alerts")
"""Modules of this package, in the order in which help shows them."""

_EPILOG = "exit codes: " + ", ".join(f"{code.value} {code.meaning}" for code in ExitCode)


class Command(Protocol):
    """What a command's module holds."""

    SUMMARY: str
    """One line for the help of the whole program."""

    def add_arguments(self, parser: argparse.ArgumentParser) -> None:
        """Declare the command's own arguments; ``--json`` is there already."""

    def run(self, arguments: argparse.Namespace, screen: Screen) -> ExitCode:
        """Do it; ``screen`` writes data to stdout. Raises :class:`MemreclaimError` for what went wrong."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and return its exit code; one clear line on stderr says what went wrong."""
    if sys.stderr is None:  # closed by the caller: there is nobody to tell
        sys.stderr = Path(os.devnull).open("w")  # noqa: SIM115 - open as long as the program runs
    parser = build_parser()
    arguments = parser.parse_args(argv)
    screen = Screen(as_json=arguments.json)
    if sys.stdout is None:
        screen.complain("stdout is closed")
        return ExitCode.ERROR
    try:
        code = _command(arguments.command).run(arguments, screen)
        sys.stdout.flush()
    except BrokenPipeError:
        # The reader (head, less) has left: nobody is there to be told, and flushing at exit must not raise again.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return ExitCode.ERROR
    except NotExact as error:  # a layer did not match and the settings say abort
        screen.complain(str(error))
        return ExitCode.MISMATCH
    except (MemreclaimError, OSError, MemoryError) as error:
        screen.complain(str(error) or type(error).__name__)
        return ExitCode.ERROR
    except KeyboardInterrupt:
        return 130  # what shells give a program that was interrupted
    return code


def build_parser() -> argparse.ArgumentParser:
    """The parser of the whole program."""
    parser = argparse.ArgumentParser(
        prog="memreclaim",
        description="Exact fp8 twins of bf16 weights: gives the memory back to the KV cache.",
        epilog=_EPILOG,
    )
    parser.add_argument("--version", action="version", version=f"memreclaim {__version__}")
    parser.add_argument(
        "--print-completion",
        choices=("bash", "zsh", "tcsh"),
        action=_PrintCompletion,
        help="print a shell's completion script",
    )
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", required=True)
    for name in COMMANDS:
        command = _command(name)
        own = commands.add_parser(name, help=command.SUMMARY, description=command.SUMMARY, epilog=_EPILOG)
        own.add_argument("--json", action="store_true", help="print one JSON object instead of a table")
        command.add_arguments(own)
    return parser


def _command(name: str) -> Command:
    return cast("Command", import_module(f"{__name__}.{name}"))


class _PrintCompletion(argparse.Action):
    """Prints the completion script and ends the program; shtab is asked for only then."""

    def __call__(
        self,
        parser: argparse.ArgumentParser,
        namespace: argparse.Namespace,  # noqa: ARG002
        values: object,
        option_string: str | None = None,  # noqa: ARG002
    ) -> None:
        try:
            import shtab
        except ModuleNotFoundError:
            wanted = "completion needs shtab: pip install 'memreclaim[completion]'"
            parser.exit(ExitCode.ERROR, f"memreclaim: error: {wanted}\n")
        print(shtab.complete(parser, shell=str(values)))  # noqa: T201
        parser.exit()
