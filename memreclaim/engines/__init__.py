"""Engines that memreclaim knows, by name; importing this package imports none of them, and not torch."""

from __future__ import annotations

from dataclasses import dataclass
from importlib import import_module, metadata, util
from typing import TYPE_CHECKING, cast

from memreclaim._version import __version__
from memreclaim.errors import EngineError

if TYPE_CHECKING:
    from memreclaim.engines.base import EngineAdapter

__all__ = ["Found", "found", "get", "names"]


@dataclass(frozen=True)
class _Entry:
    """One line of the registry."""

    module: str
    """Module that has an ``ADAPTER``."""
    distribution: str | None
    """The engine's package, None for the embedded one."""
    versions: tuple[str, ...] = ()
    """Versions of the engine whose hooks the adapter was checked against; where there is no ``judge``."""
    judge: str | None = None
    """Module whose ``verdict()`` looks at the installed code: whether it is supported, and one sentence why."""


@dataclass(frozen=True)
class Found:
    """What is known of one engine on this machine without importing it."""

    name: str
    version: str | None
    """None when the engine is not installed."""
    installed: bool
    supported: bool
    """An adapter is here, and would switch itself on with this version."""
    note: str
    """One sentence for people."""


_REGISTRY = {
    "reference": _Entry("memreclaim.engines.reference.adapter", None),
    "sglang": _Entry("memreclaim.engines.sglang", "sglang", judge="memreclaim.engines.sglang.lines"),
}


def names() -> tuple[str, ...]:
    """Every engine in the registry."""
    return tuple(_REGISTRY)


def get(name: str) -> type[EngineAdapter]:
    """Import the adapter of one engine.

    Raises :class:`EngineError` for a name that is not in the registry, and for an adapter that cannot be imported
    because it, or its engine, is not installed.
    """
    entry = _REGISTRY.get(name)
    if entry is None:
        message = f"no engine is called {name!r}; there are {', '.join(_REGISTRY)}"
        raise EngineError(message)
    try:
        module = import_module(entry.module)
    except ModuleNotFoundError as error:
        message = f"the adapter for {name} needs {error.name}, which is not installed"
        raise EngineError(message) from error
    return cast("type[EngineAdapter]", module.ADAPTER)


def found() -> tuple[Found, ...]:
    """Engines on this machine, from package metadata and source text: none is imported, no device is touched."""
    return tuple(_look(name, entry) for name, entry in _REGISTRY.items())


def _look(name: str, entry: _Entry) -> Found:
    if entry.distribution is None:
        return Found(name, __version__, installed=True, supported=True, note="embedded, runs on any device")
    try:
        version = metadata.version(entry.distribution)
    except metadata.PackageNotFoundError:
        return Found(name, None, installed=False, supported=False, note="not installed")
    if util.find_spec(entry.module) is None:
        return Found(name, version, installed=True, supported=False, note="this build has no adapter for it")
    if entry.judge is not None:
        supported, note = import_module(entry.judge).verdict()
        return Found(name, version, installed=True, supported=supported, note=note)
    supported = version in entry.versions
    checked = f"checked against {', '.join(entry.versions)}"
    return Found(name, version, installed=True, supported=supported, note=checked if supported else f"only {checked}")
