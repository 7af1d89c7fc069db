"""The swap as a transaction: the very same bf16 parameters, or proven tags, whatever is raised in between."""

from __future__ import annotations

import gc
import threading
import weakref
from typing import TYPE_CHECKING, Any

import pytest
import torch
from core.models import Attention, Stack, Weighted, drop, exact_weight, reclaimed, reclaimer, same_bits, stack
from torch import nn

import memreclaim as mr
from memreclaim import proof, swap

if TYPE_CHECKING:
    from collections.abc import Callable

pytestmark = pytest.mark.cpu

STEPS = (
    "make_tag",
    "_put",
    "_synchronize",
    "_wait_for_sole_ownership",
    "proof.demand",
    "StorageWeakRef",
    "_rebuilders",
)


def fail_once(monkeypatch: pytest.MonkeyPatch, step: str, error: type[BaseException]) -> None:
    """Have one callee of the swap raise the next time, after it did its work if it puts things in place."""
    holder: Any = proof if step.startswith("proof.") else swap
    name = step.removeprefix("proof.")
    real, calls = getattr(holder, name), []

    def failing(*args: Any, **kwargs: Any) -> Any:
        calls.append(name)
        if len(calls) == 1:
            if name == "_put":
                real(*args, **kwargs)
            raise error
        return real(*args, **kwargs)

    monkeypatch.setattr(holder, name, failing)


@pytest.mark.parametrize("mode", ["on", "twin"])
@pytest.mark.parametrize("error", [RuntimeError, MemoryError, KeyboardInterrupt])
@pytest.mark.parametrize("step", STEPS)
def test_a_failure_at_any_step_puts_the_same_parameters_back(
    monkeypatch: pytest.MonkeyPatch, step: str, error: type[BaseException], mode: str
) -> None:
    """Case 33: a layer that failed has its own objects again, and the ledger agrees."""
    if mode == "twin" and step in ("StorageWeakRef", "_rebuilders"):
        pytest.skip("nothing is released in twin mode")
    model, rec = stack(2), reclaimer(mode)
    first, second = (layer.wo_a.weight for layer in model.layers)
    expected = second.detach().clone()
    ids = id(first), id(second)
    del first, second
    fail_once(monkeypatch, step, error)
    with pytest.raises(error):
        rec.reclaim(model)
    assert (id(model.layers[0].wo_a.weight), id(model.layers[1].wo_a.weight)) == ids
    assert type(model.layers[0].wo_a.weight) is nn.Parameter
    rec.check_integrity()
    assert sum(layer.gross_bytes for layer in rec.ledger.layers()) == 0
    gc.collect()  # the error's traceback holds the parameters
    report = rec.reclaim(model)
    rec.check_integrity()
    assert [layer.state.value for layer in report.layers] == ["reclaimed" if mode == "on" else "proven"] * 2
    assert same_bits(model.layers[1].wo_a.weight.clone(), expected)


def test_interrupt_between_two_layers() -> None:
    """Case 33: an interrupt between two layers leaves one reclaimed, one in bf16, and a ledger that says so."""
    model, rec = stack(2), reclaimer()
    real, calls = mr.build_twin, []

    def interrupted(weight: torch.Tensor, **kwargs: int) -> mr.Twin:
        calls.append(1)
        if len(calls) == 2:
            raise KeyboardInterrupt
        return real(weight, **kwargs)

    with pytest.MonkeyPatch.context() as patch, pytest.raises(KeyboardInterrupt):  # noqa: PT012
        patch.setattr("memreclaim.reclaimer.build_twin", interrupted)
        rec.reclaim(model)
    rec.check_integrity()
    assert [mr.is_tag(layer.wo_a.weight) for layer in model.layers] == [True, False]
    assert [layer.state.value for layer in rec.ledger.layers()] == ["reclaimed", "found"]
    assert rec.reclaim(model).count(mr.State.RECLAIMED) == 2


class Holder:
    """Somebody who keeps what he is given."""

    def __init__(self, kept: object) -> None:
        """Keep it."""
        self.kept = kept


