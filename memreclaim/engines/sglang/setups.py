"""Set-ups of the engine in which something reads, moves or shares the weights that memreclaim cannot serve.

Each is asked of the engine's published configuration, as its own code asks; an engine without one (an older line) is
asked for the arguments that it was started with.
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable

_CONTEXT = "sglang.srt.runtime_context"
_V4 = "sglang.srt.models.deepseek_v4"


def setting(runner: Any, bag: str, path: str, default: Any = None) -> Any:  # noqa: ANN401
    """Value of ``path`` (``offload.cpu_offload_gb``) in a bag of the configuration (``exec``), or ``default``."""
    context = sys.modules.get(_CONTEXT)
    try:
        found: Any = getattr(context, f"get_{bag}")()
        for name in path.split("."):
            found = getattr(found, name)
    except Exception:  # noqa: BLE001  unpublished bags raise what their version likes; the arguments are asked next
        return getattr(getattr(runner, "server_args", None), path.rpartition(".")[2], default)
    return default if found is None else found


def _shares_weights(runner: Any) -> bool:  # noqa: ANN401
    return str(setting(runner, "model", "weight_cache_mode", "off")) != "off"


def _slices_for_decode(runner: Any) -> bool:  # noqa: ANN401
    enabled = setting(runner, "parallel", "enable_cp_decode_attn_tp", default=False)
    return bool(enabled) and int(setting(runner, "parallel", "attn_cp_size", 1)) > 1


def _loads_later(runner: Any) -> bool:  # noqa: ANN401
    return getattr(runner, "startup_weight_load", None) is not None


def _serves_addresses(runner: Any) -> bool:  # noqa: ANN401
    return getattr(getattr(runner, "remote_instance_weight_transporter", None), "engine", None) is not None


def _has_megakernel(runner: Any) -> bool:  # noqa: ANN401
    names = ("enable_nvidia_megakernel", "enable_amd_monokernel")
    return any(setting(runner, "exec", f"kernel.{name}", default=False) for name in names)


def _offloads(runner: Any) -> bool:  # noqa: ANN401
    by_size = float(setting(runner, "exec", "offload.cpu_offload_gb", 0)) > 0
    return by_size or int(setting(runner, "exec", "offload.offload_group_size", -1)) > 0


def _is_other_platform(_runner: Any) -> bool:  # noqa: ANN401
    model = sys.modules.get(_V4)
    return bool(getattr(model, "_is_hip", False) or getattr(model, "_is_npu", False))


_SETUPS: dict[str, tuple[str, Callable[[Any], bool]]] = {
    "weight_cache_mode": ("weights are shared over CUDA IPC", _shares_weights),
    "enable_cp_decode_attn_tp": ("context-parallel decode caches slices of the weight", _slices_for_decode),
    "startup_weight_load": ("weights are loaded while graphs are captured", _loads_later),
    "remote_instance": ("other instances fetch the weights by their addresses", _serves_addresses),
    "megakernel": ("a megakernel takes the weights' addresses", _has_megakernel),
    "offload": ("weights move between host and device", _offloads),
    "platform": ("the readers of wo_a on ROCm and NPU are not known", _is_other_platform),
}


def problems(runner: Any) -> list[tuple[str, str]]:  # noqa: ANN401
    """Set-ups in force, each with what reads the weight."""
    return [(name, note) for name, (note, holds) in _SETUPS.items() if holds(runner)]
