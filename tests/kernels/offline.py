"""Compile the Triton kernels for a GPU that is not there: ``python offline.py 90:small 80:mid``; one JSON object each.

Run in a process of its own without the interpreter. Compiling needs only the ptxas that Triton brings.
"""

from __future__ import annotations

import json
import re
import sys
from typing import Any

from triton import compile as compile_kernel
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from memreclaim_kernels import dequant, encode, gemv, mid, prove, small

TWIN = {"codes": "*i32", "exponents": "*u8"}
TILES = {"row_tiles": "i32", "col_tiles": "i32"}
STRIDES = {"tokens": "i32", "row_stride": "i32", "group_stride": "i32"}
CHAIN = {"o": "*bf16", **STRIDES, **TWIN, "out": "*bf16", "groups": "i32", **TILES}
TILE = {"BLOCK_M": 16, "ROWS": 1, "COLS": 4, "STAGES": 3}
KERNELS: dict[str, tuple[Any, dict[str, str], dict[str, int]]] = {
    "gemv": (gemv._gemv_kernel, {"o": "*bf16", "group_stride": "i32", **TWIN, "out": "*bf16", **TILES}, {}),
    "small": (small._small_kernel, CHAIN, {"SPLITS": 1, **TILE}),
    "small_splits": (small._small_kernel, CHAIN, {"SPLITS": 8, **TILE}),
    "mid": (mid._mid_kernel, CHAIN, {"SPLIT_K": 1, **TILE, "BLOCK_M": 32, "ROWS": 2}),
    "mid_wgmma": (mid._mid_kernel, CHAIN, {"SPLIT_K": 1, **TILE, "ROWS": 4}),
    "dequant": (dequant._dequantize_kernel, {**TWIN, "out": "*bf16", **TILES}, {"ROWS": 1, "COLS": 8}),
    "prove": (
        prove._prove_kernel,
        {**TWIN, "weight": "*i16", "count": "*i64", "first": "*u64", **TILES},
        {"ROWS": 1, "COLS": 8},
    ),
    "encode": (encode._encode_kernel, {"weight": "*i16", **TWIN, "codes": "*u8", **TILES}, {"COLS": 4}),
}


def build(name: str, capability: int) -> dict[str, Any]:
    """Compile one kernel and describe what came out."""
    function, signature, constants = KERNELS[name]
    source = ASTSource(
        fn=function, signature={**signature, **dict.fromkeys(constants, "constexpr")}, constexprs=dict(constants)
    )
    options = {"num_warps": 4, "enable_fp_fusion": name != "gemv"}
    built = compile_kernel(source, target=GPUTarget("cuda", capability, 32), options=options)
    layouts = built.asm["ttgir"]
    return {
        "target": capability,
        "kernel": name,
        "shared": built.metadata.shared,
        "flushes": ".ftz" in built.asm["ptx"],
        "fp8": "e4m3" in built.asm["ptx"],
        "operand_width": sorted({int(width) for width in re.findall(r"kWidth = (\d+)", layouts)}),
        "mma": sorted(set(re.findall(r"(?:mma\.sync|wgmma\.mma_async)[\w.]*", built.asm["ptx"]))),
        "fused": len(re.findall(r"fma\.rn\.f32", built.asm["ptx"])),
    }


if __name__ == "__main__":
    for word in sys.argv[1:]:
        target, _, kernel = word.partition(":")
        sys.stdout.write(json.dumps(build(kernel, int(target))) + "\n")
