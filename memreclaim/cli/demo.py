"""``memreclaim demo``: the whole way of a weight on the embedded engine, on any machine.

The same requests are served twice, from bf16 weights and from their twins, and every token and every bit of every
score is compared in between.
"""

from __future__ import annotations

import hashlib
import json
import os
import tempfile
import time
from collections import Counter
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from memreclaim.cli.exit_codes import ExitCode
from memreclaim.config import Mode, Settings
from memreclaim.errors import CheckpointError, ConfigError
from memreclaim.states import State

if TYPE_CHECKING:
    import argparse
    from collections.abc import Iterator, Mapping

    import torch

    from memreclaim.cli.screen import Screen
    from memreclaim.engines import reference
    from memreclaim.snapshot import Report

SUMMARY = "reclaim the weights of a small model while it serves, and compare every output bit for bit"
SCHEMA_VERSION = 1
CAPACITY_TOKENS = 1024
"""KV pool before the reclaim: room for the workload, and small enough that the gain is seen."""
SEED = 0
PLANTED_LAYER = 1


@dataclass(frozen=True)
class DemoRun:
    """What happened, for the table and for JSON."""

    device: str
    report: Report
    before: reference.ServedRun
    after: reference.ServedRun
    rows_served: Mapping[str, int]
    """Projections by path, both runs together."""
    seconds: Mapping[str, float]

    @property
    def difference(self) -> str | None:
        """Where the two runs first differ, or None."""
        return self.before.first_difference(self.after)

    @property
    def exit_code(self) -> ExitCode:
        """An output that differs is an error; a layer that has no exact twin is a mismatch."""
        if self.difference is not None:
            return ExitCode.ERROR
        return ExitCode.MISMATCH if self.report.mismatched else ExitCode.OK

    def to_dict(self) -> dict[str, Any]:
        """JSON form, the keys a contract."""
        report, pool = self.report, self.report.pool
        kept = [layer for layer in report.layers if layer.state is State.KEPT]
        return {
            "schema_version": SCHEMA_VERSION,
            "device": self.device,
            "layers": {"total": len(report.layers), "reclaimed": report.count(State.RECLAIMED), "kept": len(kept)},
            "kept": [
                {"layer": layer.name, "reason": layer.reason, "mismatched_elements": layer.mismatched_elements}
                for layer in kept
            ],
            "gross_bytes": report.gross_bytes,
            "twin_bytes": report.twin_bytes,
            "net_bytes": report.net_bytes,
            "allocator_freed_bytes": report.freed.allocator,
            "peak_extra_bytes": report.peak_extra_bytes,
            "kv_pool": None
            if pool is None
            else {
                "tokens_before": pool.tokens_before,
                "tokens_after": pool.tokens_after,
                "bytes_per_token": pool.bytes_per_token,
                "limited_by": pool.limited_by,
            },
            "outputs_identical": self.difference is None,
            "rows_served": dict(self.rows_served),
            "seconds": dict(self.seconds),
        }


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare folder, device and the planted mismatch."""
    parser.add_argument(
        "--dir",
        type=Path,
        default=default_folder(),
        metavar="FOLDER",
        help="where the demo's checkpoint (50 MB) is written once and found again (default: %(default)s)",
    )
    parser.add_argument(
        "--device", default="auto", help="cpu, cuda, cuda:N, or auto: a GPU where there is one (default: %(default)s)"
    )
    parser.add_argument(
        "--plant-mismatch",
        action="store_true",
        help="change one bit of one layer, so that it has no exact twin and is kept",
    )


def run(arguments: argparse.Namespace, screen: Screen) -> ExitCode:
    """Show the main job."""
    from memreclaim.cli import demo_tables

    # Read when torch is imported. Threads that spin while they wait for each other cost a busy machine 32 CPU seconds
    # for a demo that takes 26 when they sleep (2 cores that others used as well).
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    settings = replace(Settings.from_env(), mode=Mode.ON)
    device = _device(arguments.device)
    done = _run(arguments, settings, device, screen)
    if screen.as_json:
        screen.data(done.to_dict())
    else:
        screen.data({}, *demo_tables.tables(done))
    if done.difference is not None:
        screen.complain(f"outputs differ: {done.difference}")
    return done.exit_code


def default_folder() -> Path:
    """The user's cache folder; one of temporary files for a user without a home, as containers have them."""
    base = os.environ.get("XDG_CACHE_HOME")
    try:
        return (Path(base) if base else Path.home() / ".cache") / "memreclaim"
    except RuntimeError:
        return Path(tempfile.gettempdir()) / f"memreclaim-{os.getuid()}"


