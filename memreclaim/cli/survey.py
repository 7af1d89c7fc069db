"""``memreclaim survey``: what a checkpoint would give back, before anything is started."""

from __future__ import annotations

import re
from collections import Counter
from typing import TYPE_CHECKING

from memreclaim.cli.arguments import count
from memreclaim.cli.exit_codes import ExitCode
from memreclaim.cli.screen import Screen, megabytes, printable

if TYPE_CHECKING:
    import argparse

    from rich.table import Table

    from memreclaim.survey import Survey, TensorSurvey

_EXACT = "exact"
SUMMARY = "read a checkpoint's wo_a tensors and show what each rank would gain"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the checkpoint and the number of ranks."""
    parser.add_argument("checkpoint", metavar="CHECKPOINT", help="folder of safetensors files, or one such file")
    parser.add_argument("--tp", type=count, default=1, metavar="N", help="tensor-parallel ranks (default: %(default)s)")


def run(arguments: argparse.Namespace, screen: Screen) -> ExitCode:
    """Survey, print, and say by the exit code whether all of it is exact."""
    from memreclaim.survey import survey

    with screen.progress("reading wo_a") as progress:
        found = survey(arguments.checkpoint, tp=arguments.tp, progress=progress)
    if screen.as_json:
        screen.data(found.to_dict())
    else:
        screen.data({}, _tensors(found), _gain(found))
    return ExitCode.OK if found.exact else ExitCode.MISMATCH


def _tensors(found: Survey) -> Table:
    """One line per kind of exact tensor, and one for each that is not exact."""
    from rich.table import Table
    from rich.text import Text

    table = Table(title=Text(f"wo_a in {printable(found.checkpoint)}"), title_justify="left")
    for name in ("tensors", "name", "shape", "dtype", "block", "verdict"):
        table.add_column(name, justify="right" if name == "tensors" else "left")
    for kind, number in Counter(_describe(tensor) for tensor in found.tensors).items():
        *cells, verdict = kind
        style = "green" if verdict == _EXACT else "red"
        table.add_row(str(number), *map(Text, cells), Text(verdict, style=style))
    return table


def _describe(tensor: TensorSurvey) -> tuple[str, ...]:
    name = re.sub(r"(?<=\.)\d+(?=\.)", "*", tensor.name) if tensor.exact else tensor.name
    block = "none" if tensor.block is None else "x".join(map(str, tensor.block))
    verdict = _EXACT if tensor.exact else f"kept, {_why(tensor)}"
    return printable(name), "x".join(map(str, tensor.shape)), tensor.dtype, block, verdict


def _why(tensor: TensorSurvey) -> str:
    if tensor.mismatched_elements:
        return f"{tensor.mismatched_elements:,} elements have no exact twin"
    return "it is not made of 32x32 blocks"


def _gain(found: Survey) -> Table:
    from rich.table import Table

    gain = found.per_rank
    table = Table(title=f"per rank at TP{gain.tp}", title_justify="left", show_header=False)
    table.add_column()
    table.add_column(justify="right")
    table.add_row("gross, bf16 given back", megabytes(gain.gross_bytes))
    table.add_row("twin, what it costs", megabytes(gain.twin_bytes))
    table.add_row("[bold]net[/]", f"[bold]{megabytes(gain.net_bytes)}[/]")
    table.add_row("KV tokens that fit in the net", f"{gain.kv_tokens:,}")
    return table
