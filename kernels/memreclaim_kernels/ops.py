"""Custom ops of namespace ``memreclaim``: encode, prove, dequantize, grouped_projection, planned_projection.

Each op has a fake, so that ``torch.compile`` and ``FakeTensorMode`` see shapes without running anything. On a CPU they
are :mod:`memreclaim_kernels.reference`; on CUDA the backend that the plan names, imported on the first call. Importing
this module defines the ops and loads neither Triton nor CUDA.

The functions here are the ways in. :func:`project` goes past the dispatcher when nothing is tracing: a call through
``torch.ops`` costs 4.5 us on a 2-core CPU, as much as a decode kernel takes, the direct one under 2 us.
"""

from __future__ import annotations

import os
import threading
from functools import cache
from importlib import import_module
from typing import TYPE_CHECKING, Any, Final

import torch

from memreclaim_kernels import blocks, plan, reference

if TYPE_CHECKING:
    from collections.abc import Callable

    from memreclaim_kernels.plan import Plan

_library: Final[Any] = torch.library.Library("memreclaim", "DEF")  # type: ignore[no-untyped-call]
_library.define("encode(Tensor weight) -> (Tensor, Tensor)")
_library.define("prove(Tensor codes, Tensor exponents, Tensor weight) -> Tensor")
_library.define("dequantize(Tensor codes, Tensor exponents) -> Tensor")
_library.define("grouped_projection(Tensor o, Tensor codes, Tensor exponents, str plan) -> Tensor")
_library.define(
    "planned_projection(Tensor o, Tensor codes, Tensor exponents, str phase, str numerics, str stock) -> Tensor"
)


