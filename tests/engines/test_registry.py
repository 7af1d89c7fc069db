"""The list of engines: lean to import, honest about what is installed."""

from __future__ import annotations

import subprocess
import sys
from importlib import metadata

import pytest

from memreclaim import engines
from memreclaim.engines import base
from memreclaim.errors import EngineError

LOADED = """
import sys
import memreclaim.engines as engines
engines.found()
print(*sorted({"torch", "triton", "sglang", "vllm", "memreclaim.engines.reference"} & set(sys.modules)))
"""


@pytest.mark.integration
def test_looking_for_engines_imports_none() -> None:
    """Neither an engine nor torch is loaded by importing the package and asking what there is."""
    done = subprocess.run([sys.executable, "-c", LOADED], capture_output=True, text=True, check=True)
    assert done.stdout.split() == []


@pytest.mark.cpu
def test_reference_adapter_follows_the_protocol() -> None:
    """The embedded engine's adapter has every member of the protocol."""
    adapter = engines.get("reference")
    members = {name for name in vars(base.EngineAdapter) if not name.startswith("_")}
    assert members - set(dir(adapter)) == set()
    assert adapter.name == "reference"


@pytest.mark.cpu
def test_unknown_engine_is_refused_by_name() -> None:
    """A name that is in no registry raises an error that repeats it and lists the others."""
    with pytest.raises(EngineError, match=r"'sgland'.*reference"):
        engines.get("sgland")


@pytest.mark.cpu
def test_adapter_of_a_missing_engine_names_what_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    """An adapter whose module cannot be imported says which module that was."""
    entry = engines._Entry("memreclaim.engines.no_such_adapter", "nothing")
    monkeypatch.setitem(engines._REGISTRY, "nothing", entry)
    with pytest.raises(EngineError, match="no_such_adapter"):
        engines.get("nothing")


@pytest.mark.cpu
def test_embedded_engine_is_always_found() -> None:
    """The reference engine is part of the package."""
    reference = next(found for found in engines.found() if found.name == "reference")
    assert reference.installed
    assert reference.supported


@pytest.mark.cpu
@pytest.mark.parametrize(("version", "supported"), [("1.2", True), ("1.3", False)])
def test_only_versions_that_were_checked_are_supported(
    monkeypatch: pytest.MonkeyPatch, version: str, *, supported: bool
) -> None:
    """An installed engine of another version is found, but not supported."""
    entry = engines._Entry("memreclaim.engines.base", "some-engine", ("1.2",))
    monkeypatch.setattr(engines, "_REGISTRY", {"some": entry})
    monkeypatch.setattr(metadata, "version", {"some-engine": version}.__getitem__)
    (found,) = engines.found()
    assert (found.version, found.installed, found.supported) == (version, True, supported)
    assert "1.2" in found.note


@pytest.mark.cpu
def test_missing_engine_is_reported_as_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    """An engine whose package is not there has no version."""
    entry = engines._Entry("memreclaim.engines.base", "a-package-that-nobody-has-installed", ("1",))
    monkeypatch.setattr(engines, "_REGISTRY", {"some": entry})
    (found,) = engines.found()
    assert (found.version, found.installed, found.supported) == (None, False, False)


@pytest.mark.cpu
def test_engine_without_an_adapter_here_is_not_supported(monkeypatch: pytest.MonkeyPatch) -> None:
    """A version that matches is not enough when this build has no adapter."""
    entry = engines._Entry("memreclaim.engines.no_such_adapter", "some-engine", ("1.2",))
    monkeypatch.setattr(engines, "_REGISTRY", {"some": entry})
    monkeypatch.setattr(metadata, "version", {"some-engine": "1.2"}.__getitem__)
    (found,) = engines.found()
    assert (found.installed, found.supported) == (True, False)