HOLDERS: dict[str, Callable[[nn.Parameter], object]] = {
    "the parameter in a list": lambda w: [w],
    "a detached alias": lambda w: w.detach(),
    "a view": lambda w: w.view(2, -1, w.shape[1]),
    "one row": lambda w: w.data[5],
    "a closure": lambda w: lambda: w,
    "an attribute": lambda w: Holder(w.data),
    "the storage": lambda w: w.untyped_storage(),
    "numpy": lambda w: w.detach().view(torch.int16).numpy(),
    "an autograd graph": lambda w: (torch.ones(96, dtype=torch.bfloat16, requires_grad=True) * w).sum(),
    "a DLPack capsule": lambda w: w.detach().__dlpack__(),
    "a graph of objects": lambda w: Holder(Holder({"cache": (w.data,)})),
}


@pytest.fixture
def no_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    """Do not wait for readers that will not finish."""
    monkeypatch.setattr(swap, "DRAIN_SECONDS", 0.0)


@pytest.mark.usefixtures("no_wait")
@pytest.mark.parametrize("holder", HOLDERS)
def test_any_other_holder_keeps_the_layer(holder: str) -> None:
    """Case 22: whoever else holds the bytes, in Python or in C++, nothing is dropped and nothing claimed."""
    model, rec = stack(1), reclaimer()
    kept = HOLDERS[holder](model.layers[0].wo_a.weight)
    report = rec.reclaim(model)
    assert [(layer.state, layer.reason) for layer in report.layers] == [(mr.State.KEPT, mr.Reason.SHARED_STORAGE)]
    assert (report.gross_bytes, report.twin_bytes, report.freed.nominal) == (0, 0, 0)
    assert not mr.is_tag(model.layers[0].wo_a.weight)
    rec.check_integrity()
    del kept
    gc.collect()
    assert rec.reclaim(model).count(mr.State.RECLAIMED) == 1


def test_a_cycle_of_garbage_is_no_holder() -> None:
    """Case 22: loader temporaries in an unreachable cycle are collected first."""
    model = stack(1)
    loop: list[Any] = [model.layers[0].wo_a.weight]
    loop.append(loop)
    del loop
    assert reclaimer().reclaim(model).count(mr.State.RECLAIMED) == 1


def test_a_bf16_copy_elsewhere_is_no_holder() -> None:
    """Case 22: a real copy has bytes of its own."""
    model = stack(1)
    cached = model.layers[0].wo_a.weight.detach().clone()
    assert reclaimer().reclaim(model).count(mr.State.RECLAIMED) == 1
    assert same_bits(model.layers[0].wo_a.weight.clone(), cached)


def tied_modules() -> Stack:
    """Two layers that share the module."""
    model = stack(2)
    model.layers[1].wo_a = model.layers[0].wo_a
    return model


def tied_parameters() -> Stack:
    """Two modules that share the parameter object."""
    model = stack(2)
    model.layers[1].wo_a.weight = model.layers[0].wo_a.weight
    return model


def tied_storage() -> Stack:
    """Two parameter objects over the same bytes."""
    model = stack(2)
    model.layers[1].wo_a.weight = nn.Parameter(model.layers[0].wo_a.weight.data, requires_grad=False)
    return model


@pytest.mark.parametrize("tie", [tied_modules, tied_parameters, tied_storage])
def test_a_tied_weight_is_dropped_once_and_served_twice(tie: Callable[[], Stack]) -> None:
    """Case 21: a weight of two layers is one report line; both are served, written and restored."""
    model, rec = tie(), reclaimer()
    expected = model.layers[0].wo_a.weight.detach().clone()
    same_object = model.layers[0].wo_a.weight is model.layers[1].wo_a.weight
    report = rec.reclaim(model)
    assert (len(report.layers), report.gross_bytes) == (1, expected.nbytes)
    assert all(mr.is_tag(layer.wo_a.weight) for layer in model.layers)
    assert (model.layers[0].wo_a.weight is model.layers[1].wo_a.weight) == same_object
    assert all(same_bits(layer.wo_a.weight.clone(), expected) for layer in model.layers)
    rec.check_integrity()
    model.layers[1].wo_a.weight.fill_(1.0)
    assert not any(mr.is_tag(layer.wo_a.weight) for layer in model.layers)
    assert all(bool((layer.wo_a.weight == 1).all()) for layer in model.layers)
    rec.check_integrity()
    assert rec.reclaim(model).count(mr.State.RECLAIMED) == 1
    rec.restore(model)
    storages = {layer.wo_a.weight.untyped_storage().data_ptr() for layer in model.layers}
    assert len(storages) == 1


