"""Hooks for builds of the engine that have no plug-in framework: put in place as the modules are imported.

``memreclaim launch`` brings this about in every process (a ``sitecustomize`` on ``PYTHONPATH``). The engine's files
are not touched: a finder on ``sys.meta_path`` lets the usual ones load a module and then wraps the functions that it
was asked to.
"""

from __future__ import annotations

import functools
import importlib.abc
import importlib.util
import sys
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence
    from importlib.machinery import ModuleSpec
    from types import ModuleType

    from memreclaim.engines.sglang.hooks import Hook


def install(hooks: Iterable[Hook]) -> None:
    """Wrap the targets of ``hooks``: at once where their modules are loaded, else when they are."""
    finder = _Finder(hooks)
    for name in finder.modules:
        if name in sys.modules:
            finder.wrap(sys.modules[name])
    sys.meta_path.insert(0, finder)


class _Finder(importlib.abc.MetaPathFinder):
    """Finds the modules of the targets as the other finders do, and wraps after they have run."""

    def __init__(self, hooks: Iterable[Hook]) -> None:
        self._hooks = tuple(hooks)
        self.modules = {_module_of(hook.target) for hook in self._hooks}

    def find_spec(
        self, fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        del target
        if fullname not in self.modules:
            return None
        for finder in sys.meta_path:
            find = None if finder is self else getattr(finder, "find_spec", None)
            spec = None if find is None else find(fullname, path)
            if spec is not None and spec.loader is not None:
                spec.loader = _Loader(spec.loader, self.wrap)
                return spec  # type: ignore[no-any-return]
        return None

    def wrap(self, module: ModuleType) -> None:
        """Put our functions around the targets in ``module``."""
        for hook in self._hooks:
            if _module_of(hook.target) == module.__name__:
                holder: Any = module
                *owners, name = hook.target.removeprefix(f"{module.__name__}.").split(".")
                for owner in owners:
                    holder = getattr(holder, owner, None)
                stock = getattr(holder, name, None)
                if stock is not None:
                    setattr(holder, name, wrapped(stock, hook))


class _Loader(importlib.abc.Loader):
    """Another loader's work, and then ours."""

    def __init__(self, loader: Any, then: Callable[[ModuleType], None]) -> None:  # noqa: ANN401
        self._loader, self._then = loader, then

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        module: ModuleType | None = self._loader.create_module(spec)
        return module

    def exec_module(self, module: ModuleType) -> None:
        self._loader.exec_module(module)
        self._then(module)

    def __getattr__(self, name: str) -> Any:  # noqa: ANN401
        return getattr(self._loader, name)


def wrapped(stock: Callable[..., Any], hook: Hook) -> Callable[..., Any]:
    """``stock`` with our function before, after or around it, called as the engine's own framework calls it."""
    ours = hook.function()

    if hook.kind == "around":

        @functools.wraps(stock)
        def call(*args: Any, **kwargs: Any) -> Any:  # noqa: ANN401
            return ours(stock, *args, **kwargs)

    elif hook.kind == "after":

        @functools.wraps(stock)
        def call(*args: Any, **kwargs: Any) -> Any:  # noqa: ANN401
            result = stock(*args, **kwargs)
            changed = ours(result, *args, **kwargs)
            return result if changed is None else changed

    else:

        @functools.wraps(stock)
        def call(*args: Any, **kwargs: Any) -> Any:  # noqa: ANN401
            ours(*args, **kwargs)
            return stock(*args, **kwargs)

    return call


def _module_of(target: str) -> str:
    """Module part of a dotted path: all of it but the attribute and a class before it."""
    parts = target.split(".")[:-1]
    return ".".join(parts[:-1] if parts[-1][:1].isupper() else parts)