def encode(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Codes and smallest exponents of a contiguous bf16 weight; exact only if :func:`prove` says so.

    Shapes: bf16 ``[G, R, D]`` -> uint8 ``[G, R/16, D/32, 512]``, uint8 ``[G, R/32, D/32]``; R and D multiples of 32.
    """
    codes, exponents = torch.ops.memreclaim.encode.default(weight)
    return codes, exponents


def prove(codes: torch.Tensor, exponents: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """Compare decoded bits with a contiguous bf16 weight ``[G, R, D]``.

    Returns int64 ``[2]`` on the weight's device: how many elements differ, and the flat index of the first or -1.
    """
    verdict: torch.Tensor = torch.ops.memreclaim.prove.default(codes, exponents, weight)
    return verdict


def dequantize(codes: torch.Tensor, exponents: torch.Tensor) -> torch.Tensor:
    """The exact bf16 weight ``[G, R, D]``, a new tensor on each call."""
    weight: torch.Tensor = torch.ops.memreclaim.dequantize.default(codes, exponents)
    return weight


def grouped_projection(o: torch.Tensor, codes: torch.Tensor, exponents: torch.Tensor, path: str) -> torch.Tensor:
    """``out[t, g, r] = sum_d o[t, g, d] * weight[g, r, d]`` by the plan that ``path`` names, through the dispatcher.

    Shapes: bf16 ``[T, G, D]`` (last stride 1, any row stride and group stride), twin -> bf16 ``[T, G, R]``, contiguous.
    ``path`` is a ``Plan.key``, or a bare path (``"dequant"``, ``"small"``) for that family's default on this device.
    Raises ``ValueError`` for operands or plans that do not fit.
    """
    out: torch.Tensor = torch.ops.memreclaim.grouped_projection.default(o, codes, exponents, path)
    return out


def project(o: torch.Tensor, codes: torch.Tensor, exponents: torch.Tensor, chosen: Plan) -> torch.Tensor:
    """:func:`grouped_projection` for a :class:`Plan`, past the dispatcher when nothing is traced or intercepted."""
    if type(o) is not torch.Tensor or torch.compiler.is_compiling() or torch._C._len_torch_dispatch_stack():
        return grouped_projection(o, codes, exponents, chosen.key)
    return _grouped_projection(o, codes, exponents, chosen.key)


def planned_projection(
    o: torch.Tensor, codes: torch.Tensor, exponents: torch.Tensor, phase: str, numerics: str, stock: str
) -> torch.Tensor:
    """:func:`grouped_projection` by a plan that is chosen when it runs: one operator in a traced graph."""
    out: torch.Tensor = torch.ops.memreclaim.planned_projection.default(o, codes, exponents, phase, numerics, stock)
    return out


def plan_for(
    o: torch.Tensor,
    codes: torch.Tensor,
    *,
    phase: plan.Phase = "decode",
    numerics: plan.Numerics = "identical",
    stock: plan.Stock = "bmm",
) -> Plan:
    """The plan that :func:`plan.select` gives for these operands."""
    groups, row_tiles, col_tiles, _ = codes.shape
    return plan.select(
        o.size(0),
        groups,
        row_tiles * blocks.TILE_ROWS,
        col_tiles * blocks.TILE_COLS,
        device=plan.device_of(codes.device),
        phase=phase,
        numerics=numerics,
        stock=stock,
    )


def check_operands(o: torch.Tensor, codes: torch.Tensor, exponents: torch.Tensor) -> None:
    """Refuse operands that no kernel takes, with ``ValueError`` naming what is wrong."""
    # Unpacked shapes and few attributes: each attribute of a tensor costs 0.2 us, and this runs on every eager call.
    groups, row_tiles, col_tiles, _ = codes.shape
    depth = col_tiles * blocks.TILE_COLS
    if o.dtype is not torch.bfloat16 or o.dim() != 3 or o.size(1) != groups or o.size(2) != depth:  # noqa: PLR2004
        message = f"activations must be bfloat16 [T, {groups}, {depth}], not {o.dtype} {tuple(o.shape)}"
        raise ValueError(message)
    if o.stride(2) != 1:
        message = f"activations must have a last stride of 1, not {o.stride()}"
        raise ValueError(message)
    if exponents.shape != (groups, row_tiles // 2, col_tiles):
        message = f"exponents of shape {tuple(exponents.shape)} do not fit codes for {tuple(blocks.shape_of(codes))}"
        raise ValueError(message)
    device = o.device
    if codes.device != device or exponents.device != device:
        message = f"activations are on {device}, the twin on {codes.device} and {exponents.device}"
        raise ValueError(message)


def _grouped_projection(o: torch.Tensor, codes: torch.Tensor, exponents: torch.Tensor, key: str) -> torch.Tensor:
    check_operands(o, codes, exponents)
    if o.size(0) == 0:
        return o.new_empty((0, *blocks.shape_of(codes)[:2]))
    chosen, launch = _resolve(key, o.device)
    return launch(o, codes, exponents, chosen)


def _planned_projection(
    o: torch.Tensor,
    codes: torch.Tensor,
    exponents: torch.Tensor,
    phase: plan.Phase,
    numerics: plan.Numerics,
    stock: plan.Stock,
) -> torch.Tensor:
    chosen = plan_for(o, codes, phase=phase, numerics=numerics, stock=stock)
    return _grouped_projection(o, codes, exponents, chosen.key)


@cache
def _resolve(key: str, device: torch.device) -> tuple[Plan, Callable[..., torch.Tensor]]:
    """Plan and launcher of a key. Raises ``ValueError`` for a plan that this device cannot run."""
    chosen = plan.parse(key) if ":" in key else plan.default(key, plan.device_of(device))
    if chosen.path == "dequant":
        return chosen, _dequantize_and_multiply
    if device.type != "cuda" and not is_interpreted():
        message = f"plan {key} needs a CUDA device, not {device}"
        raise ValueError(message)
    family = {"cuda": "native", "triton": "mid" if chosen.path == "large" else chosen.path}.get(chosen.backend)
    if family is None or chosen.path == "empty":
        message = f"plan {key} has no kernel"
        raise ValueError(message)
    return chosen, import_module(f"memreclaim_kernels.{family}").launch


def is_interpreted() -> bool:
    """Whether Triton kernels run in Triton's interpreter, on CPU tensors."""
    return os.environ.get("TRITON_INTERPRET") == "1"


def _dequantize_and_multiply(
    o: torch.Tensor, codes: torch.Tensor, exponents: torch.Tensor, _plan: Plan
) -> torch.Tensor:
    """Stock path on a bf16 copy of this call's own: a scratch shared between streams raced in the field.

    ``einsum`` gives a transposed view; the copy to token-major order is what its readers make of it anyway.
    """
    return reference.grouped_projection(o, dequantize(codes, exponents)).contiguous()


def _encode_cuda(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    codes, exponents = _backend_function(weight, "encode")(weight)
    return codes, exponents


def _prove_cuda(codes: torch.Tensor, exponents: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    verdict: torch.Tensor = _backend_function(weight, "prove")(codes, exponents, weight)
    return verdict


def _dequantize_cuda(codes: torch.Tensor, exponents: torch.Tensor) -> torch.Tensor:
    weight: torch.Tensor = _backend_function(codes, "dequantize")(codes, exponents)
    return weight


_first_use = threading.RLock()
_in_check: Final = threading.local()


def _backend_function(tensor: torch.Tensor, name: str) -> Callable[..., Any]:
    """``encode``, ``prove`` or ``dequantize`` of the backend that serves a device, checked before its first use."""
    device = plan.device_of(tensor.device)
    # The check itself comes through here; other threads wait until it is over.
    if device not in plan.checked and not getattr(_in_check, "active", False):
        with _first_use:
            if device not in plan.checked:
                _in_check.active = True
                try:
                    import_module("memreclaim_kernels.selfcheck").check_backend(tensor.device)
                finally:
                    _in_check.active = False
                plan.checked.add(device)
    return _function(plan.backend_for(device), name)


@cache
def _function(backend: plan.Backend, name: str) -> Callable[..., Any]:
    module = {"cuda": "native", "triton": _TRITON_MODULES[name], "reference": "reference"}[backend]
    function: Callable[..., Any] = getattr(import_module(f"memreclaim_kernels.{module}"), name)
    return function


_TRITON_MODULES: Final = {"encode": "encode", "prove": "prove", "dequantize": "dequant"}


def _encode_fake(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    groups, rank, depth = weight.shape
    codes = (groups, rank // blocks.TILE_ROWS, depth // blocks.TILE_COLS, blocks.TILE_BYTES)
    exponents = (groups, rank // blocks.BLOCK, depth // blocks.BLOCK)
    return weight.new_empty(codes, dtype=torch.uint8), weight.new_empty(exponents, dtype=torch.uint8)


def _prove_fake(_codes: torch.Tensor, _exponents: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return weight.new_empty(2, dtype=torch.int64)


def _dequantize_fake(codes: torch.Tensor, _exponents: torch.Tensor) -> torch.Tensor:
    return codes.new_empty(blocks.shape_of(codes), dtype=torch.bfloat16)


def _planned_projection_fake(
    o: torch.Tensor, codes: torch.Tensor, exponents: torch.Tensor, _phase: str, _numerics: str, _stock: str
) -> torch.Tensor:
    return _grouped_projection_fake(o, codes, exponents, "")


def _grouped_projection_fake(o: torch.Tensor, codes: torch.Tensor, exponents: torch.Tensor, _key: str) -> torch.Tensor:
    check_operands(o, codes, exponents)
    groups, rank, _ = blocks.shape_of(codes)
    return o.new_empty((o.shape[0], groups, rank))


for _name, _cpu, _gpu, _fake in (
    ("encode", reference.encode, _encode_cuda, _encode_fake),
    ("prove", reference.prove, _prove_cuda, _prove_fake),
    ("dequantize", reference.dequantize, _dequantize_cuda, _dequantize_fake),
    ("grouped_projection", _grouped_projection, _grouped_projection, _grouped_projection_fake),
    ("planned_projection", _planned_projection, _planned_projection, _planned_projection_fake),
):
    _library.impl(_name, _cpu, "CPU")
    _library.impl(_name, _gpu, "CUDA")
    torch.library.register_fake(f"memreclaim::{_name}", _fake, lib=_library)
