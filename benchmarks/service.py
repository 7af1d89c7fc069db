"""What the service costs: a scrape of a rank with 43 layers, an idle service, the status page.

Writes ``results/service.json``. A scrape is measured from connect to the last byte, on a connection of its own,
and shared snapshots are switched off, so that each one is taken and written anew; its CPU time is that of the
service's thread alone. The idle service is a whole process, ``memreclaim serve --request-seconds 0``, with audits and
the latency probe as they are by default; its CPU time is read from /proc.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import subprocess
import sys
import time
import urllib.request
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any
from unittest.mock import patch

import torch

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE.parent / "tests"))

from observed import QUIET, snapshot  # noqa: E402  the tests' made-up rank of V4.1

from memreclaim.rank import Rank  # noqa: E402
from memreclaim.reclaimer import Reclaimer  # noqa: E402
from memreclaim.service import app, page, view  # noqa: E402
from memreclaim.service.desk import Desk  # noqa: E402
from memreclaim.service.thread import HttpThread  # noqa: E402

if TYPE_CHECKING:
    from collections.abc import Iterator

SCRAPES = 500


class Layers:
    """A ledger with 43 layers."""

    def layers(self) -> tuple[object, ...]:
        """Those of V4.1 at TP4."""
        return snapshot().layers


@contextmanager
def rank_of_43() -> Iterator[str]:
    """A real rank and service over a ledger of 43 layers."""
    reclaimer = Reclaimer()
    reclaimer.ledger = Layers()  # type: ignore[assignment]
    for key, histogram in snapshot().histograms.items():
        for _ in range(histogram.count):
            reclaimer.journal.observe(key[0], 1e-5, *key[1:])
    rank = Rank(reclaimer)
    http = HttpThread(app.RankApp(rank, Desk({}, rank.journal), QUIET).asgi, QUIET)
    http.start()
    try:
        yield http.url
    finally:
        http.close()
        rank.close()


def request(path: str) -> dict[str, Any]:
    """Milliseconds of one request."""
    with rank_of_43() as url, patch.object(app, "SHARED_SECONDS", -1.0):
        times, size = [], 0
        cpu = time.process_time() - time.thread_time()
        for _ in range(SCRAPES):
            started = time.perf_counter()
            with urllib.request.urlopen(f"{url}{path}", timeout=10) as answer:  # noqa: S310  our own loopback URL
                size = len(answer.read())
            times.append((time.perf_counter() - started) * 1e3)
        cpu = time.process_time() - time.thread_time() - cpu
    return {
        "requests": SCRAPES,
        "bytes": size,
        "cpu_ms": cpu / SCRAPES * 1e3,
        "fastest_ms": min(times),
        "median_ms": statistics.median(times),
        "p99_ms": statistics.quantiles(times, n=100)[98],
    }


def idle(seconds: float, folder: Path) -> dict[str, Any]:
    """Share of a core that an idle service takes."""
    command = [sys.executable, "-m", "memreclaim", "serve", "--engine", "reference", "--listen", "127.0.0.1:0"]
    command += ["--request-seconds", "0", "--dir", str(folder)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True) as process:
        assert process.stdout is not None
        process.stdout.readline()
        time.sleep(5.0)  # what start-up leaves behind
        before, started = cpu_seconds(process.pid), time.monotonic()
        time.sleep(seconds)
        share = (cpu_seconds(process.pid) - before) / (time.monotonic() - started)
        process.terminate()
    return {"seconds": seconds, "percent_of_a_core": 100 * share}


def cpu_seconds(pid: int) -> float:
    """User and system time of a process."""
    fields = Path(f"/proc/{pid}/stat").read_text(encoding="ascii").rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def main() -> None:
    """Measure, print and write."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--idle-seconds", type=float, default=60.0)
    parser.add_argument("--dir", type=Path, default=HERE.parent / ".demo")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    found = {
        "schema_version": 1,
        "date": time.strftime("%Y-%m-%d"),
        "machine": f"{os.cpu_count()} cores, {platform.machine()}, Python {platform.python_version()}",
        "load_average_at_start": os.getloadavg()[0],
        "limits": {"scrape_ms": 5.0, "idle_percent_of_a_core": 0.5, "page_bytes": 100_000},
        "scrape_of_43_layers": request("/metrics"),
        "empty_answer": request("/healthz"),
        "report_bytes": len(json.dumps(view.report(snapshot()))),
        "page_bytes": len(page.HTML.encode()),
        "idle_service": idle(arguments.idle_seconds, arguments.dir),
    }
    (HERE / "results" / "service.json").write_text(json.dumps(found, indent=2) + "\n", encoding="utf-8")
    print(json.dumps(found, indent=2))


if __name__ == "__main__":
    main()
