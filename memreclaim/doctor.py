"""Looks at the machine and says what memreclaim would do on it, and what is off and why.

Nothing is changed, no engine is imported, and a thing that cannot be found out is said to be unknown.
"""

from __future__ import annotations

import os
import platform
from dataclasses import dataclass
from enum import StrEnum
from importlib import metadata, util
from operator import attrgetter
from pathlib import Path
from typing import TYPE_CHECKING, Any

from memreclaim import engines
from memreclaim._version import __version__
from memreclaim.config import Mode, Settings
from memreclaim.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

SCHEMA_VERSION = 1
OLDEST_FP8_CAPABILITY = (8, 9)
"""Below it GPUs have no fp8 arithmetic; codes are decoded by integer operations there."""


class Level(StrEnum):
    """What a finding means."""

    OK = "ok"
    OFF = "off"
    """Something is not there, or switched off; the rest works."""
    BAD = "bad"
    """Something asked for cannot work."""


@dataclass(frozen=True)
class Finding:
    """One thing that was looked at."""

    name: str
    level: Level
    detail: str
    """What was found and, when it is off or bad, why."""


@dataclass(frozen=True)
class Diagnosis:
    """All findings."""

    findings: tuple[Finding, ...]

    @property
    def healthy(self) -> bool:
        """Nothing is bad."""
        return all(finding.level is not Level.BAD for finding in self.findings)

    def to_dict(self) -> dict[str, Any]:
        """JSON form."""
        return {
            "schema_version": SCHEMA_VERSION,
            "healthy": self.healthy,
            "findings": [
                {"name": finding.name, "level": finding.level, "detail": finding.detail} for finding in self.findings
            ],
        }


def examine(engine: str | None = None, environ: Mapping[str, str] | None = None) -> Diagnosis:
    """Look at everything; ``engine`` is one that must be usable: its absence is bad, that of others is off."""
    looks: tuple[Callable[[], list[Finding]], ...] = (
        _versions,
        _torch_seams,
        lambda: _settings(os.environ if environ is None else environ),
        _devices,
        _memory,
        lambda: _engines(engine),
    )
    return Diagnosis(tuple(finding for look in looks for finding in look()))


def _versions() -> list[Finding]:
    found = [
        Finding("memreclaim", Level.OK, __version__),
        Finding("python", Level.OK, f"{platform.python_version()} on {platform.system()} {platform.machine()}"),
        _package("torch", "nothing works without it", missing=Level.BAD),
        _package("triton", "no Triton kernels; decoding and torch's own products serve", missing=Level.OFF),
        _package("prometheus_client", "no metrics", missing=Level.OFF),
    ]
    if util.find_spec("memreclaim_kernels") is None:
        found.append(Finding("memreclaim_kernels", Level.BAD, "not importable: the installation is incomplete"))
    return found


SEAMS = (
    "Tensor._make_subclass",
    "Tensor._use_count",
    "UntypedStorage._new_with_weak_ptr",
    "_C._storage_Use_Count",
    "_C._is_alias_of",
    "_C._set_throw_on_mutable_data_ptr",
    "_C.DisableTorchFunctionSubclass",
    "ops.aten.view.default._can_decompose",
    "ops.aten.view.default.is_view",
    "Tag.inplace_view",
)
"""What tags and the swap use of torch beyond its documented interface, as paths below ``torch``."""


def _torch_seams() -> list[Finding]:
    """Whether this torch still has what tags are made with."""
    try:
        import torch
    except ImportError:
        return []
    missing = [path for path in SEAMS if not _has(torch, path)]
    if missing:
        return [Finding("torch seams", Level.BAD, f"torch {torch.__version__} has no {', '.join(missing)}")]
    return [Finding("torch seams", Level.OK, f"all {len(SEAMS)} are there")]


def _has(root: object, path: str) -> bool:
    try:
        attrgetter(path)(root)
    except AttributeError:
        return False
    return True


def _package(name: str, consequence: str, *, missing: Level) -> Finding:
    try:
        return Finding(name, Level.OK, metadata.version(name))
    except metadata.PackageNotFoundError:
        return Finding(name, missing, f"not installed: {consequence}")


def _settings(environ: Mapping[str, str]) -> list[Finding]:
    try:
        settings = Settings.from_env(environ)
    except ConfigError as error:
        return [Finding("settings", Level.BAD, str(error))]
    if settings.mode is Mode.OFF:
        return [Finding("settings", Level.OFF, "MEMRECLAIM is off: set MEMRECLAIM=on to reclaim")]
    words = f"mode {settings.mode}, numerics {settings.numerics}, targets {','.join(settings.targets)}"
    return [Finding("settings", Level.OK, words)]


def _devices() -> list[Finding]:
    try:
        import torch
    except ImportError as error:
        return [Finding("device", Level.BAD, f"torch cannot be imported: {error}")]
    if not torch.cuda.is_available():
        build = "torch is a build without CUDA" if torch.version.cuda is None else "torch finds no NVIDIA GPU"
        return [Finding("device", Level.OFF, f"CPU only, GPU kernels are off: {build}")]
    return [look(index) for index in range(torch.cuda.device_count()) for look in (_device, _kernels)]


def _device(index: int) -> Finding:
    import torch

    properties = torch.cuda.get_device_properties(index)
    capability = (properties.major, properties.minor)
    free, total = torch.cuda.mem_get_info(index)
    fp8 = "" if capability >= OLDEST_FP8_CAPABILITY else ", no fp8 arithmetic: codes are decoded by integer operations"
    text = f"{properties.name}, sm{capability[0]}{capability[1]}, {free / 1e9:.1f} of {total / 1e9:.1f} GB free{fp8}"
    return Finding(f"cuda:{index}", Level.OK, text)


def _kernels(index: int) -> Finding:
    """Which kernels serve on a GPU, and whether somebody measured them there."""
    import torch

    from memreclaim_kernels import plan, tables

    name = f"kernels cuda:{index}"
    device = plan.device_of(torch.device("cuda", index))
    backend = plan.backend_for(device)
    if backend == "reference" or device.capability is None:
        return Finding(name, Level.OFF, "no kernels for this GPU: twins are decoded and torch's own products serve")
    try:
        found = tables.for_device(device.name, device.capability)
    except tables.TableError as error:
        return Finding(name, Level.BAD, str(error))
    words = ", ".join(f"{table.source} ({table.status})" for table in found)
    return Finding(name, Level.OK, f"{backend}, {words or 'no table for this GPU: choices are a heuristic'}")


def _memory(meminfo: Path = Path("/proc/meminfo")) -> list[Finding]:
    try:
        fields = dict(line.split(":", 1) for line in meminfo.read_text().splitlines() if ":" in line)
        total, free = (int(fields[name].split()[0]) * 1024 for name in ("MemTotal", "MemAvailable"))
    except (OSError, KeyError, ValueError, IndexError):
        return [Finding("memory", Level.OFF, f"unknown: {meminfo} cannot be read")]
    return [Finding("memory", Level.OK, f"{free / 1e9:.1f} of {total / 1e9:.1f} GB available")]


def _engines(wanted: str | None) -> list[Finding]:
    findings = []
    for engine in engines.found():
        usable = engine.installed and engine.supported
        level = Level.OK if usable else Level.BAD if engine.name == wanted else Level.OFF
        version = "" if engine.version is None else f"{engine.version}, "
        findings.append(Finding(f"engine {engine.name}", level, f"{version}{engine.note}"))
        if engine.name == "sglang" and engine.installed:
            from memreclaim.engines.sglang import diagnose

            findings += diagnose(wanted=engine.name == wanted)
    return findings
