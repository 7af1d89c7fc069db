"""Compilation and the disk cache of the CUDA kernels, without a GPU: NVRTC is a stand-in, or skipped."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from memreclaim_kernels import cuda
from memreclaim_kernels.cuda import _nvrtc

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = pytest.mark.cpu

SOURCES = ("small", "gemv", "dequant", "prove", "encode", "mid", "chain")


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty cache directory."""
    monkeypatch.setenv("MEMRECLAIM_CACHE_DIR", str(tmp_path))
    return tmp_path / "cuda"


@pytest.fixture
def compiled(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Names of sources compiled by a stand-in for NVRTC."""
    names: list[str] = []

    def stand_in(name: str, *_: object, **__: object) -> bytes:
        names.append(name)
        return b"cubin of " + name.encode()

    monkeypatch.setattr(_nvrtc, "version", lambda: (13, 0))
    monkeypatch.setattr(_nvrtc, "supported_archs", lambda: (80, 90, 120))
    monkeypatch.setattr(_nvrtc, "_compile", stand_in)
    return names


def test_second_call_reads_the_cache(cache: Path, compiled: list[str]) -> None:
    """A source is compiled once for the same macros and device, and the file holds what was compiled."""
    first = _nvrtc.compile_source("gemv", (), (9, 0))
    second = _nvrtc.compile_source("gemv", (), (9, 0))
    assert compiled == ["gemv.cu"]
    assert first == second == next(cache.iterdir()).read_bytes()


def test_macros_device_and_headers_are_part_of_the_key(cache: Path, compiled: list[str]) -> None:
    """Other macros, another device or another generated header is another cubin."""
    _nvrtc.compile_source("mid", (("ROWS", 16),), (9, 0))
    _nvrtc.compile_source("mid", (("ROWS", 32),), (9, 0))
    _nvrtc.compile_source("mid", (("ROWS", 32),), (8, 0))
    _nvrtc.compile_source("mid", (("ROWS", 32),), (8, 0), (("wgmma.cuh", "//"),))
    assert 4 == len(compiled) == len(list(cache.iterdir()))


@pytest.mark.usefixtures("compiled")
def test_unwritable_cache_costs_nothing_but_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where the cache cannot be written, compilation still succeeds."""
    blocker = tmp_path / "file"
    blocker.write_text("")
    monkeypatch.setenv("MEMRECLAIM_CACHE_DIR", str(blocker))
    assert _nvrtc.compile_source("gemv", (), (9, 0)) == b"cubin of gemv.cu"


@pytest.mark.usefixtures("compiled")
@pytest.mark.parametrize(
    ("capability", "expected"),
    [((9, 0), "sm_90a"), ((8, 0), "sm_80"), ((12, 1), "compute_120"), ((8, 9), "compute_80")],
)
def test_unknown_devices_get_older_ptx(capability: tuple[int, int], expected: str) -> None:
    """A device that NVRTC does not know runs PTX of the newest architecture before it."""
    assert expected == _nvrtc.architecture(capability)


@pytest.mark.usefixtures("compiled")
def test_too_old_device_is_refused() -> None:
    """Where no known architecture runs, the error says so."""
    with pytest.raises(cuda.CompileError, match="knows no architecture"):
        _nvrtc.architecture((7, 0))


@pytest.mark.parametrize("name", SOURCES)
def test_sources_are_in_the_package(name: str) -> None:
    """Every source is beside the loader, and no source includes a system header."""
    text = (_nvrtc.SOURCES / f"{name}.cu").read_text()
    assert '#include "' in text
    assert "#include <" not in text
