"""Every place where memreclaim hooks SGLang, and whether each hook is really in place.

``load_plugins`` swallows a plug-in's exceptions and ``apply_hooks`` each target's, so nothing is believed: before
anything is dropped, :func:`missing` looks at the live objects.
"""

from __future__ import annotations

import pkgutil
import sys
from dataclasses import dataclass
from importlib import import_module
from typing import TYPE_CHECKING, Any

from memreclaim.engines.sglang import drift

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

_HERE = "memreclaim.engines.sglang"
_V4 = "sglang.srt.models.deepseek_v4"
_DRAFT = "sglang.srt.models.deepseek_v4_dspark"
_RUNNER = "sglang.srt.model_executor.model_runner.ModelRunner"
_UPDATER = "sglang.srt.model_executor.model_runner_components.weight_updater.WeightUpdater"
_SCHEDULER = "sglang.srt.managers.scheduler.Scheduler"
_OCCUPATION = "sglang.srt.managers.scheduler_components.weight_updater.SchedulerWeightUpdaterManager"
DISPATCH = f"{_V4}._apply_wo_a_bf16_matmul"
FUSED = "sglang.kernels.ops.attention.dsv4.wo_a.fused_rope_wo_a_bf16"
LOAD = f"{_RUNNER}.load_model"
CAPTURE = f"{_SCHEDULER}.init_all_cuda_graphs"
REGISTRY = "sglang.srt.plugins.hook_registry"


@dataclass(frozen=True)
class Hook:
    """One hooked function."""

    target: str
    """Dotted path in the engine."""
    kind: str
    """``before``, ``after`` or ``around``, as the engine's ``HookType`` has it."""
    ours: str
    """Module and function of this package."""
    reads: bool = False
    """It stands before a reader of the weight: without it that reader is unknown."""
    lines: tuple[str, ...] = ("released",)
    """Lines of the engine that have the target."""

    def function(self) -> Callable[..., Any]:
        """Our function, its module imported now."""
        module, _, name = self.ours.partition(":")
        function: Callable[..., Any] = getattr(import_module(f"{_HERE}.{module}"), name)
        return function


_ALL = ("released", "kernel-module", "einsum")
HOOKS = (
    Hook(LOAD, "after", "reclaim_point:after_load_model", lines=_ALL),
    Hook(DISPATCH, "around", "dispatch:apply_wo_a", reads=True, lines=_ALL),
    Hook(FUSED, "around", "dispatch:fused_rope_wo_a", reads=True),
    Hook(
        "sglang.srt.mem_cache.kv_cache_configurator.KVCacheConfigurator._profile_available_bytes",
        "after",
        "reclaim_point:after_profile",
    ),
    Hook(f"{_RUNNER}.alloc_memory_pool", "after", "reclaim_point:after_alloc_memory_pool"),
    Hook(f"{_SCHEDULER}.init_memory_pools", "before", "reclaim_point:before_memory_pools"),
    Hook(CAPTURE, "around", "reclaim_point:around_capture"),
    Hook(f"{_SCHEDULER}.on_idle", "after", "rank_service:after_idle"),
    Hook(f"{_UPDATER}.begin_weight_update", "before", "updates:before_begin"),
    Hook(f"{_UPDATER}.end_weight_update", "around", "updates:around_end"),
    Hook(f"{_UPDATER}.update_weights_from_disk", "around", "updates:around_disk"),
    Hook(f"{_UPDATER}.load_weights_from_distributed", "around", "updates:around_load"),
    Hook(f"{_UPDATER}.update_weights_from_tensor", "around", "updates:around_load"),
    Hook(f"{_UPDATER}.update_weights_from_ipc", "around", "updates:around_load"),
    Hook("sglang.srt.utils.weight_checker.WeightChecker._reset_tensors", "around", "updates:around_reset"),
    Hook(f"{_OCCUPATION}.release_memory_occupation", "around", "occupation:around_release"),
    Hook(f"{_OCCUPATION}.resume_memory_occupation", "around", "occupation:around_resume"),
)


def of_line(line: str) -> tuple[Hook, ...]:
    """Hooks that a line of the engine has targets for."""
    return tuple(hook for hook in HOOKS if line in hook.lines)


def register(hooks: Iterable[Hook]) -> None:
    """Register ``hooks`` with the engine's own registry; it applies them after all plug-ins ran."""
    registry = import_module(REGISTRY)
    for hook in hooks:
        registered = registry.HookRegistry._hooks.get(hook.target, ())
        if not any(function is hook.function() for _, function, *_ in registered):
            registry.HookRegistry.register(hook.target, hook.function(), registry.HookType(hook.kind))


def apply() -> None:
    """Have the registry apply what was registered since it last did."""
    import_module(REGISTRY).HookRegistry.apply_hooks()


def has_framework() -> bool:
    """Whether this build of the engine has a plug-in framework; looked up by its file, nothing is imported."""
    root = drift.package_root()
    return root is not None and (root / "srt/plugins/hook_registry.py").is_file()


def missing(hooks: Iterable[Hook]) -> list[str]:
    """Targets, and names by which other modules call them, behind which our function does not stand."""
    return [name for hook in hooks for name in _missing(hook)]


def _missing(hook: Hook) -> list[str]:
    try:
        live = pkgutil.resolve_name(hook.target)
    except (ImportError, AttributeError):
        return [hook.target]
    if not _reaches(live, hook.function()):
        return [hook.target]
    name = hook.target.rpartition(".")[2]
    # ``from module import name`` copies the function: whoever did so before the hook was applied must have the new one.
    copies = [(module, getattr(sys.modules.get(module), name, live)) for module in (_V4, _DRAFT) if hook.reads]
    return [f"{module}.{name}" for module, copy in copies if not _reaches(copy, hook.function())]


def _reaches(live: object, ours: Callable[..., Any]) -> bool:
    """Whether ``ours`` is among the wrappers of ``live``: the registry's wrappers hold their hook in a closure."""
    seen: object | None = live
    while seen is not None:
        cells = getattr(seen, "__closure__", None) or ()
        if any(cell.cell_contents is ours for cell in cells if _is_filled(cell)):
            return True
        seen = getattr(seen, "__wrapped__", None)
    return False


def _is_filled(cell: Any) -> bool:  # noqa: ANN401
    try:
        cell.cell_contents  # noqa: B018  raises for an empty cell
    except ValueError:
        return False
    return True
