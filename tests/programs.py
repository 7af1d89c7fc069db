"""Starting real programs on loopback for a test, and ending exactly those."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import threading
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import TYPE_CHECKING, Any
from urllib.parse import quote

from service_calls import get, until

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from pathlib import Path

PATH = ":".join(path for path in sys.path if path)


def free_port() -> int:
    """A port that nobody has just now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@contextmanager
def program(command: Sequence[str], log: Path, **environ: str) -> Iterator[subprocess.Popen[str]]:
    """A program for the length of a block; its errors go to ``log``."""
    with log.open("w") as errors:
        env = {**os.environ, "PYTHONPATH": PATH, "OMP_NUM_THREADS": "1", **environ}
        started = subprocess.Popen(list(command), stdout=subprocess.PIPE, stderr=errors, text=True, env=env)
        try:
            yield started
        finally:
            if started.poll() is None:
                started.send_signal(signal.SIGTERM)
                try:
                    started.wait(20)
                except subprocess.TimeoutExpired:
                    started.kill()
                    started.wait()
            if started.stdout is not None:
                started.stdout.close()


def first_line(started: subprocess.Popen[str]) -> str:
    """What a program prints first; empty when it ended instead."""
    assert started.stdout is not None
    return started.stdout.readline().strip()


class Webhook:
    """Receives Alertmanager's notifications."""

    def __init__(self) -> None:
        """Listen on a free port."""
        self.alerts: list[dict[str, Any]] = []
        outer = self

        class Handler(BaseHTTPRequestHandler):
            """Keeps what is posted."""

            def do_POST(self) -> None:
                """One notification."""
                body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                outer.alerts.extend(body["alerts"])
                self.send_response(200)
                self.end_headers()

            def log_message(self, *_: object) -> None:
                """Say nothing."""

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self._server.server_port}/"
        self._thread = threading.Thread(target=self._server.serve_forever, daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Stop listening."""
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()

    def received(self, name: str, status: str, **labels: str) -> dict[str, Any] | None:
        """A notification about ``name`` with these labels, if one came."""
        for alert in list(self.alerts):
            found = alert["labels"]
            same = all(found.get(key) == value for key, value in labels.items())
            if found["alertname"] == name and alert["status"] == status and same:
                return alert
        return None


def ask(prometheus: str, expression: str) -> list[dict[str, Any]]:
    """Result of an instant query."""
    code, body = get(prometheus, f"/api/v1/query?query={quote(expression, safe='')}")
    assert code == 200, (expression, body)
    result: dict[str, Any] = body["data"]
    return [result] if result["resultType"] == "scalar" else result["result"]


def has(prometheus: str, expression: str, seconds: float = 60.0) -> list[dict[str, Any]]:
    """Result of a query once it is not empty."""
    found: list[dict[str, Any]] = until(lambda: ask(prometheus, expression), seconds)
    return found
