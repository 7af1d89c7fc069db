"""``serve``, ``status``, ``alerts export`` and ``dashboards export`` as people run them."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace
from typing import TYPE_CHECKING

import pytest
from observed import QUIET, SCRAPE_TOKEN, engine, plant, snapshot
from programs import program
from service_calls import get

from memreclaim.cli import main
from memreclaim.service import view

if TYPE_CHECKING:
    from pathlib import Path

cpu = pytest.mark.cpu


@cpu
def test_status_prints_what_the_service_says(checkpoint: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A table for people, the report for scripts, 0 when all is well."""
    with engine(str(checkpoint)) as made:
        assert main(["status", made.service.url]) == 0
        assert "3 of 3" in capsys.readouterr().out
        assert main(["status", made.service.url, "--json"]) == 0
        assert json.loads(capsys.readouterr().out)["net_bytes"] == 3 * (32768 - 16400)


@cpu
def test_status_ends_with_3_for_a_mismatch(checkpoint: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """And names the layer."""
    with engine(str(checkpoint), reclaim=False) as made:
        plant(made.model)
        made.service.reclaim_at_start()
        assert main(["status", made.service.url]) == 3
        assert "layers.1.attn.wo_a" in capsys.readouterr().out


@cpu
def test_status_ends_with_4_when_nobody_answers(capsys: pytest.CaptureFixture[str]) -> None:
    """One line on stderr says so."""
    assert main(["status", "http://127.0.0.1:1"]) == 4
    assert capsys.readouterr().err.startswith("memreclaim: error: http://127.0.0.1:1: ")


@cpu
def test_status_takes_its_token_from_a_file(checkpoint: Path, tmp_path: Path) -> None:
    """Without it the service refuses, which is an error and no missing rank."""
    path = tmp_path / "token"
    path.write_text(SCRAPE_TOKEN)
    path.chmod(0o600)
    with engine(str(checkpoint), replace(QUIET, scrape_token=SCRAPE_TOKEN)) as made:
        assert main(["status", made.service.url]) == 1
        assert main(["status", made.service.url, "--token-file", str(path)]) == 0


@cpu
@pytest.mark.parametrize(
    "words",
    [
        ["--engine", "reference", "--listen", "0.0.0.0:9411"],
        ["--engine", "reference", "--listen", "nonsense"],
        ["--ranks", "http://a:1,http://a:1"],
        ["--ranks", "/nowhere/at/all"],
        ["--ranks", "http://a:1", "--rank-token-file", "/nowhere/token"],
    ],
)
def test_serve_refuses_what_makes_no_sense(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    """One line, exit code 1, and nothing was started."""
    assert main(["serve", *words]) == 1
    assert capsys.readouterr().err.count("\n") == 1


@cpu
def test_alerts_export_writes_the_rules(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """With the runbook's address that was asked for."""
    command = ["alerts", "export", "--dir", str(tmp_path), "--runbook", "https://intranet.example/runbook", "--json"]
    assert main(command) == 0
    assert len(json.loads(capsys.readouterr().out)["alerts"]) == 11
    text = (tmp_path / "memreclaim.rules.yml").read_text()
    assert text.count("https://intranet.example/runbook#") == 11


@cpu
def test_dashboards_export_writes_both(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Two files of JSON."""
    pytest.importorskip("grafana_foundation_sdk", reason="needs grafana-foundation-sdk==0.0.21")
    assert main(["dashboards", "export", "--dir", str(tmp_path), "--json"]) == 0
    files = json.loads(capsys.readouterr().out)["files"]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["memreclaim-sglang.json", "memreclaim.json"]
    assert len(files) == 2


@cpu
def test_report_is_plain_json() -> None:
    """Every figure of a snapshot survives JSON, bytes as integers."""
    report = json.loads(
        json.dumps(
            view.report(
                snapshot(mismatch=3),
            ),
            allow_nan=False,
        )
    )
    assert isinstance(report["net_bytes"], int)
    assert [row["rows"] for row in report["kernels"]] == ["1", "2..8", "9..192", ">192"]


@pytest.mark.integration
def test_serve_runs_the_embedded_engine(tmp_path: Path) -> None:
    """It loads, reclaims, keeps the planted layer, answers, and ends on SIGTERM with 0."""
    command = [sys.executable, "-m", "memreclaim", "serve", "--engine", "reference", "--listen", "127.0.0.1:0"]
    command += ["--dir", str(tmp_path), "--plant-mismatch", "--json"]
    with program(command, tmp_path / "log", MEMRECLAIM_PROBE_SECONDS="0") as started:
        url = json.loads("".join(iter(started.stdout.readline, "}\n")) + "}")["url"]  # type: ignore[union-attr]
        report = get(url, "/v1/report")[1]
        assert [layer["state"] for layer in report["layers"]].count("reclaimed") == 4
        assert report["kv_pool"]["gained_tokens"] > 0
        assert get(url, "/readyz") == (200, {"ready": True, "state": "degraded"})
        status = [sys.executable, "-m", "memreclaim", "status", url]
        assert subprocess.run(status, capture_output=True, check=False).returncode == 3
    assert started.returncode == 0, (tmp_path / "log").read_text()
