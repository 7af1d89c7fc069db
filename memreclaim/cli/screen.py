"""Where output goes: data to stdout, progress and notes to stderr, bars only on a terminal.

``rich`` honours ``NO_COLOR`` and leaves colours out when stdout is no terminal.
"""

from __future__ import annotations

import json
import sys
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from rich.console import Console, RenderableType

_PIPED_WIDTH = 120
"""Columns when nobody tells: a file or a pipe has room for whole tensor names."""


class Screen:
    """Output of one command."""

    def __init__(self, *, as_json: bool) -> None:
        """Print JSON, or tables for people."""
        self.as_json = as_json

    def data(self, content: dict[str, Any], *tables: RenderableType) -> None:
        """Print the command's result: ``content`` as JSON, or ``tables``, whichever was asked for."""
        if self.as_json:
            sys.stdout.write(json.dumps(content, indent=2) + "\n")
            return
        console = _console(stderr=False)
        for table in tables:
            console.print(table)

    def complain(self, text: str) -> None:
        """One line on stderr that says what is wrong."""
        sys.stderr.write(f"memreclaim: error: {printable(text)}\n")

    def note(self, text: str) -> None:
        """Tell a person what goes on, on stderr; silent with ``--json``."""
        if not self.as_json:
            _console(stderr=True).print(text, markup=False, highlight=False, style="dim")

    @contextmanager
    def progress(self, title: str) -> Iterator[Callable[[str, float, float], None]]:
        """Show a bar on stderr while the block runs.

        What is yielded is called with the name of the step, how much is done and how much there is in all. Off a
        terminal, and with ``--json``, the calls do nothing.
        """
        if self.as_json or not sys.stderr.isatty():
            yield lambda _step, _done, _total: None
            return
        from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

        step_column = TextColumn("{task.fields[step]}")
        columns = (TextColumn("{task.description}"), BarColumn(), step_column, TimeElapsedColumn())
        with Progress(*columns, console=_console(stderr=True), transient=True) as bars:
            task = bars.add_task(title, total=None, step="")
            yield lambda step, done, total: bars.update(task, completed=done, total=total, step=printable(step))


def printable(text: str) -> str:
    """``text`` on one line and without control characters: names in files must not steer a terminal."""
    return "".join(character if character.isprintable() else repr(character)[1:-1] for character in text)


def megabytes(n_bytes: int) -> str:
    """Bytes in the unit in which weights are spoken of, 10^6."""
    return f"{n_bytes / 1e6:,.1f} MB"


def _console(*, stderr: bool) -> Console:
    from rich.console import Console

    stream = sys.stderr if stderr else sys.stdout
    return Console(stderr=stderr, width=None if stream.isatty() else _PIPED_WIDTH, emoji=False)
