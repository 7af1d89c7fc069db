"""``memreclaim status``: what a service says, for people and for scripts."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

from memreclaim.cli.exit_codes import ExitCode
from memreclaim.cli.screen import megabytes, printable

if TYPE_CHECKING:
    import argparse

    from rich.console import RenderableType

    from memreclaim.cli.screen import Screen

SUMMARY = "show what a service reports; exit code 3 when a layer does not match, 4 when ranks are missing"
DEFAULT_URL = "http://127.0.0.1:9411"
_WATCH_SECONDS = 2.0


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the service and how to ask it."""
    parser.add_argument(
        "url",
        nargs="?",
        default=DEFAULT_URL,
        metavar="URL",
        help="a rank's service or a head node's (default: %(default)s)",
    )
    parser.add_argument("--token-file", metavar="FILE", help="file with the token (mode 0600)")
    parser.add_argument("--ca", metavar="FILE", help="certificate authority of the service's certificate")
    parser.add_argument("--watch", action="store_true", help="print again every 2 s until Ctrl-C")


def run(arguments: argparse.Namespace, screen: Screen) -> ExitCode:
    """Ask, print, and say by the exit code how things are."""
    from memreclaim.service.client import Client, UnreachableError
    from memreclaim.service.settings import read_token

    client = Client(read_token(arguments.token_file, "--token-file"), arguments.ca)
    while True:
        try:
            answer = client.get(arguments.url, "/v1/report")
        except UnreachableError as error:
            screen.complain(str(error))
            code = ExitCode.NOT_READY
        else:
            if answer.code != 200:  # noqa: PLR2004
                screen.complain(f"{arguments.url}: {answer.error}")
                return ExitCode.NOT_READY if answer.code >= 500 else ExitCode.ERROR  # noqa: PLR2004
            screen.data(answer.body, *tables(answer.body))
            code = verdict(answer.body)
        if not arguments.watch:
            return code
        time.sleep(_WATCH_SECONDS)


def verdict(report: dict[str, Any]) -> ExitCode:
    """Missing or unready ranks first, then layers that do not match."""
    ranks = _ranks(report)
    if report.get("missing") or not ranks:
        return ExitCode.NOT_READY
    bad = any(layer["mismatched_elements"] for rank in ranks for layer in rank["layers"])
    if bad:
        return ExitCode.MISMATCH
    return ExitCode.OK if all(rank["ready"] for rank in ranks) else ExitCode.NOT_READY


def tables(report: dict[str, Any]) -> list[RenderableType]:
    """One line per rank, then whatever needs attention."""
    from rich.table import Table

    from memreclaim.service.merge import name_of

    table = Table(title_justify="left")
    for name in ("rank", "state", "layers", "gross", "twins", "net", "KV tokens", "gained", "limited by"):
        table.add_column(name, justify="left" if name in ("rank", "state", "limited by") else "right")
    for rank in _ranks(report):
        pool = rank["kv_pool"]
        done = sum(layer["state"] == "reclaimed" for layer in rank["layers"])
        figures = [megabytes(rank[f"{name}_bytes"]) for name in ("gross", "twin", "net")]
        tokens = (
            ["", "", ""]
            if pool is None
            else [f"{pool['tokens']:,}", f"{pool['gained_tokens']:+,}", printable(pool["limited_by"])]
        )
        table.add_row(name_of(rank), _state(rank["state"]), f"{done} of {len(rank['layers'])}", *figures, *tokens)
    return [table, *_attention(report)]


def _attention(report: dict[str, Any]) -> list[str]:
    from memreclaim.service.merge import mismatched

    lines = [f"[red]! missing[/] {printable(url)}" for url in report.get("missing", ())]
    lines += [f"[yellow]≠ ranks differ[/] {printable(text)}" for text in report.get("diverged", ())]
    for found in mismatched(_ranks(report)):
        word = "[red]! a served twin changed[/]" if found["damaged"] else "[yellow]≠ no exact twin, kept in bf16[/]"
        lines.append(f"{word} {found['rank']} {printable(found['layer'])}")
    return lines


def _state(state: str) -> str:
    colour = {"ready": "green", "degraded": "yellow", "failed": "red"}.get(state, "dim")
    return f"[{colour}]{printable(state)}[/]"


def _ranks(report: dict[str, Any]) -> list[dict[str, Any]]:
    if report["kind"] == "rank":
        return [report]
    return [sight["report"] for sight in report["ranks"] if sight["report"] is not None]
