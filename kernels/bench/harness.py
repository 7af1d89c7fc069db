"""What the bench scripts share: layers, activations, stock kernels, timing in one CUDA graph, bitwise comparison."""

from __future__ import annotations

import importlib
import os
import statistics
import sys
from typing import TYPE_CHECKING, NamedTuple

import torch

from memreclaim_kernels import blocks, cuda

if TYPE_CHECKING:
    from collections.abc import Callable
    from types import ModuleType

LAYERS = 43


class Layer(NamedTuple):
    """A weight and its twin: bf16 ``[G, R, D]``, uint8 codes and exponents."""

    weight: torch.Tensor
    codes: torch.Tensor
    exponents: torch.Tensor


def make_layer(groups: int, seed: int, rank: int = 1024, depth: int = 4096) -> Layer:
    """A layer with random codes (no NaN) and exponent bytes in 115..126, as real checkpoints have."""
    gen = torch.Generator("cuda").manual_seed(seed)
    shape = blocks.WeightShape(groups, rank, depth)
    packed = (groups, rank // blocks.TILE_ROWS, depth // blocks.TILE_COLS, blocks.TILE_BYTES)
    values = torch.randn(packed, generator=gen, device="cuda") * 60
    codes = values.clamp(-448, 448).to(torch.float8_e4m3fn).view(torch.uint8)
    exponents = torch.randint(
        115, 127, (groups, rank // 32, depth // 32), generator=gen, device="cuda", dtype=torch.uint8
    )
    weight = torch.empty(shape, dtype=torch.bfloat16, device="cuda")
    torch.cuda.synchronize()
    cuda.dequantize(codes, exponents, weight)
    torch.cuda.synchronize()
    return Layer(weight, codes, exponents)


def activations(kind: str, rows: int, groups: int, depth: int = 4096, seed: int = 0) -> torch.Tensor:
    """bf16 ``[rows, groups, depth]``, random or adversarial by ``kind`` (see :data:`KINDS`)."""
    gen = torch.Generator("cuda").manual_seed(seed)
    x = torch.randn((rows, groups, depth), generator=gen, device="cuda")
    if kind == "cancel":
        x[..., 1::2] = -x[..., ::2]
    elif kind == "mixed":
        x *= torch.exp2(torch.randint(-40, 40, x.shape, generator=gen, device="cuda").float())
    elif kind == "sparse":
        x *= torch.rand(x.shape, generator=gen, device="cuda") < 0.02  # noqa: PLR2004 - two non-zero terms per k64
    elif kind == "negzero":
        x = torch.full_like(x, -0.0)
    elif kind != "normal":
        x *= KINDS[kind]
    return x.to(torch.bfloat16)


KINDS = {
    "normal": 1.0,
    "large": 2.0**60,
    "tiny": 2.0**-60,
    "subnormal": 2.0**-128,
    "overflow": 2.0**118,
    "cancel": 1.0,
    "mixed": 1.0,
    "sparse": 1.0,
    "negzero": 0.0,
}


def different_bits(a: torch.Tensor, b: torch.Tensor) -> int:
    """How many bf16 elements differ in any bit; two NaN are equal."""
    both_nan = torch.isnan(a) & torch.isnan(b)
    return int(((a.view(torch.int16) != b.view(torch.int16)) & ~both_nan).sum())


def relative_error(out: torch.Tensor, o: torch.Tensor, weight: torch.Tensor) -> float:
    """Norm of the error over norm of the float64 result."""
    expected = torch.einsum("tgd,grd->tgr", o.double(), weight.double())
    return float((out.double() - expected).norm() / expected.norm())


def stock_module() -> ModuleType | None:
    """SGLang's module of ``wo_a`` kernels if it can be imported (``MEMRECLAIM_STOCK`` adds a folder to the path)."""
    folder = os.environ.get("MEMRECLAIM_STOCK")
    if folder:
        sys.path.insert(0, folder)
    try:
        return importlib.import_module("sglang.kernels.ops.gemm.dsv4_wo_a")
    except ImportError:
        return None


def capture(step: Callable[[int], None], layers: int = LAYERS) -> torch.cuda.CUDAGraph:
    """One graph of ``layers`` calls of ``step(layer)``, warmed up."""
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        for layer in range(layers):
            step(layer)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for layer in range(layers):
            step(layer)
    return graph


def time_graphs(graphs: dict[str, torch.cuda.CUDAGraph], layers: int = LAYERS, replays: int = 25) -> dict[str, float]:
    """Median microseconds per layer of each graph, replays interleaved so that all meet the same clocks."""
    samples: dict[str, list[float]] = {name: [] for name in graphs}
    for index in range(replays + 3):
        for name, graph in graphs.items():
            start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            # Two replays queue up, the second is timed: the host's launch cost stays out.
            graph.replay()
            start.record()
            graph.replay()
            end.record()
            end.synchronize()
            if index >= 3:  # noqa: PLR2004 - warm-up
                samples[name].append(start.elapsed_time(end) * 1e3 / layers)
    return {name: statistics.median(values) for name, values in samples.items()}
