"""Launch functions: the grid and the argument list of each kernel family."""

from __future__ import annotations

from ctypes import c_int, c_int64, c_void_p
from functools import lru_cache
from typing import TYPE_CHECKING

import torch

from memreclaim_kernels import blocks
from memreclaim_kernels.cuda._check import device_refusal, family_of, shape_refusal
from memreclaim_kernels.cuda._driver import Kernel
from memreclaim_kernels.cuda._large import chain_kernel, tile_for
from memreclaim_kernels.cuda._mid import mid_kernel, ring_for

if TYPE_CHECKING:
    from collections.abc import Iterable

_WARP_BYTES = 8 * 4 * blocks.TILE_BYTES
"""Codes that one block of the prove kernel handles: 8 warps, 4 tiles each; of the dequantise kernel half of it."""


def _device(tensor: torch.Tensor) -> int:
    index = tensor.device.index
    return torch.cuda.current_device() if index is None else index


def _pointer(tensor: torch.Tensor) -> c_void_p:
    return c_void_p(tensor.data_ptr())


@lru_cache(maxsize=64)
def _small_kernel(device: int, depth: int, epilogue: int) -> Kernel:
    row_tiles = 1 + epilogue
    shared = 8 * 8 * (depth // 8 * 2 + 16) + 8 * 8 * 16 * row_tiles * 4
    defines = (("DEPTH", depth), ("EPILOGUE", epilogue))
    return Kernel("small", "small", defines, device, threads=256 * row_tiles, shared=shared)


def small(o: torch.Tensor, codes: torch.Tensor, exponents: torch.Tensor, out: torch.Tensor) -> None:
    """1..8 rows in SGLang's order of sums: 8 splits of K.

    Shapes: ``o [T, G, D]``, ``out [T, G, R]``. Deterministic.
    """
    groups, rank, depth = blocks.shape_of(codes)
    kernel = _small_kernel(_device(o), depth, 0)
    kernel.launch(
        (rank // 16, groups, 1),
        _pointer(o),
        c_int64(o.stride(0)),
        c_int64(o.stride(1)),
        _pointer(codes),
        _pointer(exponents),
        _pointer(out),
        c_void_p(),
        c_int(o.shape[0]),
        c_int(rank),
    )


def small_mxfp8(
    o: torch.Tensor,
    codes: torch.Tensor,
    exponents: torch.Tensor,
    out: torch.Tensor,
    scales: torch.Tensor,
) -> None:
    """1..8 rows like :func:`small`, the bf16 result quantised to e4m3 per 32 columns.

    Shapes: ``o [T, G, D]``, ``out`` e4m3 or uint8 ``[T, G*R]``, ``scales`` uint8 ``[128 * G*R/32]`` in FlashInfer's
    swizzled order, padding rows zeroed here. G*R a multiple of 128. Deterministic.
    """
    groups, rank, depth = blocks.shape_of(codes)
    kernel = _small_kernel(_device(o), depth, 1)
    kernel.launch(
        (rank // 32, groups, 1),
        _pointer(o),
        c_int64(o.stride(0)),
        c_int64(o.stride(1)),
        _pointer(codes),
        _pointer(exponents),
        _pointer(out),
        _pointer(scales),
        c_int(o.shape[0]),
        c_int(rank),
    )


@lru_cache(maxsize=16)
def _gemv_kernel(device: int, depth: int) -> Kernel:
    return Kernel("gemv", "gemv", (("DEPTH", depth),), device, threads=256)


def gemv(o: torch.Tensor, codes: torch.Tensor, exponents: torch.Tensor, out: torch.Tensor) -> None:
    """One row in the order of sums of SGLang's Triton gemv: ``o [1, G, 4096]``, ``out [1, G, R]``. Deterministic."""
    groups, rank, depth = blocks.shape_of(codes)
    _gemv_kernel(_device(o), depth).launch(
        (rank // 16, groups, 1),
        _pointer(o),
        c_int64(o.stride(1)),
        _pointer(codes),
        _pointer(exponents),
        _pointer(out),
        c_int(rank),
    )


@lru_cache(maxsize=16)
def _plain_kernel(device: int, source: str, function: str, threads: int) -> Kernel:
    return Kernel(source, function, (), device, threads=threads, dependent=False)


def dequantize(codes: torch.Tensor, exponents: torch.Tensor, out: torch.Tensor) -> None:
    """The exact bf16 weight ``out [G, R, D]`` (contiguous) of a twin."""
    groups, rank, depth = blocks.shape_of(codes)
    # Never launched early, like prove: it may follow the very encode that wrote its input.
    _plain_kernel(_device(codes), "dequant", "dequant", 256).launch(
        (rank * depth // (_WARP_BYTES // 2), groups, 1),
        _pointer(codes),
        _pointer(exponents),
        _pointer(out),
        c_int(rank),
        c_int(depth),
    )


def prove(codes: torch.Tensor, exponents: torch.Tensor, weight: torch.Tensor, result: torch.Tensor) -> None:
    """Compare a twin with ``weight [G, R, D]`` (bf16, contiguous) bit by bit.

    ``result`` int64 ``[2]``: how many elements differ, and the flat index of the first or -1.
    """
    groups, rank, depth = blocks.shape_of(codes)
    device = _device(codes)
    # Never launched early: it may follow the very encode that wrote its input.
    _plain_kernel(device, "prove", "prove_begin", 1).launch((1, 1, 1), _pointer(result))
    _plain_kernel(device, "prove", "prove", 256).launch(
        (rank * depth // _WARP_BYTES, groups, 1),
        _pointer(codes),
        _pointer(exponents),
        _pointer(weight),
        _pointer(result),
        c_int(rank),
        c_int(depth),
    )


def encode(weight: torch.Tensor, codes: torch.Tensor, exponents: torch.Tensor) -> None:
    """Codes and exponents of ``weight [G, R, D]`` (bf16, contiguous), as the reference's ``encode``."""
    groups, rank, depth = weight.shape
    warps = rank // 32 * (depth // 32)
    _plain_kernel(_device(weight), "encode", "encode", 256).launch(
        (-(-warps // 8), groups, 1),
        _pointer(weight),
        _pointer(codes),
        _pointer(exponents),
        c_int(rank),
        c_int(depth),
    )


def prepare(device: int, shape: blocks.WeightShape, rows: Iterable[int] = (1, 2, 8, 16, 32, 64, 128, 192)) -> None:
    """Compile and load what serves a weight shape, so that no first call does it during a graph capture.

    ``rows``: row counts to be ready for. About a second a kernel the first time, then from the disk cache. No caller
    serves with :func:`small_mxfp8`, so it is left to its first call.
    """
    _small_kernel(device, shape.depth, 0)
    if shape.depth == 4096:  # noqa: PLR2004 - the gemv's order of sums is defined for that depth only
        _gemv_kernel(device, shape.depth)
    for source, function, threads in (
        ("dequant", "dequant", 256),
        ("prove", "prove_begin", 1),
        ("prove", "prove", 256),
        ("encode", "encode", 256),
    ):
        _plain_kernel(device, source, function, threads)
    if device_refusal(device, wgmma=True) or shape_refusal("large", shape):
        return
    for count in rows:
        ring = ring_for(count, shape)
        if ring is not None and family_of(count, shape) == "mid":
            mid_kernel(device, shape.depth, ring, 1)
        else:
            chain_kernel(device, shape.depth, tile_for(count, shape), 1)
