"""Time the CUDA kernels against the stock path on this GPU, and count differing bits: one JSON file per run.

    MEMRECLAIM_STOCK=<folder that holds sglang> python bench_cuda.py --json results/<date>-<gpu>-cuda.json

43 distinct layers of 1024 x 4096 in one CUDA graph, medians of interleaved replays, microseconds a layer. Stock:
SGLang's kernels at 1..8 rows of two groups when they can be imported, else token-major ``torch.bmm``.
"""

from __future__ import annotations

import argparse
import datetime as dt
import json
import platform
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from harness import (
    LAYERS,
    Layer,
    activations,
    capture,
    different_bits,
    make_layer,
    relative_error,
    stock_module,
    time_graphs,
)

from memreclaim_kernels import blocks, cuda

if TYPE_CHECKING:
    from collections.abc import Callable

    Step = Callable[[torch.Tensor, Layer, torch.Tensor], None]

ROWS = (1, 2, 4, 8, 9, 16, 24, 32, 48, 64, 65, 96, 128, 160, 192, 256, 384, 512, 1024, 2048, 4096, 8192)
ROWS_OTHER_GROUPS = (1, 8, 16, 64, 128, 192, 512)
CHECKED_KINDS = ("normal", "mixed", "cancel", "tiny", "subnormal", "negzero", "overflow")
MAX_SPLITS = 4
_SMALL_ROWS = 8


def bmm(o: torch.Tensor, layer: Layer) -> torch.Tensor:
    """cuBLAS, token-major: the stock path above 8 rows."""
    return torch.bmm(o.transpose(0, 1), layer.weight.transpose(1, 2)).transpose(0, 1)


def chain_step(rows: int, layer: Layer, splits: int) -> tuple[str, Step]:
    """Name and call of the kernel that keeps cuBLAS's order."""
    family = cuda.family_of(rows, blocks.shape_of(layer.codes), splits)
    kernel = cuda.mid if family == "mid" else cuda.large
    return family, lambda o, at, out: kernel(o, at.codes, at.exponents, out, splits)


def count_differences(step: Step, stock: Callable[[torch.Tensor, Layer], torch.Tensor], rows: int, layer: Layer) -> int:
    """Outputs that differ in any bit over every kind of input; outputs are poisoned before."""
    groups, rank, _ = blocks.shape_of(layer.codes)
    wrong = 0
    for seed, kind in enumerate(CHECKED_KINDS if rows <= 1024 else CHECKED_KINDS[:2]):  # noqa: PLR2004 - device time
        o = activations(kind, rows, groups, seed=seed)
        out = torch.full((rows, groups, rank), float("nan"), dtype=torch.bfloat16, device="cuda")
        step(o, layer, out)
        wrong += different_bits(out, stock(o, layer))
    return wrong


