"""The self-check at start-up: each reader of each layer, with the bf16 weight and with a tag, before any drop.

Bits are compared for one row count of each bucket and each phase. A reader whose result differs in one bit makes its
layer ``kept(unknown_reader)``; a GPU kernel was compared with the stock path on its own before, so this looks at the
way there.
"""

from __future__ import annotations

import sys
from functools import cache, partial
from typing import TYPE_CHECKING, Any

import torch

from memreclaim import discover, events, serve
from memreclaim.backing import Backing
from memreclaim.engines.sglang import dispatch, hooks
from memreclaim.states import Reason
from memreclaim.tag import make_tag
from memreclaim_kernels import plan, selfcheck
from memreclaim_kernels.blocks import WeightShape

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping

    from torch import nn

    from memreclaim.agree import Check
    from memreclaim.discover import Candidate
    from memreclaim.twin import Twin
    from memreclaim_kernels.plan import Phase, Stock

_V4, _, _NAME = hooks.DISPATCH.rpartition(".")
_ROWS = (1, 2, 8, 9, 192, 193)
"""One row count of each of the engine's buckets: gemv, small batch (both ends), mid (both ends), more."""
_STOCK_SHAPE = (2, 1024, 4096)
"""The only weight shape that the engine's own kernels take."""
_MOST_SMALL_ROWS = 8
_OTHER_PHASES: tuple[Phase, ...] = ("verify", "draft")
_DECODE, _VERIFY, _PREFILL = {"is_decode": True}, {"is_decode": False, "is_target_verify": True}, {"is_decode": False}


def check_for(model: nn.Module) -> Check:
    """The check of one model's layers, as :class:`memreclaim.agree.Terms` takes it."""

    def check(candidate: Candidate, twin: Twin) -> Reason | None:
        attention = model.get_submodule(candidate.name.rpartition(".")[0])
        weight = candidate.sites[0].get()
        _verify_kernels(twin.shape, weight.device)
        tag = make_tag(Backing(candidate.name, twin, _Nowhere()), weight)
        views = [one.detach().view(tuple(twin.shape)) for one in (weight, tag)]
        compared = []
        for where, read in _readers(attention):
            for rows in _ROWS:
                o = _activations(rows, tuple(twin.shape), weight.device)
                compared.append((where, rows, _differ(read(o, views[0]), read(o, views[1]))))
        # One synchronisation with the device for a layer's 18 comparisons.
        verdicts = torch.stack([differs for *_, differs in compared]).tolist() if compared else []
        for (where, rows, _), differs in zip(compared, verdicts, strict=True):
            if differs:
                events.emit("warning", "reader_differed", layer=candidate.name, reader=where, rows=rows)
                return Reason.UNKNOWN_READER
        return None

    return check


class _Nowhere:
    """Home of a tag that never stands in a model."""

    def move_in(self, backing: Backing, dense: torch.Tensor) -> bool:
        """A reader wrote into the weight: it is none that can be served."""
        message = f"{backing.layer}: a reader wrote {tuple(dense.shape)}"
        raise RuntimeError(message)

    def current(self) -> torch.Tensor:
        """Nothing stands there."""
        raise RuntimeError


def _readers(attention: nn.Module) -> Iterator[tuple[str, Callable[[torch.Tensor, torch.Tensor], Any]]]:
    """Each way in which a layer reads its weight, as a function of activations and weight."""
    if getattr(attention, "use_mega_attention", False):
        return
    if getattr(attention, "_use_fast_kernel", True) is False:
        yield "einsum in float32", lambda o, w: torch.einsum("bgd,grd->bgr", o.float(), w.float())
        return
    module = sys.modules[type(attention).__module__]
    live = getattr(module, _NAME, None)
    if live is None:  # a draft of an older line, with an einsum of its own
        yield "einsum", lambda o, w: torch.einsum("bgd,grd->bgr", o, w)
        return
    fast = {"fast_path": bool(attention.is_dsv41)} if hasattr(attention, "is_dsv41") else {}
    takes = set(dispatch.parameters_of(live))
    for flags in (_DECODE, _VERIFY, _PREFILL | {"is_prefill": True}):
        keywords = {name: value for name, value in {**flags, **fast}.items() if name in takes}
        phase = dispatch.phase_of_call((), keywords)
        yield f"{_NAME} in {phase.value}", partial(_call, live, keywords)


