"""CPU time and memory of `memreclaim survey` per GB of wo_a, on checkpoints of V4.1-Flash's shapes.

    python benchmarks/survey.py [--layers 43] [--dir FOLDER] [--out benchmarks/results/survey.json]

Each checkpoint is written first, so that the page cache holds it: what is measured is the program, not the disk. Every
run is a process of its own; CPU time and largest resident set are those that the kernel counted for it, best of three.
CPU seconds per GB are the slope between one layer and many, so that starting Python is not in them.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import shutil
import subprocess
import sys
import tempfile
import time
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np

from memreclaim._version import __version__

ROWS, COLUMNS = 8192, 4096
KINDS = ("32x32", "128x128", "edge scales", "bf16")
REPEATS = 3
EXPECTED_CODES = (0, 3)


def write_checkpoint(folder: Path, kind: str, layers: int) -> int:
    """Write ``layers`` weights of one kind, a file each; returns the bytes of all weights."""
    folder.mkdir(parents=True)
    random = np.random.default_rng(0)
    block = 128 if kind == "128x128" else 32
    codes = random.integers(0, 256, (ROWS, COLUMNS), dtype=np.uint8)
    codes[(codes & 0x7F) == 0x7F] = 0  # noqa: PLR2004 - e4m3's NaN
    scales = random.integers(115, 127, (ROWS // block, COLUMNS // block), dtype=np.uint8)
    if kind == "edge scales":
        scales[-1, -1] = 1
    weight, dtype = (codes, "F8_E4M3")
    if kind == "bf16":
        weight, dtype = (codes.astype(np.uint16) << 7, "BF16")
    for layer in range(layers):
        stem = f"layers.{layer}.attn.wo_a"
        header: dict[str, Any] = {
            f"{stem}.weight": {"dtype": dtype, "shape": [ROWS, COLUMNS], "data_offsets": [0, weight.nbytes]}
        }
        parts = [weight]
        if kind != "bf16":
            end = weight.nbytes + scales.nbytes
            entry = {"dtype": "F8_E8M0", "shape": list(scales.shape), "data_offsets": [weight.nbytes, end]}
            header[f"{stem}.scale"] = entry
            parts.append(scales)
        text = json.dumps(header).encode()
        with (folder / f"model-{layer:05}.safetensors").open("wb") as file:
            file.write(len(text).to_bytes(8, "little") + text)
            for part in parts:
                file.write(part.tobytes())
    return weight.nbytes * layers


PROGRAM = """
import json, os, sys
from memreclaim.cli import main
code = main(["survey", sys.argv[1], "--tp", "4", "--json"])
times = os.times()
status = dict(line.split(":", 1) for line in open("/proc/self/status") if ":" in line)
peak = int(status["VmHWM"].split()[0]) / 1024
print(json.dumps({"code": code, "cpu_s": times.user + times.system, "peak_rss_mib": peak}), file=sys.stderr)
"""
"""The process's own high-water mark is read: ``ru_maxrss`` of a child starts at what its parent held."""


def measure(folder: Path) -> dict[str, float]:
    """Survey ``folder`` in a process of its own."""
    start = time.perf_counter()
    done = subprocess.run([sys.executable, "-c", PROGRAM, str(folder)], capture_output=True, text=True, check=True)
    wall = time.perf_counter() - start
    figures = json.loads(done.stderr)
    if figures.pop("code") not in EXPECTED_CODES:
        sys.exit(done.stderr)
    return {"wall_s": wall, **figures}


def measure_kind(scratch: Path, kind: str, layers: int) -> dict[str, Any]:
    """Figures of one kind of checkpoint: of one layer, of many, and the slope."""
    folder = scratch / kind.replace(" ", "-")
    one = write_checkpoint(folder / "one", kind, 1)
    many = write_checkpoint(folder / "many", kind, layers)
    first, last = (
        min((measure(folder / name) for _ in range(REPEATS)), key=lambda figures: figures["cpu_s"])
        for name in ("one", "many")
    )
    shutil.rmtree(folder)
    slope = (last["cpu_s"] - first["cpu_s"]) / ((many - one) / 1e9)
    return {
        "kind": kind,
        "layers": layers,
        "wo_a_bytes": many,
        "one_layer_cpu_s": round(first["cpu_s"], 3),
        **{name: round(figure, 3) for name, figure in last.items()},
        "cpu_s_per_gb": round(slope, 3),
    }


def main() -> None:
    """Measure every kind, print a table, write the JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, default=43)
    parser.add_argument("--dir", type=Path, help="where the checkpoints are written (default: a temporary folder)")
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results" / "survey.json")
    arguments = parser.parse_args()
    results = []
    with tempfile.TemporaryDirectory(dir=arguments.dir) as scratch:
        for kind in KINDS:
            figures = measure_kind(Path(scratch), kind, arguments.layers)
            results.append(figures)
            print(
                f"{kind:12} {figures['wo_a_bytes'] / 1e9:5.2f} GB  {figures['cpu_s']:6.2f} s CPU"
                f"  {figures['cpu_s_per_gb']:6.3f} s/GB  {figures['peak_rss_mib']:5.0f} MiB"
            )
    report = {
        "what": f"memreclaim survey: CPU seconds per GB of wo_a, and peak resident memory; best of {REPEATS}",
        "date": datetime.now(UTC).date().isoformat(),
        "memreclaim": __version__,
        "python": platform.python_version(),
        "numpy": np.__version__,
        "machine": f"{os.cpu_count()} cores, {_processor()}",
        "results": results,
    }
    arguments.out.parent.mkdir(parents=True, exist_ok=True)
    arguments.out.write_text(json.dumps(report, indent=2) + "\n")


def _processor() -> str:
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    return next((line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")), platform.machine())


if __name__ == "__main__":
    main()
