"""The whole way with Debian's Prometheus and Alertmanager: from a bit in a layer to a notification, and back.

Rule hold times of a minute are shortened to a second in the copy of the rules that these tests load; everything else
is as it is shipped.
"""

from __future__ import annotations

import json
import shutil
import signal
import subprocess
import sys
from contextlib import ExitStack
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from typing import TYPE_CHECKING, Any

import pytest
from programs import Webhook, ask, first_line, free_port, has, program
from service_calls import get, until

from memreclaim.observe.alerts import rules

if TYPE_CHECKING:
    from collections.abc import Iterator

pytestmark = [
    pytest.mark.integration,
    pytest.mark.skipif(
        shutil.which("prometheus") is None or shutil.which("prometheus-alertmanager") is None,
        reason="needs Debian's prometheus and prometheus-alertmanager",
    ),
]

ROOT = Path(__file__).parents[2]
LAYER = {"layer": "layers.1.attn.wo_a", "component": "target", "tp_rank": "1", "model_name": "tiny"}


@dataclass
class Site:
    """Two ranks, a head node, Prometheus, Alertmanager and whoever is notified."""

    checkpoint: Path
    folder: Path
    ranks: list[subprocess.Popen[str]]
    urls: list[str]
    head: str
    prometheus: str
    webhook: Webhook


@pytest.fixture(scope="module")
def site(checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    """All of it, on loopback; rank 1 has a planted mismatch."""
    folder = tmp_path_factory.mktemp("site")
    with ExitStack() as stack:
        script = [sys.executable, str(ROOT / "tests" / "rank_process.py"), str(checkpoint)]
        commands = [[*script, "0", "0"], [*script, "1", "0", "planted"]]
        ranks = [stack.enter_context(program(command, folder / f"rank{i}.log")) for i, command in enumerate(commands)]
        urls = [first_line(rank) for rank in ranks]
        assert all(urls), (folder / "rank0.log").read_text()
        serve = [sys.executable, "-m", "memreclaim", "serve", "--json", "--listen", "127.0.0.1:0", "--ranks"]
        head = stack.enter_context(program([*serve, ",".join(urls)], folder / "head.log"))
        head_url = json.loads("".join(iter(head.stdout.readline, "}\n")) + "}")["url"]  # type: ignore[union-attr]
        webhook = Webhook()
        stack.callback(webhook.close)
        sglang = stack.enter_context(_engine_metrics())
        alertmanager = stack.enter_context(_alertmanager(folder, webhook.url))
        prometheus = stack.enter_context(_prometheus(folder, head_url, alertmanager, sglang))
        yield Site(checkpoint, folder, ranks, urls, head_url, prometheus, webhook)


def test_every_rank_is_found_and_scraped(site: Site) -> None:
    """Prometheus learns the ranks from the head node and scrapes each of them."""
    until(lambda: len(ask(site.prometheus, 'up{job="memreclaim"} == 1')) == 2)
    until(lambda: len(ask(site.prometheus, "memreclaim_build_info")) == 2)
    assert {sample["value"][1] for sample in has(site.prometheus, "memreclaim_ranks_expected")} == {"2"}


@pytest.mark.parametrize("file", ["memreclaim.json", "memreclaim-sglang.json"])
def test_every_variable_and_query_of_a_dashboard_has_data(site: Site, file: str) -> None:
    """No panel and no variable is empty on a real Prometheus that scrapes real ranks."""
    board = json.loads((ROOT / "dashboards" / file).read_text())
    for variable in board["templating"]["list"]:
        if variable["type"] == "query":
            metric, label = variable["query"].removeprefix("label_values(").removesuffix(")").rsplit(", ", 1)
            found = has(site.prometheus, f"count by ({label}) ({_filled(metric)})")
            assert all(sample["metric"].get(label) for sample in found), variable["name"]
    for panel in board["panels"]:
        for target in panel.get("targets", []):
            assert _shows(site.prometheus, target["expr"]), panel["title"]


def test_planted_mismatch_reaches_the_pager_and_resolves(site: Site) -> None:
    """From one bit of a layer to the webhook with the layer's labels; mended and reclaimed, it is resolved."""
    fired = until(lambda: site.webhook.received("MemreclaimLayerMismatch", "firing", **LAYER))
    assert fired["labels"]["severity"] == "warning"
    assert "layers.1.attn.wo_a differs in 1 elements" in fired["annotations"]["description"]
    assert fired["annotations"]["runbook_url"].endswith("runbook.md#memreclaimlayermismatch")
    status = [sys.executable, "-m", "memreclaim", "status"]
    assert subprocess.run([*status, site.head], capture_output=True, check=False).returncode == 3
    site.ranks[1].send_signal(signal.SIGUSR1)
    until(lambda: site.webhook.received("MemreclaimLayerMismatch", "resolved", **LAYER))
    assert ask(site.prometheus, "memreclaim_layer_mismatched_elements > 0") == []
    until(lambda: not get(site.head, "/v1/report")[1]["mismatched"])
    assert subprocess.run([*status, site.head], capture_output=True, check=False).returncode == 0


def test_damaged_twin_reaches_the_pager_and_is_rebuilt(site: Site) -> None:
    """A bit flips in a served twin: the audit finds it, the twin is rebuilt, and the alert stays though all is well."""
    site.ranks[1].send_signal(signal.SIGUSR2)
    until(lambda: site.webhook.received("MemreclaimReclaimedLayerMismatch", "firing", tp_rank="1", model_name="tiny"))

    def rebuilt() -> bool:
        report = get(site.urls[1], "/v1/report")[1]
        return report["ready"] and any(event["event"] == "twin_rebuilt" for event in report["events"])

    until(rebuilt)
    assert not site.webhook.received("MemreclaimReclaimedLayerMismatch", "firing", tp_rank="0")


def test_killed_rank_is_missed_until_it_is_back(site: Site) -> None:
    """Its series end with it, ``up`` is 0, the alerts reach the webhook; restarted on its port it is scraped again."""
    site.ranks[0].kill()
    site.ranks[0].wait()
    until(lambda: site.webhook.received("MemreclaimRanksMissing", "firing", model_name="tiny"))
    until(lambda: site.webhook.received("MemreclaimTargetDown", "firing", job="memreclaim"))
    assert ask(site.prometheus, 'memreclaim_build_info{tp_rank="0"}') == []
    assert len(ask(site.prometheus, 'memreclaim_build_info{tp_rank="1"}')) == 1
    done = subprocess.run([sys.executable, "-m", "memreclaim", "status", site.head], capture_output=True, check=False)
    assert (done.returncode, b"missing" in done.stdout) == (4, True)
    script = [sys.executable, str(ROOT / "tests" / "rank_process.py"), str(site.checkpoint), "0"]
    with program([*script, site.urls[0].rpartition(":")[2]], site.folder / "again.log") as again:
        assert first_line(again) == site.urls[0]
        until(lambda: site.webhook.received("MemreclaimRanksMissing", "resolved", model_name="tiny"))
        assert len(ask(site.prometheus, 'up{job="memreclaim"} == 1')) == 2


def _shows(prometheus: str, expression: str) -> bool:
    """Whether a panel's query gives numbers within a bounded time."""
    try:
        return bool(until(lambda: _numbers(prometheus, expression)))
    except AssertionError:
        return False


def _numbers(prometheus: str, expression: str) -> list[dict[str, Any]]:
    """Samples of a panel's query that are numbers: 0 divided by 0 is no answer."""
    return [sample for sample in ask(prometheus, _filled(expression)) if sample["value"][1] != "NaN"]


def _filled(expression: str) -> str:
    """An expression as Grafana sends it with every variable at All."""
    for name in ("job", "instance", "model_name", "tp_rank"):
        expression = expression.replace(f"${name}", ".*")
    return expression.replace("$__rate_interval", "1m")


def _engine_metrics() -> Any:
    """Two gauges as SGLang exports them, for the dashboard that joins them."""
    text = "".join(
        f'sglang:{name}{{model_name="tiny",engine_type="unified",tp_rank="{rank}"}} {value}\n'
        for name, value in (("max_total_num_tokens", 288), ("token_usage", 0.95))
        for rank in (0, 1)
    )

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200)
            self.send_header("Content-Type", "text/plain; version=0.0.4")
            self.end_headers()
            self.wfile.write(text.encode())

        def log_message(self, *_: object) -> None:
            pass

    return _Served(ThreadingHTTPServer(("127.0.0.1", 0), Handler))