def _call(function: Callable[..., Any], keywords: dict[str, Any], o: torch.Tensor, weight: torch.Tensor) -> Any:  # noqa: ANN401
    return function(o, weight, **keywords)


@cache
def _activations(rows: int, shape: tuple[int, ...], device: torch.device) -> torch.Tensor:
    """bf16 ``[rows, G, D]``, the same for every layer of a shape."""
    generator = torch.Generator().manual_seed(rows)
    return torch.randn((rows, shape[0], shape[2]), generator=generator).to(device, torch.bfloat16)


def _differ(stock: torch.Tensor, ours: torch.Tensor) -> torch.Tensor:
    """Whether any bit differs: bool scalar on the device, nothing is synchronised."""
    if stock.dtype != ours.dtype or stock.shape != ours.shape:
        return torch.ones((), dtype=torch.bool, device=stock.device)
    integers = {2: torch.int16, 4: torch.int32}[stock.element_size()]
    return (stock.contiguous().view(integers) != ours.contiguous().view(integers)).any()


def judge_kernels(model: nn.Module, targets: Iterable[str], refused: Mapping[str, Reason]) -> None:
    """Compare the kernels of every weight that may be dropped; done before ranks compare what they found."""
    for candidate in discover.discover(model, targets):
        if candidate.refusal is None and candidate.name not in refused:
            weight = candidate.sites[0].get()
            depth = weight.shape[-1]
            shape = WeightShape(candidate.groups, weight.numel() // depth // candidate.groups, depth)
            _verify_kernels(shape, weight.device)


@cache
def _verify_kernels(shape: WeightShape, device: torch.device) -> None:
    """Let kernels serve, after comparing them on this device: with cuBLAS, and with the engine's own two kernels.

    The pool is not sized yet, so the 50 MB that the comparison takes are there.
    """
    serve.verify_kernels(shape, device, "identical")
    gemv, small = _small_kernels()
    if device.type != "cuda" or gemv is None or small is None or tuple(shape) != _STOCK_SHAPE:
        return

    def stock_path(o: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        # Its kernels take whole rows only; what the dispatch does not hand them is cuBLAS's, which was compared above.
        o = o.contiguous() if o.shape[0] == 1 else o
        result: torch.Tensor = gemv(o, weight) if o.shape[0] == 1 else small(o, weight)
        return result

    about = plan.device_of(device)
    found = selfcheck.check(
        shape, device, phase="decode", stock="sglang", stock_path=stock_path, max_rows=_MOST_SMALL_ROWS
    )
    # The engine's kernels do not know the phase: what was found for one holds for the others.
    for bucket in found:
        for kernel, verdict in bucket.verdicts:
            for phase in _OTHER_PHASES:
                against = plan.compared_with(phase, "sglang")
                plan.record(kernel, bucket.rows[1], shape, about, verdict, against=against)


def _small_kernels() -> tuple[Any, Any]:
    """The engine's own kernels for one row and for up to 8, None on a line without them."""
    module = sys.modules.get(_V4)
    return getattr(module, "wo_a_bf16_gemv", None), getattr(module, "wo_a_bf16_small_batch", None)


def stock() -> Stock:
    """Whose bits small batches keep in this engine: its own two kernels', or cuBLAS's on a line without them."""
    return "bmm" if None in _small_kernels() else "sglang"


def forget() -> None:
    """Let go of the activations, 7 MB of them at two groups."""
    _activations.cache_clear()
