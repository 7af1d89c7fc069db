"""The small-batch product whose result the engine wants quantised: e4m3 with ue8m0 scales in FlashInfer's layout.

The engine adds the fp32 partial sums of its 8 K-splits, rounds to bf16, and quantises that. A twin kernel gives the
same bf16 bits, and the engine's own second half is then run on them as on partial sums of which only one is not zero.
"""

from __future__ import annotations

import sys
from functools import cache
from typing import TYPE_CHECKING, Any

import torch

from memreclaim_kernels import ops

if TYPE_CHECKING:
    from collections.abc import Callable

    from memreclaim.twin import Twin
    from memreclaim_kernels.plan import Plan

_KERNEL = "wo_a_bf16_small_batch_mxfp8"
_SPLITS = 8
_V4 = "sglang.srt.models.deepseek_v4"


def serves(plan: Plan) -> bool:
    """Whether ``plan`` gives the bits of the engine's small-batch kernel, and this build has the second half."""
    return plan.order == "splits8" and _halves() is not None


def project(o: torch.Tensor, twin: Twin, plan: Plan) -> Any:  # noqa: ANN401
    """The engine's ``Mxfp8SwizzledInput`` for ``o [T, G, D]``; only when :func:`serves`."""
    halves = _halves()
    assert halves is not None
    result, quantize = halves
    return result(*quantize(as_partials(ops.project(o, twin.packed, twin.exponents, plan))))


def as_partials(y: torch.Tensor) -> torch.Tensor:
    """Partial sums fp32 ``[8, T, G, R]`` that add up to bf16 ``y [T, G, R]`` in any order, signs of zero included."""
    # x + -0.0 is x for every x, while -0.0 + 0.0 would lose the sign.
    partials = torch.full((_SPLITS, *y.shape), -0.0, dtype=torch.float32, device=y.device)
    partials[0] = y
    return partials


@cache
def _halves() -> tuple[Callable[..., Any], Callable[..., Any]] | None:
    """The engine's result class, and its function that adds and quantises partial sums."""
    model = sys.modules.get(_V4)
    kernel, result = getattr(model, _KERNEL, None), getattr(model, "Mxfp8SwizzledInput", None)
    quantize = getattr(sys.modules.get(getattr(kernel, "__module__", "")), "_quantize_partial", None)
    return None if result is None or quantize is None else (result, quantize)