def test_a_weight_tied_to_something_else_is_served_there_too() -> None:
    """Case 21: a place that is no target but holds the same parameter gets the tag as well."""
    model = stack(1)
    model.extra = Weighted(model.layers[0].wo_a.weight)
    expected = model.extra.weight.detach().clone()
    assert reclaimer().reclaim(model).count(mr.State.RECLAIMED) == 1
    assert (mr.is_tag(model.extra.weight), same_bits(model.extra.weight.clone(), expected)) == (True, True)


@pytest.mark.parametrize("start", [0, 1])
def test_a_part_of_a_larger_buffer_is_kept(start: int) -> None:
    """Case 22: dropping a slice of a buffer frees nothing."""
    flat = torch.cat([exact_weight(seed=i) for i in range(2)])
    model = Stack(Attention(flat[start * 128 : (start + 1) * 128]))
    report = reclaimer().reclaim(model)
    assert [(layer.reason, layer.gross_bytes) for layer in report.layers] == [(mr.Reason.SHARED_STORAGE, 0)]


def test_the_storage_is_gone_after_a_drop() -> None:
    """Case 24: the parameter object and its storage are really freed."""
    layer = Attention(exact_weight())
    parameter = weakref.ref(layer.wo_a.weight)
    watch = swap.StorageWeakRef(layer.wo_a.weight.untyped_storage())
    drop(layer)
    assert (parameter(), watch.expired()) == (None, True)


def test_a_write_between_proof_and_release_is_never_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    """Case 28: somebody who got hold of the weight and writes it after the first proof is never lost."""
    model, rec = stack(1), reclaimer()
    real = swap._put
    weight = weakref.ref(model.layers[0].wo_a.weight)
    wrote = []

    def put_then_write(*args: Any) -> None:
        real(*args)
        if not wrote:
            wrote.append(1)
            writer = threading.Thread(target=lambda: weight().data.view(-1)[7].fill_(1.5))
            writer.start()
            writer.join()

    monkeypatch.setattr(swap, "_put", put_then_write)
    rec.reclaim(model)
    rec.check_integrity()
    assert float(model.layers[0].wo_a.weight.clone().view(-1)[7]) == 1.5


def test_a_reader_that_takes_the_weight_during_the_release(monkeypatch: pytest.MonkeyPatch) -> None:
    """Case 22: a reference that appears after the ownership check gets the storage back alive, unclaimed."""
    model, rec = stack(1), reclaimer()
    expected = model.layers[0].wo_a.weight.detach().clone()
    model.layers[0].wo_a.weight.loader = "kept"
    real, grabbed = swap._rebuilders, []

    def grab(held: list[nn.Parameter]) -> Any:
        grabbed.append(held[0].data)
        return real(held)

    monkeypatch.setattr(swap, "_rebuilders", grab)
    report = rec.reclaim(model)
    weight = model.layers[0].wo_a.weight
    assert [(layer.reason, layer.gross_bytes) for layer in report.layers] == [(mr.Reason.SHARED_STORAGE, 0)]
    assert (type(weight), weight.loader, weight.requires_grad) == (nn.Parameter, "kept", False)
    assert weight.data_ptr() == grabbed[0].data_ptr()
    grabbed[0].fill_(3.0)
    assert not same_bits(weight, expected)
    assert bool((weight == 3).all())
    rec.check_integrity()


