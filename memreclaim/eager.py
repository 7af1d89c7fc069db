"""Keeping torch.compile out of the code that answers for tags.

What a tag answers depends on what stands behind it at that moment, so it must run, not be traced: a compiled graph
breaks there, the answer is computed eagerly, and the graph goes on. :func:`memreclaim.grouped_projection` traces as
one operator.
"""

from __future__ import annotations

import sys
from functools import wraps
from typing import TYPE_CHECKING, Any, ParamSpec, TypeVar

if TYPE_CHECKING:
    from collections.abc import Callable

_P = ParamSpec("_P")
_R = TypeVar("_R")


def eager(function: Callable[_P, _R]) -> Callable[_P, _R]:
    """Run ``function`` outside of Dynamo.

    ``torch.compiler.disable`` itself would import Dynamo, 1.5 s on two cores, into processes that never compile.
    """
    disabled: list[Callable[_P, _R]] = []

    @wraps(function)
    def call(*args: _P.args, **kwargs: _P.kwargs) -> _R:
        dynamo: Any = sys.modules.get("torch._dynamo")
        if dynamo is None or not hasattr(dynamo, "disable"):
            return function(*args, **kwargs)
        if not disabled:
            disabled.append(dynamo.disable(function))
        return disabled[0](*args, **kwargs)

    call._torchdynamo_disable = True  # type: ignore[attr-defined]  # what torch.compiler.disable sets
    return call
