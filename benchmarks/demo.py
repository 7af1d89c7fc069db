"""What `memreclaim demo` and `import memreclaim` take: wall and CPU seconds, and peak memory of the process.

Run ``python benchmarks/demo.py --json benchmarks/results/demo.json``. The checkpoint is there before the clock starts.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import resource
import subprocess
import sys
import tempfile
import time
from datetime import UTC, datetime
from pathlib import Path

IMPORT = "import time; t = time.perf_counter(); import memreclaim; print(time.perf_counter() - t)"


def demo(folder: str) -> dict[str, object]:
    """Run the demo in a process of its own."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    started = time.perf_counter()
    command = [sys.executable, "-m", "memreclaim", "demo", "--json", "--dir", folder]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    wall = time.perf_counter() - started
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    cpu = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    told = json.loads(done.stdout)
    return {
        "wall_seconds": round(wall, 2),
        "cpu_seconds": round(cpu, 2),
        "peak_memory_bytes": after.ru_maxrss * 1024,
        "outputs_identical": told["outputs_identical"],
        "peak_extra_bytes": told["peak_extra_bytes"],
        "seconds": told["seconds"],
    }


def main() -> None:
    """Measure, print and store."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    imports = [
        float(subprocess.run([sys.executable, "-c", IMPORT], capture_output=True, text=True, check=True).stdout)
        for _ in range(5)
    ]
    with tempfile.TemporaryDirectory() as folder:
        demo(folder)
        measured = demo(folder)
    result = {
        "benchmark": "demo",
        "date": datetime.now(UTC).date().isoformat(),
        "device": f"{platform.machine()}, {os.cpu_count()} cores",
        "load_average": round(os.getloadavg()[0], 1),
        "import_seconds": round(min(imports), 4),
        "demo": measured,
    }
    text = json.dumps(result, indent=2)
    if options.json:
        options.json.write_text(text + "\n")
    sys.stdout.write(text + "\n")


if __name__ == "__main__":
    main()
