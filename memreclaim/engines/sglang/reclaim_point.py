"""Where the engine's start-up reaches memreclaim: after each model is loaded, and around the sizing of the KV pool.

Nothing here raises into the engine unless the operator asked for abort.
"""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any, ParamSpec

from memreclaim import events
from memreclaim.config import OnMismatch
from memreclaim.engines.sglang import hooks, pool, rank_service
from memreclaim.engines.sglang.adapter import SGLangAdapter
from memreclaim.engines.sglang.session import Budget, session, twins_of
from memreclaim.journal import triggered_by

if TYPE_CHECKING:
    from collections.abc import Callable

_P = ParamSpec("_P")


def guarded(function: Callable[_P, None]) -> Callable[_P, None]:
    """Turn a failure of ours into one line of the log; the operator may have asked for an end instead."""

    @functools.wraps(function)
    def call(*args: _P.args, **kwargs: _P.kwargs) -> None:
        try:
            function(*args, **kwargs)
        except Exception as error:
            if session().settings.on_mismatch is OnMismatch.ABORT:
                raise
            events.emit(
                "error", "engine_hook_failed", hook=function.__name__, detail=f"{type(error).__name__}: {error}"
            )

    return call


@guarded
def after_load_model(_result: object, runner: Any, *_args: Any, **_kwargs: Any) -> None:  # noqa: ANN401
    """AFTER hook of ``ModelRunner.load_model``: the weights are there, the pool is not sized yet."""
    here = session()
    adapter = SGLangAdapter(runner, here.line, captured=here.captured)
    if not any(adapter.models()[0].layers(here.settings.targets)):
        return
    wanted = hooks.of_line(here.line.name)
    if hooks.has_framework():
        hooks.register(wanted)
        hooks.apply()
    here.adapters.append(adapter)
    with triggered_by("startup"):
        here.reclaim(adapter)
    if here.service is None:
        here.service = rank_service.start(here)
        here.proven(twins_of(adapter.models()[0].root).values())


@guarded
def before_memory_pools(*_args: Any, **_kwargs: Any) -> None:  # noqa: ANN401
    """BEFORE hook of ``Scheduler.init_memory_pools``: say it once more if a hook of ours is not in place."""
    here = session()
    if here.adapters:
        for target in hooks.missing(hooks.of_line(here.line.name)):
            events.emit("warning", "hook_missing", engine="sglang", target=target)


def around_capture(stock: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:  # noqa: ANN401
    """AROUND hook of ``Scheduler.init_all_cuda_graphs``: audit and probe allocate nothing meanwhile."""
    _before_capture()
    with session().quiet():
        return stock(*args, **kwargs)


@guarded
def _before_capture() -> None:
    """Twins may not move and bf16 may not go any more."""
    here = session()
    devices = {next(one.runner.model.parameters()).device.type for one in here.adapters}
    here.captured = "cuda" in devices


@guarded
def after_profile(result: int, configurator: Any, *_args: Any, **_kwargs: Any) -> None:  # noqa: ANN401
    """AFTER hook of ``KVCacheConfigurator._profile_available_bytes``: keep the budget, which stands."""
    session().budget = Budget(int(result), pool.free_bytes(configurator))


@guarded
def after_alloc_memory_pool(_result: object, runner: Any, *_args: Any, **_kwargs: Any) -> None:  # noqa: ANN401
    """AFTER hook of ``ModelRunner.alloc_memory_pool``."""
    here = session()
    if here.adapters:
        here.size(runner)