def measure(rows: int, layers: list[Layer], sglang: Any) -> list[dict[str, Any]]:  # noqa: ANN401 - a foreign module
    """Every family at one row count against its stock path."""
    groups, rank, _ = blocks.shape_of(layers[0].codes)
    o = activations("normal", rows, groups)
    out = torch.empty((rows, groups, rank), dtype=torch.bfloat16, device="cuda")
    splits = next((n for n in range(1, MAX_SPLITS) if _same_as_bmm(rows, layers[0], n)), 1) if groups == 1 else 1
    family, step = chain_step(rows, layers[0], splits)
    families: dict[str, tuple[Step, str, Callable[[torch.Tensor, Layer], torch.Tensor]]] = {family: (step, "bmm", bmm)}
    if sglang and groups == 2 and rows <= _SMALL_ROWS:  # noqa: PLR2004 - the only shape that SGLang's kernels take
        if rows == 1:
            families["gemv"] = (
                lambda x, at, y: cuda.gemv(x, at.codes, at.exponents, y),
                "sglang",
                lambda x, at: sglang.wo_a_bf16_gemv(x, at.weight),
            )
        else:
            families["small"] = (
                lambda x, at, y: cuda.small(x, at.codes, at.exponents, y),
                "sglang",
                lambda x, at: sglang.wo_a_bf16_small_batch(x, at.weight),
            )
    graphs = {}
    for name, (step, stock_name, stock) in families.items():
        graphs[f"stock:{stock_name}"] = capture(lambda i, stock=stock: stock(o, layers[i]))
        graphs[name] = capture(lambda i, step=step: step(o, layers[i], out))
    times = time_graphs(graphs, replays=15 if rows <= 1024 else 7)  # noqa: PLR2004 - device time
    results = []
    for name, (step, stock_name, stock) in families.items():
        step(o, layers[1], out)
        results.append(
            {
                "groups": groups,
                "rows": rows,
                "family": name,
                "stock": stock_name,
                "splits": splits if stock_name == "bmm" else 8,
                "stock_us": round(times[f"stock:{stock_name}"], 3),
                "us": round(times[name], 3),
                "ratio": round(times[name] / times[f"stock:{stock_name}"], 3),
                "twin_gb_per_s": round(layers[0].codes.numel() / times[name] / 1e3, 1),
                "different_bits": count_differences(step, stock, rows, layers[0]),
                "relative_error": relative_error(out[:64], o[:64], layers[1].weight),
            }
        )
    return results


def _same_as_bmm(rows: int, layer: Layer, splits: int) -> bool:
    _, step = chain_step(rows, layer, splits)
    return count_differences(step, bmm, rows, layer) == 0


def measure_build(layers: list[Layer]) -> dict[str, float]:
    """Dequantise, encode and prove, microseconds a layer, and the bytes a second of dequantisation."""
    codes, exponents = torch.empty_like(layers[0].codes), torch.empty_like(layers[0].exponents)
    result = torch.empty(2, dtype=torch.int64, device="cuda")
    scratch = torch.empty_like(layers[0].weight)
    times = time_graphs(
        {
            "dequantize": capture(lambda i: cuda.dequantize(layers[i].codes, layers[i].exponents, layers[i].weight)),
            "dequantize_one_buffer": capture(lambda i: cuda.dequantize(layers[i].codes, layers[i].exponents, scratch)),
            "encode": capture(lambda i: cuda.encode(layers[i].weight, codes, exponents)),
            "prove": capture(lambda i: cuda.prove(layers[i].codes, layers[i].exponents, layers[i].weight, result)),
        }
    )
    moved = layers[0].codes.numel() * 3 + layers[0].exponents.numel()
    return {name: round(us, 3) for name, us in times.items()} | {
        "dequantize_tb_per_s": round(moved / times["dequantize"] / 1e6, 3)
    }


def main() -> int:
    """Run, print a table, write JSON."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--groups", type=int, nargs="*", default=[2, 1, 4, 8])
    parser.add_argument("--rows", type=int, nargs="*")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    sglang = stock_module()
    report: dict[str, Any] = {
        "schema_version": 1,
        "date": dt.datetime.now(tz=dt.UTC).date().isoformat(),
        "device": torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "python": platform.python_version(),
        "layers": LAYERS,
        "stock_sglang": bool(sglang),
        "results": [],
        "build": {},
    }
    for groups in options.groups:
        layers = [make_layer(groups, seed) for seed in range(LAYERS)]
        report["build"][str(groups)] = measure_build(layers)
        print(groups, report["build"][str(groups)], flush=True)
        for rows in options.rows or (ROWS if groups == 2 else ROWS_OTHER_GROUPS):  # noqa: PLR2004 - the main shape
            found = measure(rows, layers, sglang)
            report["results"] += found
            for line in found:
                print(
                    {
                        k: line[k]
                        for k in ("groups", "rows", "family", "splits", "stock_us", "us", "ratio", "different_bits")
                    },
                    flush=True,
                )
            if options.json:
                options.json.write_text(json.dumps(report, indent=1) + "\n")
        del layers
        torch.cuda.empty_cache()
    return 0


if __name__ == "__main__":
    sys.exit(main())
