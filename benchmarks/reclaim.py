"""Time and memory of the main job on 43 layers: twin, proof, swap, and restore.

Run ``python benchmarks/reclaim.py --device cuda --json result.json``. Weights are decoded from random codes with
exponents 115 to 126, as real checkpoints have them. The first, small reclaim loads kernels and is not counted.
"""

from __future__ import annotations

import argparse
import json
import platform
import sys
import time
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path

import torch
from torch import nn

import memreclaim as mr
from memreclaim_kernels import ops

RANK, DEPTH = 1024, 4096


class Attention(nn.Module):
    """The part of an attention layer that discovery looks for."""

    def __init__(self, groups: int, rank: int, depth: int, device: str) -> None:
        """Make ``wo_a`` with a weight ``[groups * rank, depth]`` that has an exact twin."""
        super().__init__()
        self.n_local_groups, self.o_lora_rank = groups, rank
        self.wo_a = nn.Module()
        tiles = (groups, rank // 16, depth // 32, 512)
        codes = torch.randint(0, 127, tiles, dtype=torch.uint8, device=device)
        codes |= torch.randint(0, 2, tiles, dtype=torch.uint8, device=device) << 7
        exponents = torch.randint(115, 127, (groups, rank // 32, depth // 32), dtype=torch.uint8, device=device)
        weight = ops.dequantize(codes, exponents).view(groups * rank, depth)
        self.wo_a.weight = nn.Parameter(weight, requires_grad=False)


def model_of(layers: int, groups: int, device: str, rank: int = RANK, depth: int = DEPTH) -> nn.Module:
    """A model of ``layers`` such layers."""
    return nn.ModuleList(Attention(groups, rank, depth, device) for _ in range(layers))


def measure(layers: int, groups: int, device: str) -> dict[str, object]:
    """Reclaim and restore once, and say what it took."""
    mr.Reclaimer().reclaim(model_of(1, groups, device))
    model = model_of(layers, groups, device)
    before = [layer.wo_a.weight.detach().clone() for layer in model] if device == "cpu" else None
    reclaimer = mr.Reclaimer()
    started = time.perf_counter()
    report = reclaimer.reclaim(model)
    reclaimed = time.perf_counter() - started
    reclaimer.check_integrity()
    started = time.perf_counter()
    reclaimer.restore(model)
    restored = time.perf_counter() - started
    if before is not None:
        pairs = zip(before, model, strict=True)
        assert all(torch.equal(a.view(torch.int16), b.wo_a.weight.view(torch.int16)) for a, b in pairs)
    twin = report.layers[0].twin_bytes
    return {
        "layers": layers,
        "groups": groups,
        "reclaimed_layers": report.count(mr.State.RECLAIMED),
        "gross_bytes": report.gross_bytes,
        "twin_bytes": report.twin_bytes,
        "net_bytes": report.net_bytes,
        "freed_bytes": {
            "nominal": report.freed.nominal,
            "allocator": report.freed.allocator,
            "device": report.freed.device,
        },
        "peak_extra_bytes": report.peak_extra_bytes,
        "peak_extra_limit_bytes": twin + (4 << 20),
        "reclaim_seconds": reclaimed,
        "restore_seconds": restored,
    }


def main() -> None:
    """Parse arguments, measure, print and store."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--layers", type=int, default=43)
    parser.add_argument("--groups", type=int, nargs="+", default=[2])
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    name = torch.cuda.get_device_name() if options.device == "cuda" else platform.processor() or platform.machine()
    result = {
        "benchmark": "reclaim",
        "date": datetime.now(UTC).date().isoformat(),
        "device": name,
        "versions": {
            "torch": torch.__version__,
            "triton": metadata.version("triton"),
            "python": platform.python_version(),
        },
        "runs": [measure(options.layers, groups, options.device) for groups in options.groups],
    }
    text = json.dumps(result, indent=2)
    if options.json:
        options.json.write_text(text + "\n")
    sys.stdout.write(text + "\n")


if __name__ == "__main__":
    main()
