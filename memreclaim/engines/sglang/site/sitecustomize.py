"""Imported by Python when it starts, in each process under ``memreclaim launch``.

It runs the ``sitecustomize`` that it hides, and then waits: our hooks are registered when the engine is first
imported, so that a process that never imports it (a shell's helper, a compiler) pays nothing.
"""

from __future__ import annotations

import importlib.abc
import importlib.util
import os
import sys
import traceback
from importlib.machinery import PathFinder
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence
    from importlib.machinery import ModuleSpec
    from types import ModuleType

_ENGINE = "sglang.srt"


def _run_hidden() -> None:
    """Import the ``sitecustomize`` that stands behind ours on the path, as Python would have done."""
    ours = os.path.realpath(os.path.dirname(__file__))  # noqa: PTH120  pathlib is not loaded yet
    behind = [path for path in sys.path if os.path.realpath(path) != ours]
    spec = PathFinder.find_spec("sitecustomize", behind)
    if spec is not None and spec.loader is not None:
        spec.loader.exec_module(importlib.util.module_from_spec(spec))


class _Waiting(importlib.abc.MetaPathFinder):
    """Finds nothing itself; the first look for the engine registers our hooks."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """Register once, and let the other finders go on."""
        del path, target
        if fullname == _ENGINE:
            sys.meta_path.remove(self)
            _register()
        return None


def _register() -> None:
    try:
        from memreclaim.engines.sglang import plugin

        plugin.register()
    except Exception:  # noqa: BLE001  the engine must start; the operator sees why we did not
        traceback.print_exc()


if os.environ.get("MEMRECLAIM", "off") != "off":
    sys.meta_path.insert(0, _Waiting())
_run_hidden()
