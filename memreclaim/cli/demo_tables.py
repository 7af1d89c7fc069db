"""The demo's result as a screen that a person reads."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rich.table import Table
from rich.text import Text

from memreclaim.cli.screen import megabytes
from memreclaim.states import State

if TYPE_CHECKING:
    from rich.console import RenderableType

    from memreclaim.cli.demo import DemoRun
    from memreclaim.snapshot import LayerReport


def tables(run: DemoRun) -> tuple[RenderableType, ...]:
    """Layers, memory, serving, and the verdict."""
    return _layers(run), _memory(run), _serving(run), _verdict(run)


def _layers(run: DemoRun) -> Table:
    table = Table(title=f"wo_a on {run.device}", title_justify="left")
    for name in ("layer", "bf16", "twin", "proof", "state"):
        table.add_column(name, justify="right" if name in {"bf16", "twin"} else "left")
    for layer in run.report.layers:
        reclaimed = layer.state is State.RECLAIMED
        state = f"[green]{layer.state}[/]" if reclaimed else f"[yellow]{layer.state}, {layer.reason}[/]"
        twin = megabytes(layer.twin_bytes) if layer.twin_bytes else "-"
        table.add_row(layer.name, megabytes(layer.weight_bytes), twin, _proof(layer), state)
    return table


def _proof(layer: LayerReport) -> str:
    elements = layer.weight_bytes // 2
    if layer.first_mismatch is None:
        return f"{elements:,} elements equal" if layer.state is State.RECLAIMED else "-"
    return f"{layer.mismatched_elements:,} of {elements:,} differ, first at {tuple(layer.first_mismatch)}"


def _memory(run: DemoRun) -> Table:
    report, pool = run.report, run.report.pool
    table = Table(title="memory", title_justify="left", show_header=False)
    table.add_column()
    table.add_column(justify="right")
    table.add_row("gross, bf16 given back", megabytes(report.gross_bytes))
    table.add_row("measured", _measured(report.freed.allocator))
    table.add_row("twins, what they cost", megabytes(report.twin_bytes))
    table.add_row("[bold]net[/]", f"[bold]{megabytes(report.net_bytes)}[/]")
    table.add_row("most extra while reclaiming", _measured(report.peak_extra_bytes))
    if pool is not None:
        change = f"{pool.tokens_before:,} -> {pool.tokens_after:,} tokens"
        table.add_row("KV pool", f"{change}, limited by {pool.limited_by}")
    return table


def _measured(n_bytes: int | None) -> str:
    return "not measurable here" if n_bytes is None else megabytes(n_bytes)


def _serving(run: DemoRun) -> Table:
    table = Table(title="model calls by phase and rows, the same in both runs", title_justify="left")
    table.add_column("phase")
    ranges = run.after.row_ranges()
    names = list(dict.fromkeys(name for calls in ranges.values() for name in calls))
    for name in names:
        table.add_column(f"{name} row" if name == "1" else f"{name} rows", justify="right")
    for phase, calls in ranges.items():
        table.add_row(phase, *(str(calls.get(name, "-")) for name in names))
    return table


def _verdict(run: DemoRun) -> Text:
    tokens = sum(map(len, run.after.outputs))
    times = ", ".join(f"{what.replace('_', ' ')} {value:.1f} s" for what, value in run.seconds.items())
    served = ", ".join(f"{path} {calls}" for path, calls in sorted(run.rows_served.items()))
    if run.difference is None:
        same = "every token and every bit of every score is the same"
        text = Text(f"{len(run.after.outputs)} requests, {tokens} tokens: {same}\n", style="bold green")
    else:
        text = Text(f"outputs differ: {run.difference}\n", style="bold red")
    note = "\na CPU decodes the twin on each call; kernels that read it are for GPUs" if run.device == "cpu" else ""
    return text.append(f"projections by path: {served}\n{times}{note}", style="not bold default")