def test_tags_that_escaped_a_failed_swap_follow_the_model(monkeypatch: pytest.MonkeyPatch) -> None:
    """Case 28: a view taken of a tag whose swap then failed reads and writes the parameter that is there."""
    model, rec = stack(1), reclaimer()
    escaped = []
    monkeypatch.setattr(swap, "_synchronize", lambda _: escaped.append(model.layers[0].wo_a.weight[3]))
    monkeypatch.setattr(proof, "demand", lambda *_: (_ for _ in ()).throw(RuntimeError("no")))
    with pytest.raises(RuntimeError, match="no"):
        rec.reclaim(model)
    weight = model.layers[0].wo_a.weight
    assert not mr.is_tag(escaped[0])
    escaped[0].fill_(2.0)
    assert bool((weight[3] == 2).all())
    weight.data[3] = 4.0
    assert bool((escaped[0] == 4).all())


class EngineParameter(nn.Parameter):
    """A parameter class of an engine's own."""

    def weight_loader(self) -> str:
        """A method."""
        return "loader"


@pytest.mark.parametrize("trains", [False, True])
def test_class_attributes_and_name_survive(trains: bool) -> None:
    """Case 20: class checks, methods, attributes, ``requires_grad`` and names are the weight's, tagged and restored."""
    weight = EngineParameter(exact_weight(), requires_grad=trains)
    weight.output_dim = 0
    model, rec = Stack(Attention(weight)), reclaimer()
    del weight
    names = [name for name, _ in model.named_parameters()]
    rec.reclaim(model)
    tag = model.layers[0].wo_a.weight
    tag.added = 1
    assert isinstance(tag, EngineParameter)
    assert (tag.weight_loader(), tag.output_dim, tag.requires_grad) == ("loader", 0, trains)
    assert [name for name, _ in model.named_parameters()] == names
    assert (tag.shape, tag.dtype, tag.device, tag.stride(), tag.is_leaf) == (
        (128, 96), torch.bfloat16, torch.device("cpu"), (0, 0), True,
    )  # fmt: skip
    rec.restore(model)
    back = model.layers[0].wo_a.weight
    assert (type(back), back.output_dim, back.added, back.requires_grad) == (EngineParameter, 0, 1, trains)
    assert [name for name in vars(back) if "memreclaim" in name] == []
    assert model.layers[0].wo_a._state_dict_hooks == {}


@pytest.mark.parametrize("inference", [False, True])
def test_reclaim_in_inference_mode_and_use_outside(inference: bool) -> None:
    """Cases 19, 20: what is swapped in inference mode serves, is written and is trained outside of it."""
    with torch.inference_mode(inference):
        layer = reclaimed(exact_weight())
    o = torch.ones((3, 2, 96), dtype=torch.bfloat16, requires_grad=True)
    layer(o).sum().backward()
    assert o.grad is not None
    layer.wo_a.weight.fill_(1.0)
    layer.wo_a.weight.add_(1.0)
    assert bool((layer.wo_a.weight == 2).all())
    assert not layer.wo_a.weight.is_inference()


def test_a_stale_tag_follows_the_model_through_two_lives() -> None:
    """Case 27: a view cached before a restore reads the parameter, and the new twin after the next reclaim."""
    model, rec = stack(1), reclaimer()
    rec.reclaim(model)
    cached = model.layers[0].wo_a.weight.view(2, 64, 96)
    row = cached[1, 5]
    rec.restore(model)
    assert not mr.is_tag(cached)
    other = exact_weight(seed=9)
    model.load_state_dict({"layers.0.wo_a.weight": other})
    assert same_bits(row.clone(), other[64 + 5])
    rec.reclaim(model)
    assert mr.is_tag(cached)
    assert mr.twin_of(cached) is mr.twin_of(model.layers[0].wo_a.weight)
    assert same_bits(cached.clone(), other.view(2, 64, 96))
    row.zero_()
    assert not mr.is_tag(model.layers[0].wo_a.weight)
    assert not bool(model.layers[0].wo_a.weight[69].count_nonzero())
    rec.check_integrity()


