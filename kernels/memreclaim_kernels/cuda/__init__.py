"""CUDA C++ kernels of the twin, compiled at run time: launch functions, one per kernel family.

Each function writes into tensors the caller made, launches on torch's current stream, allocates nothing on the device
and may be captured in a CUDA graph; :func:`prepare` compiles and loads ahead of a capture. Whether a call is legal is
:func:`supports`'s to say: the launch functions assume it. Nothing is compiled at import.

:func:`gemv`, :func:`small`, :func:`mid` and :func:`large` read codes before the previous kernel of the stream has
ended. A twin must therefore be complete, its proof read back on the host, before the first of them is launched.

Shapes: ``o`` bf16 ``[T, G, D]`` with any row and group stride and last stride 1; ``codes`` and ``exponents`` as in
:mod:`memreclaim_kernels.blocks`; ``out`` bf16 ``[T, G, R]`` contiguous.
"""

from __future__ import annotations

from memreclaim_kernels.cuda._check import family_of, supports, why_not
from memreclaim_kernels.cuda._driver import DriverError
from memreclaim_kernels.cuda._large import large
from memreclaim_kernels.cuda._launch import dequantize, encode, gemv, prepare, prove, small, small_mxfp8
from memreclaim_kernels.cuda._mid import mid
from memreclaim_kernels.cuda._nvrtc import CompileError

__all__ = [
    "CompileError",
    "DriverError",
    "dequantize",
    "encode",
    "family_of",
    "gemv",
    "large",
    "mid",
    "prepare",
    "prove",
    "small",
    "small_mxfp8",
    "supports",
    "why_not",
]