def ensure_checkpoint(folder: Path, config: reference.ModelConfig) -> Path:
    """The demo's checkpoint inside ``folder``, written when it is not there yet.

    Its name holds a digest of what is written, so that another version's checkpoint is never taken for it; it gets
    that name in one step when it is whole, so that a half-written one never has it.
    """
    from memreclaim.engines import reference

    digest = hashlib.sha256(json.dumps([config.to_dict(), SEED], sort_keys=True).encode()).hexdigest()[:12]
    target = folder / f"demo-{digest}"
    if not target.exists():
        try:
            reference.write_random_checkpoint(target, config, seed=SEED)
        except CheckpointError:
            if not target.exists():  # else another process wrote the same bytes first
                raise
    return target


def _run(arguments: argparse.Namespace, settings: Settings, device: torch.device, screen: Screen) -> DemoRun:
    from memreclaim.engines import reference
    from memreclaim.reclaimer import Reclaimer

    config = reference.ModelConfig.demo()
    with screen.progress("writing the checkpoint (once)"):
        path = ensure_checkpoint(arguments.dir, config)
    clock = _Clock()
    with screen.progress("loading"), clock.measure("load"):
        model = reference.load_model(path, device=device)
        pool = reference.PagedPool(config, capacity_tokens=CAPACITY_TOKENS, device=device)
    if arguments.plant_mismatch:
        _plant_mismatch(model)
    work = reference.workload(config, SEED)
    with screen.progress("serving from bf16") as bar, clock.measure("serve_before"):
        before = reference.serve_workload(model, pool, work, progress=lambda done, total: bar("", done, total))
    with screen.progress("reclaiming"), clock.measure("reclaim"):
        report = Reclaimer(settings, pool=pool).reclaim(model)
    with screen.progress("serving from twins") as bar, clock.measure("serve_after"):
        after = reference.serve_workload(model, pool, work, progress=lambda done, total: bar("", done, total))
    return DemoRun(str(device), report, before, after, _calls_by_path(), clock.seconds)


def _calls_by_path() -> dict[str, int]:
    from memreclaim import counters

    calls: Counter[str] = Counter()
    for (path, _phase), number in counters.calls.snapshot().items():
        calls[path] += number
    return dict(calls)


def _plant_mismatch(model: torch.nn.Module) -> None:
    """Set the lowest bit of one element of a layer: e4m3 has 4 significant bits, bf16 8, so no scale can hold it."""
    import torch

    weights = [parameter for name, parameter in model.named_parameters() if name.endswith("wo_a.weight")]
    weights[PLANTED_LAYER].detach().view(torch.int16)[0, 0] |= 1


def _device(name: str) -> torch.device:
    """The device called ``name``; :class:`ConfigError` when there is none."""
    import torch

    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        device = torch.device(name)
    except RuntimeError as error:
        raise ConfigError("--device", f"{name!r} is no device") from error
    if device.type not in {"cpu", "cuda"}:
        raise ConfigError("--device", f"{name!r} is neither a CPU nor an NVIDIA GPU")
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        raise ConfigError("--device", f"there is no {name}; torch finds {torch.cuda.device_count()} GPUs")
    return device


class _Clock:
    """Wall-clock seconds by what was done."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}

    @contextmanager
    def measure(self, what: str) -> Iterator[None]:
        """Time the block."""
        start = time.perf_counter()
        yield
        self.seconds[what] = round(time.perf_counter() - start, 3)