def test_no_memory_for_a_restore_leaves_the_twin_serving(monkeypatch: pytest.MonkeyPatch) -> None:
    """Case 27: when the bf16 bytes cannot be had, the error is raised and the layer is served as before."""
    model, rec = stack(1), reclaimer()
    expected = model.layers[0].wo_a.weight.detach().clone()
    rec.reclaim(model)
    with monkeypatch.context() as patch, pytest.raises(MemoryError):  # noqa: PT012
        patch.setattr(mr.Twin, "dequantize", lambda _: (_ for _ in ()).throw(MemoryError))
        model.layers[0].wo_a.weight.fill_(0)
    assert mr.is_tag(model.layers[0].wo_a.weight)
    assert same_bits(model.layers[0].wo_a.weight.clone(), expected)
    rec.check_integrity()


# Tags whose place in the model was taken


@pytest.mark.parametrize("place", ["replaced", "deleted"])
def test_a_write_to_a_tag_out_of_the_model_stays_there(place: str) -> None:
    """Case 19: a tag taken out of its place owns its weight once written; what took its place is untouched."""
    layer, newer = reclaimed(exact_weight()), exact_weight(seed=9)
    tag = layer.wo_a.weight
    del layer.wo_a.weight
    if place == "replaced":
        layer.wo_a.weight = nn.Parameter(newer.clone(), requires_grad=False)
    tag[0].zero_()
    assert not mr.is_tag(tag)
    assert bool((tag[0] == 0).all())
    assert same_bits(tag[1:].clone(), exact_weight()[1:])
    assert place == "deleted" or same_bits(layer.wo_a.weight, newer)


def test_a_write_while_functional_call_has_the_place() -> None:
    """Case 19: a tag that comes back to its place after a write has the written weight, and a restore settles it."""
    layer = reclaimed(exact_weight())
    tag = layer.wo_a.weight

    class Writer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = layer

        def forward(self) -> None:
            tag[0].zero_()

    torch.func.functional_call(Writer(), {"layer.wo_a.weight": exact_weight(seed=9)}, ())
    assert layer.wo_a.weight is tag
    assert same_bits(tag[1:].clone(), exact_weight()[1:])
    mr.Reclaimer().restore(layer)
    assert type(layer.wo_a.weight) is nn.Parameter
    assert same_bits(layer.wo_a.weight[1:], exact_weight()[1:])
    assert same_bits(tag.clone(), layer.wo_a.weight)


@pytest.mark.parametrize("change", ["half", "float", "another shape", "gone", "itself"])
def test_a_stale_view_of_a_weight_of_another_kind_is_refused(change: str) -> None:
    """Case 18: a view from before a conversion is never laid over bytes of another dtype or shape."""
    layer = reclaimed(exact_weight())
    tag, row = layer.wo_a.weight, layer.wo_a.weight[3]
    mr.Reclaimer().restore(layer)
    if change == "another shape":
        layer.wo_a.weight.data = layer.wo_a.weight.view(96, 128)
    elif change == "gone":
        del layer.wo_a.weight
    elif change == "itself":
        layer.wo_a.weight = tag
    else:
        getattr(layer, change)()
    for use in (row.clone, tag.zero_, row.zero_):
        with pytest.raises(mr.TagAccessError, match="wo_a"):
            use()


def test_a_restore_finds_tags_that_were_tied_later() -> None:
    """Case 21: a tag that was put in another place after the reclaim is the same parameter there after a restore."""
    model, rec = stack(1), reclaimer()
    expected = model.layers[0].wo_a.weight.detach().clone()
    rec.reclaim(model)
    model.extra = Weighted(model.layers[0].wo_a.weight)
    rec.restore(model)
    assert type(model.extra.weight) is nn.Parameter
    assert model.extra.weight is model.layers[0].wo_a.weight
    assert same_bits(model.extra.weight, expected)
