"""What the SGLang hook costs: Python per eager call beside the stock dispatch, and start-up on a CPU.

Per call, on a CPU: the engine's real dispatch is timed with its product taken out, then the hook on a plain weight,
then the hook on a tag with a plan whose launch is taken out. What is left is Python: the difference is what an eager
call pays, a captured graph replays none of it. Needs SGLang's files (installed, or ``SGLANG_ROOT``). Writes JSON.

    python benchmarks/sglang_dispatch.py [OUT.json]
"""

from __future__ import annotations

import gc
import json
import platform
import statistics
import subprocess
import sys
import time
from datetime import UTC, datetime
from functools import wraps
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))

import sglang_dispatch
import torch

from memreclaim import Reclaimer
from memreclaim.engines.sglang import dispatch, lines
from memreclaim_kernels.plan import Plan

if TYPE_CHECKING:
    from collections.abc import Callable

CALLS, REPEATS, LAYERS = 10_000, 15, 43
FLAGS: dict[str, Any] = {
    "is_decode": False,
    "is_target_verify": True,
    "is_prefill": False,
    "fast_path": True,
    "fuse_mxfp8_quant": False,
    "fp8_grid": False,
    "emit_fp8": False,
}
"""As the engine's attention layer passes them."""


def microseconds(call: Callable[[], object]) -> float:
    """CPU time, least of some repeats: the rest is other work on the machine."""
    times = []
    for _ in range(REPEATS):
        started = time.thread_time()
        for _ in range(CALLS):
            call()
        times.append((time.thread_time() - started) / CALLS * 1e6)
    return min(times)


def wrapper(stock: Callable[..., Any]) -> Callable[..., Any]:
    """What the engine's registry makes of an AROUND hook."""

    @wraps(stock)
    def call(*args: Any, **kwargs: Any) -> Any:  # noqa: ANN401
        return dispatch.apply_wo_a(stock, *args, **kwargs)

    return call


def per_call() -> dict[str, float]:
    """Microseconds of Python per call."""
    out = torch.empty(4, 2, 1024, dtype=torch.bfloat16)
    kernels = SimpleNamespace(**dict.fromkeys(sglang_dispatch._KERNELS, lambda *_: out))
    module = sglang_dispatch.dispatch(kernels)
    stock = module._apply_wo_a_bf16_matmul
    hooked = wrapper(stock)
    model = torch.nn.Module()
    model.n_local_groups = 2
    model.wo_a = torch.nn.Linear(4096, 2048, bias=False, dtype=torch.bfloat16)
    torch.nn.init.constant_(model.wo_a.weight, 0.5)
    model.wo_a.weight.requires_grad_(requires_grad=False)  # as an engine's parameters are
    o, plain = torch.randn(4, 2, 4096).bfloat16(), model.wo_a.weight.detach().clone()
    Reclaimer().reclaim(model)
    tag = model.wo_a.weight
    chosen = Plan("small", "cuda", "splits8")
    plan_for = dispatch.ops.plan_for

    def planned(*args: Any, **kwargs: Any) -> Plan:  # noqa: ANN401
        plan_for(*args, **kwargs)
        return chosen

    dispatch.ops.plan_for = planned  # type: ignore[assignment]
    dispatch.ops.project = lambda *_: out  # type: ignore[assignment]
    gc.disable()
    found = {
        "stock_dispatch_us": microseconds(lambda: stock(o, plain.view(2, 1024, -1), **FLAGS)),
        "hook_on_plain_weight_us": microseconds(lambda: hooked(o, plain.view(2, 1024, -1), **FLAGS)),
        "hook_on_tag_us": microseconds(lambda: hooked(o, tag.view(2, 1024, -1), **FLAGS)),
    }
    gc.enable()
    return {**found, "beyond_stock_us": found["hook_on_tag_us"] - found["stock_dispatch_us"]}


def start_up() -> dict[str, float]:
    """CPU seconds that a boot pays beside its GPU work: importing ours, the check of the version, 43 small layers."""
    times = []
    for _ in range(REPEATS):
        started = time.process_time()
        assert lines.installed().supported or sglang_dispatch.root() is not None
        times.append(time.process_time() - started)
    layers = torch.nn.ModuleDict()
    for index in range(LAYERS):
        layer = torch.nn.Module()
        layer.n_local_groups = 2
        layer.wo_a = torch.nn.Linear(64, 64, bias=False, dtype=torch.bfloat16)
        torch.nn.init.constant_(layer.wo_a.weight, 0.5)
        layers[str(index)] = layer
    started = time.process_time()
    Reclaimer().reclaim(layers)
    swapped = time.process_time() - started
    code = (
        "import torch, time; started = time.process_time(); import memreclaim.engines.sglang.reclaim_point; "
        "print(time.process_time() - started)"
    )
    imports = [float(subprocess.check_output([sys.executable, "-c", code])) for _ in range(3)]
    return {"import_s": min(imports), "drift_check_s": statistics.median(times), "swap_43_layers_s": swapped}


def main() -> None:
    """Measure and write."""
    torch.set_num_threads(1)
    result = {
        "date": datetime.now(UTC).date().isoformat(),
        "machine": f"{platform.machine()}, Python {platform.python_version()}, torch {torch.__version__}",
        "calls": CALLS,
        "repeats": REPEATS,
        "per_call": {name: round(value, 3) for name, value in per_call().items()},
        "start_up": {name: round(value, 4) for name, value in start_up().items()},
    }
    text = json.dumps(result, indent=2) + "\n"
    if len(sys.argv) > 1:
        Path(sys.argv[1]).write_text(text)
    print(text, end="")


if __name__ == "__main__":
    main()