class _Served:
    """A little server for the length of a block; gives its port."""

    def __init__(self, server: ThreadingHTTPServer) -> None:
        self._server = server
        self._thread = Thread(target=server.serve_forever, daemon=True)

    def __enter__(self) -> int:
        self._thread.start()
        return int(self._server.server_port)

    def __exit__(self, *_: object) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()


class _Program:
    """A program that is there once ``ready`` answers."""

    def __init__(self, command: list[str], log: Path, url: str) -> None:
        self._program, self._url, self._log = program(command, log), url, log

    def __enter__(self) -> str:
        started = self._program.__enter__()

        def ready() -> bool:
            assert started.poll() is None, self._log.read_text()
            try:
                return bool(get(self._url, "/-/ready")[0] == 200)
            except OSError:
                return False

        until(ready)
        return self._url

    def __exit__(self, *exception: object) -> None:
        self._program.__exit__(*exception)  # type: ignore[arg-type]


def _alertmanager(folder: Path, webhook: str) -> _Program:
    config = {
        "route": {"receiver": "test", "group_by": ["..."], "group_wait": "0s", "group_interval": "1s"},
        "receivers": [{"name": "test", "webhook_configs": [{"url": webhook, "send_resolved": True}]}],
    }
    (folder / "alertmanager.yml").write_text(json.dumps(config))
    url = f"http://127.0.0.1:{free_port()}"
    command = ["prometheus-alertmanager", f"--config.file={folder}/alertmanager.yml", f"--storage.path={folder}/am"]
    command += [f"--web.listen-address={url.removeprefix('http://')}", "--cluster.listen-address="]
    return _Program(command, folder / "alertmanager.log", url)


def _prometheus(folder: Path, head: str, alertmanager: str, sglang: int) -> _Program:
    (folder / "rules.yml").write_text(rules().replace("for: 1m", "for: 1s"))
    jobs: list[dict[str, Any]] = [
        {"job_name": "memreclaim", "http_sd_configs": [{"url": f"{head}/v1/targets", "refresh_interval": "1s"}]},
        {"job_name": "memreclaim-head", "static_configs": [{"targets": [head.removeprefix("http://")]}]},
        {"job_name": "sglang", "static_configs": [{"targets": [f"127.0.0.1:{sglang}"]}]},
    ]
    managers = [{"static_configs": [{"targets": [alertmanager.removeprefix("http://")]}]}]
    config = {
        "global": {"scrape_interval": "1s", "evaluation_interval": "1s"},
        "rule_files": ["rules.yml"],
        "alerting": {"alertmanagers": managers},
        "scrape_configs": jobs,
    }
    (folder / "prometheus.yml").write_text(json.dumps(config))
    url = f"http://127.0.0.1:{free_port()}"
    command = ["prometheus", f"--config.file={folder}/prometheus.yml", f"--storage.tsdb.path={folder}/data"]
    command += [f"--web.listen-address={url.removeprefix('http://')}"]
    return _Program(command, folder / "prometheus.log", url)
