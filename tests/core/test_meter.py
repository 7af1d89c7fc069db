"""Memory figures that cannot be had are None, and nothing fails."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from core.models import reclaimer, stack

from memreclaim import meter

pytestmark = pytest.mark.cpu


def test_absent_proc_files(tmp_path: Path) -> None:
    """Case 26: without ``/proc`` every figure is None."""
    absent = meter.ProcessMeter(tmp_path / "nowhere")
    absent.settle()
    absent.restart_peak()
    assert (absent.allocated(), absent.free(), absent.peak()) == (None, None, None)


def test_a_reclaim_without_figures(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Case 26: a reclaim where nothing can be measured succeeds and says None."""
    monkeypatch.setattr("memreclaim.reclaimer.meter_for", lambda _: meter.ProcessMeter(tmp_path))
    report = reclaimer().reclaim(stack(1))
    assert (report.freed.allocator, report.freed.device, report.peak_extra_bytes) == (None, None, None)
    assert report.to_dict()["freed_bytes"] == {"nominal": 24576, "allocator": None, "device": None}


def test_figures_are_read_from_the_files(tmp_path: Path) -> None:
    """Case 26: ``smaps_rollup`` is preferred to ``status``, kB are KiB, and a garbled file is no figure."""
    (tmp_path / "status").write_text("Name:\tx\nVmHWM:\t  50 kB\nVmRSS:\t  40 kB\nRssAnon:\t  30 kB\n")
    figures = meter.ProcessMeter(tmp_path)
    assert (figures.allocated(), figures.peak()) == (30 * 1024, (50 - 10) * 1024)
    (tmp_path / "smaps_rollup").write_text("Rss: 1 kB\nAnonymous:   29 kB\n")
    assert figures.allocated() == 29 * 1024
    (tmp_path / "status").write_text("garbage")
    assert figures.peak() is None


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="no /proc")
def test_a_live_tensor_is_seen() -> None:
    """Case 24: 32 MiB that are written show, and are gone when they are freed."""
    figures = meter.meter_for(torch.device("cpu"))
    figures.settle()
    before = figures.allocated()
    block = torch.ones(2**25, dtype=torch.uint8)
    during = figures.allocated()
    size = block.nbytes
    del block
    figures.settle()
    after = figures.allocated()
    assert before is not None
    assert during is not None
    assert after is not None
    assert during - before >= size - 2**20
    assert after - before <= 2**20


def test_without_malloc_trim(monkeypatch: pytest.MonkeyPatch) -> None:
    """Another C library has no ``malloc_trim``: settling does nothing."""
    monkeypatch.setattr(meter.ctypes, "CDLL", lambda _: (_ for _ in ()).throw(OSError))
    meter.ProcessMeter().settle()
