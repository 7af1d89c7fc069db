"""The lines of SGLang that the adapter knows, and whether the installed one is among them.

``released``: version 0.5.23, every hooked function and every reader of ``wo_a`` compared with what was read
(``known.json``). Two older lines that people run have no release to compare with, so their structure is checked
instead, see :mod:`memreclaim.engines.sglang.older`.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from importlib import metadata, resources
from typing import TYPE_CHECKING

from memreclaim.engines.sglang import drift, older

if TYPE_CHECKING:
    from pathlib import Path

RELEASED = "0.5.23"
FILES: dict[str, tuple[str, ...]] = {
    "srt/models/deepseek_v4.py": ("_apply_wo_a_bf16_matmul",),
    "srt/models/deepseek_v4_dspark.py": (),
    "srt/models/deepseek_v4_nextn.py": (),
    "kernels/ops/attention/dsv4/wo_a.py": ("fused_rope_wo_a_bf16",),
    "kernels/ops/gemm/dsv4_wo_a.py": (
        "wo_a_bf16_gemv",
        "wo_a_bf16_small_batch",
        "wo_a_bf16_small_batch_mxfp8",
        "_quantize_partial",
    ),
    "srt/layers/attention/deepseek_v4_mega_backend.py": ("quantize_wo_a",),
    "srt/layers/quantization/mxfp8_input.py": (),
    "srt/model_executor/model_runner.py": (
        "ModelRunner.load_model",
        "ModelRunner.alloc_memory_pool",
        "ModelRunner.recapture_decode_cuda_graph",
    ),
    "srt/model_executor/pool_configurator.py": (
        "create_memory_pool_configurator",
        "DSV4PoolConfigurator.calculate_pool_sizes",
    ),
    "srt/mem_cache/kv_cache_configurator.py": ("KVCacheConfigurator._profile_available_bytes",),
    "srt/model_executor/model_runner_components/weight_updater.py": (
        "WeightUpdater.begin_weight_update",
        "WeightUpdater.end_weight_update",
        "WeightUpdater.update_weights_from_disk",
        "WeightUpdater.load_weights_from_distributed",
        "WeightUpdater.update_weights_from_tensor",
        "WeightUpdater.update_weights_from_ipc",
    ),
    "srt/managers/scheduler_components/weight_updater.py": (
        "SchedulerWeightUpdaterManager.release_memory_occupation",
        "SchedulerWeightUpdaterManager.resume_memory_occupation",
    ),
    "srt/managers/scheduler.py": ("Scheduler.init_memory_pools", "Scheduler.init_all_cuda_graphs", "Scheduler.on_idle"),
    "srt/utils/weight_checker.py": ("WeightChecker._reset_tensors",),
    "srt/plugins/hook_registry.py": ("HookRegistry.register", "HookRegistry.apply_hooks", "HookRegistry._apply_target"),
}
"""Files of the released line, with the functions that are hooked or called; readers of ``wo_a`` are found by
themselves.
"""


@dataclass(frozen=True)
class Line:
    """The installed engine, as the adapter sees it."""

    version: str
    name: str
    """``released``, or the name of an older line; empty when the adapter does not know it."""
    problems: tuple[str, ...]
    """Why the feature stays off; empty when it may be switched on."""

    @property
    def supported(self) -> bool:
        """Whether anything may be hooked."""
        return not self.problems


def installed() -> Line:
    """Look at the installed engine without importing it."""
    try:
        version = metadata.version("sglang")
    except metadata.PackageNotFoundError:
        version = ""
    root = drift.package_root()
    if root is None:
        return Line(version, "", ("sglang is not installed",))
    return examine(root, version)


def verdict(line: Line | None = None) -> tuple[bool, str]:
    """Whether the installed engine may be hooked, and one sentence for people; what ``memreclaim doctor`` repeats."""
    line = installed() if line is None else line
    if not line.supported:
        return False, "; ".join(line.problems)
    checked = "as they were read" if line.name == "released" else f"known by their structure ({line.name} line)"
    return True, f"hooked functions and readers of wo_a are {checked}"


def examine(root: Path, version: str) -> Line:
    """Look at an engine of ``version`` whose package stands at ``root``."""
    if version == RELEASED:
        return Line(version, "released", tuple(drift.look(root, known())))
    name, problems = older.examine(root, version)
    return Line(version, name, problems)


def known() -> dict[str, drift.Known]:
    """What was read of the released line."""
    raw = json.loads(resources.files(__package__).joinpath("known.json").read_text())
    return {name: drift.Known(**file) for name, file in raw["files"].items()}


def record(root: Path) -> str:
    """Text of ``known.json`` for a package at ``root``, for whoever has read a new release."""
    files = {name: asdict(file) for name, file in drift.record(root, FILES).items()}
    return json.dumps({"version": RELEASED, "files": files}, indent=1, sort_keys=True) + "\n"
