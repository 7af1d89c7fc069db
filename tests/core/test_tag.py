"""A tag by the rows of the access table: views, products, reads, writes, refusals, and what goes around operators."""

from __future__ import annotations

import contextlib
import copy
import io
import pickle
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import safetensors.torch
import torch
from core.models import (
    Attention,
    Stack,
    Weighted,
    activations,
    bits,
    drop,
    exact_weight,
    reclaimed,
    reclaimer,
    same_bits,
    stack,
)
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.nn import functional
from torch.overrides import get_overridable_functions

import memreclaim as mr
from memreclaim import counters
from memreclaim.tagged import Tagged

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

pytestmark = pytest.mark.cpu

WEIGHT = exact_weight()


def tag_of(weight: torch.Tensor = WEIGHT) -> torch.Tensor:
    """A tag in place of a copy of ``weight``; its layer is kept alive by the tag's backing."""
    return reclaimed(weight).wo_a.weight


# Products


PRODUCTS: dict[str, Callable[[torch.Tensor, torch.Tensor], torch.Tensor]] = {
    "einsum tgd": lambda o, w: torch.einsum("tgd,grd->tgr", o, w.view(2, 64, 96)),
    "einsum bgd": lambda o, w: torch.einsum("bgd,grd->bgr", o, w.view(2, -1, 96)),
    "einsum in float": lambda o, w: torch.einsum("bgd,grd->bgr", o.float(), w.view(2, 64, 96).float()),
    "bmm": lambda o, w: torch.bmm(o.transpose(0, 1), w.view(2, 64, 96).transpose(1, 2)),
    "matmul": lambda o, w: o.transpose(0, 1) @ w.unflatten(0, (2, 64)).mT,
    "linear": lambda o, w: functional.linear(o[:, 0], w),
    "mm": lambda o, w: o[:, 0].mm(w.t()),
    "reversed": lambda o, w: torch.matmul(w, o[:, 0].t()),
    "one group": lambda o, w: functional.linear(o[:, 1], w.view(2, 64, 96)[1]),
    "reshape": lambda o, w: torch.einsum("tgd,grd->tgr", o, w.reshape(2, 64, 96)),
    "data": lambda o, w: torch.einsum("tgd,grd->tgr", o, w.data.view(2, 64, 96)),
    "half the depth": lambda o, w: o[:, 0, :48] @ w[:, :48].t(),
    "addmm": lambda o, w: torch.addmm(torch.ones(128, dtype=torch.bfloat16), o[:, 0], w.t()),
    "addbmm": lambda o, w: torch.baddbmm(
        torch.ones((2, o.shape[0], 64), dtype=torch.bfloat16), o.transpose(0, 1), w.view(2, 64, 96).mT
    ),
}


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode, contextlib.nullcontext])
@pytest.mark.parametrize("rows", [0, 1, 2, 8, 16, 33])
@pytest.mark.parametrize("product", PRODUCTS)
def test_products_have_the_plain_weights_bits(product: str, rows: int, mode: Callable[[], Any]) -> None:
    """Case 14: a module's own product on the weight, however it is written, gives the same bits."""
    o = activations(rows)
    with mode():
        assert same_bits(PRODUCTS[product](o, tag_of()), PRODUCTS[product](o, WEIGHT))


@pytest.mark.parametrize("groups", [1, 2, 4, 8])
def test_products_of_any_group_count(groups: int) -> None:
    """Cases 10, 16: no path assumes a group count."""
    weight, o = exact_weight(groups, 32, 64), activations(5, groups, 64)
    layer, plain = reclaimed(weight, groups), Attention(weight, groups)
    assert same_bits(layer(o), plain(o))
    assert same_bits(mr.grouped_projection(o, layer.wo_a.weight), plain(o))


@pytest.mark.parametrize("padding", ["one zero", "all zero", "last repeated"])
def test_padded_groups(padding: str) -> None:
    """Case 10: groups that are padding, of zeros or of a repeated group, are reclaimed and served."""
    weight = exact_weight(4, 32, 64).view(4, 32, 64)
    if padding == "last repeated":
        weight[3] = weight[2]
    else:
        weight[3 if padding == "one zero" else slice(None)] = 0
    weight, o = weight.view(128, 64), activations(5, 4, 64)
    assert same_bits(reclaimed(weight, 4)(o), Attention(weight, 4)(o))


def test_products_do_not_count_as_copies() -> None:
    """Case 12: a served product decodes for itself; only reads are counted as materialisations."""
    tag = tag_of()
    before = counters.materializations.snapshot()
    torch.einsum("tgd,grd->tgr", activations(3), tag.view(2, 64, 96))
    functional.linear(activations(3)[:, 0], tag)
    assert counters.materializations.snapshot() == before
    tag.float()
    assert sum(counters.materializations.snapshot().values()) == sum(before.values()) + 1


def test_gradients_flow_through_a_tag() -> None:
    """Case 14: backward of activations through a tag has the plain weight's bits."""
    grads = []
    for weight in (tag_of(), WEIGHT):
        o = activations(4).requires_grad_()
        out = torch.einsum("tgd,grd->tgr", o, weight.view(2, 64, 96)) * 2
        (out.sum() + functional.linear(o[:, 0], weight).pow(2).sum() + (o[:, 0] * weight[3]).sum()).backward()
        grads.append(o.grad)
    assert same_bits(grads[0], grads[1])


def test_an_optimizer_step_restores_and_updates() -> None:
    """Case 19: gradients gather on a trainable tag, and the step updates the restored weight as it does a plain one."""
    layers = [Attention(nn.Parameter(WEIGHT.clone())), Attention(nn.Parameter(WEIGHT.clone()))]
    drop(layers[0])
    for layer in layers:
        optimizer = torch.optim.SGD(layer.parameters(), lr=0.5)
        layer(activations(3)).sum().backward()
        optimizer.step()
    assert not mr.is_tag(layers[0].wo_a.weight)
    assert same_bits(layers[0].wo_a.weight, layers[1].wo_a.weight)


# Reads and views


STEPS: tuple[Callable[[torch.Tensor, int], torch.Tensor], ...] = (
    lambda t, n: t.view(-1),
    lambda t, n: t.reshape(2, -1),
    lambda t, n: t.transpose(0, -1),
    lambda t, n: t[n % t.shape[0]],
    lambda t, n: t[n % t.shape[0] :],
    lambda t, n: t[..., :: n % 3 + 1],
    lambda t, n: t.narrow(0, n % t.shape[0], 1),
    lambda t, n: t.unsqueeze(n % (t.dim() + 1)),
    lambda t, n: t.squeeze(),
    lambda t, n: t.data,
    lambda t, n: t.detach(),
    lambda t, n: t.expand(2, *t.shape),
    lambda t, n: t.chunk(2)[-1],
    lambda t, n: t.unbind(-1)[n % t.shape[-1]],
    lambda t, n: t.split(max(1, t.shape[0] // 2))[0],
    lambda t, n: t.movedim(0, -1),
    lambda t, n: t.unfold(-1, 1 + n % t.shape[-1], 1),
    lambda t, n: t.diagonal(dim1=0, dim2=-1) if t.dim() > 1 else t,
    lambda t, n: t.view(torch.int16),
    lambda t, n: t.view(torch.float16).view(torch.bfloat16),
    lambda t, n: t.flatten(),
    lambda t, n: torch._neg_view(t),
    lambda t, n: t.permute(tuple(reversed(range(t.dim())))),
    lambda t, n: t.swapaxes(0, -1),
)
CHAIN = st.lists(st.tuples(st.integers(0, len(STEPS) - 1), st.integers(0, 97)), max_size=5)
PROPERTY = settings(max_examples=60, deadline=None)


def walk(tensor: torch.Tensor, chain: list[tuple[int, int]]) -> torch.Tensor | type[Exception]:
    """Apply steps; the class of the error if one does not fit."""
    try:
        for step, n in chain:
            tensor = STEPS[step](tensor, n)
    except (RuntimeError, IndexError, ValueError, ZeroDivisionError) as error:
        assert not isinstance(error, mr.TagAccessError)  # noqa: PT017
        return RuntimeError if isinstance(error, (RuntimeError, ValueError)) else IndexError
    return tensor


@PROPERTY
@given(CHAIN, st.sampled_from([contextlib.nullcontext, torch.no_grad, torch.inference_mode]))
def test_any_chain_of_views_reads_the_exact_values(chain: list[tuple[int, int]], mode: Callable[[], Any]) -> None:
    """Case 18: views of views of a tag have the shape, strides of the copy, and bits that views of the weight have."""
    with mode():
        expected, actual = walk(WEIGHT.clone(), chain), walk(tag_of(), chain)
        if not isinstance(expected, torch.Tensor):
            return  # a copy may be served where a plain weight cannot be viewed
        assert isinstance(actual, torch.Tensor)
        assert same_bits(expected, actual.clone())
        assert same_bits(expected + 1, actual + 1)
        assert same_bits(expected.to(torch.float64), actual.to(torch.float64))


@pytest.mark.filterwarnings("ignore:Use of index_put_")
@PROPERTY
@given(CHAIN, st.sampled_from(["fill_", "zero_", "copy_", "setitem", "neg_", "index_put"]))
def test_any_chain_of_views_writes_through(chain: list[tuple[int, int]], write: str) -> None:
    """Case 19: a write into any view of a tag changes the layer as it changes a plain weight."""
    plain, layer = Attention(WEIGHT.clone()), reclaimed(WEIGHT)
    with torch.no_grad():
        views = [walk(one.wo_a.weight, chain) for one in (plain, layer)]
        if not all(isinstance(view, torch.Tensor) for view in views):
            return
        outcomes = []
        for view in views:
            try:
                _write(view, write)
                outcomes.append(None)
            except RuntimeError as error:
                outcomes.append(type(error))
    # torch refuses to write where one element stands in several places; so does the restored weight.
    assert outcomes[0] == outcomes[1]
    assert same_bits(layer.wo_a.weight.clone(), plain.wo_a.weight)


def _write(view: Any, write: str) -> None:
    if write == "copy_":
        view.copy_(torch.ones(view.shape))
    elif write == "setitem":
        view[...] = 2
    elif write == "index_put":
        if view.dim():
            view[torch.tensor([0])] = 1
    else:
        getattr(view, write)(*([3] if write == "fill_" else []))


READS: dict[str, Callable[[torch.Tensor], Any]] = {
    "numpy": lambda t: t.float().numpy(),
    "numpy of int16": lambda t: t.detach().view(torch.int16).numpy(),
    "asarray": lambda t: np.asarray(t.view(torch.int16)),
    "tolist": lambda t: t.tolist(),
    "item": lambda t: t[3, 4].item(),
    "float()": lambda t: float(t[3, 4]),
    "bool": lambda t: bool(t[3, 4]),
    "iteration": lambda t: [row.sum().item() for row in t],
    "unpacking": lambda t: [float(x) for x in t[5]],
    "len": len,
    "contains": lambda t: 0.0 in t,
    "equal": lambda t: torch.equal(t, WEIGHT),
    "allclose": lambda t: torch.allclose(t, WEIGHT),
    "==": lambda t: (t == WEIGHT).all().item(),
    "max": lambda t: t.max().item(),
    "norm": lambda t: t.norm().item(),
    "cat": lambda t: torch.cat((t, t)),
    "stack": lambda t: torch.stack((t, WEIGHT)),
    "where": lambda t: torch.where(t > 0, t, 0),
    "index": lambda t: t[torch.tensor([3, 1])],
    "mask": lambda t: t[t > 0],
    "embedding": lambda t: functional.embedding(torch.tensor([1, 2]), t),
    "new_tensor": torch.tensor,
    "as_tensor": lambda t: torch.as_tensor(t, dtype=torch.float32),
    "parameter": lambda t: nn.Parameter(t.detach().clone(), requires_grad=False),
    "to cpu": lambda t: t.cpu().sum(),
    "half": lambda t: t.half(),
    "format": lambda t: f"{t[3, 4]:.6f}",
    "pow": lambda t: 2**t,
    "rsub": lambda t: 1 - t,
    "abs": abs,
    "vmap": lambda t: torch.vmap(lambda row: row * 2)(t.clone()),
    "triu": lambda t: torch.linalg.norm(t.float()),
    "to sparse": lambda t: t.to_sparse().to_dense(),
    "histogram": lambda t: torch.histc(t.float(), 4),
    "foreach": lambda t: torch._foreach_mul([t, t], 2.0)[1],
}


@pytest.mark.filterwarnings("ignore:To copy construct")
@pytest.mark.parametrize("read", READS)
def test_reads_are_exact(read: str) -> None:
    """Case 18: what a reader gets from a tag is what the plain weight gives."""
    actual, expected = READS[read](tag_of()), READS[read](WEIGHT)
    if isinstance(expected, torch.Tensor):
        assert same_bits(actual, expected)
    elif isinstance(expected, np.ndarray):
        assert (actual.dtype, actual.tobytes()) == (expected.dtype, expected.tobytes())
    else:
        assert actual == expected


ARGUMENTS: tuple[tuple[Any, ...], ...] = (
    (), (0,), ("other",), (0, 1), (1, 0), (torch.float32,), (0, "index"), ("other", "other"), ("mask", 2.0), ("cpu",),
    (0, "index", "rows"), ((2, -1),), (0, 0, 1),
)  # fmt: skip
OBJECTS = frozenset({
    "__hash__", "__repr__", "__str__", "__iter__", "__dir__", "__reduce_ex__", "__deepcopy__", "_reduce_ex_internal",
    "__getstate__", "stride", "is_contiguous", "untyped_storage", "_typed_storage", "__cuda_array_interface__",
    "_cdata", "_python_dispatch", "empty_like", "new_empty", "new_empty_strided", "_is_view", "_version",
})  # fmt: skip
"""What speaks of the object and its memory rather than of values; each has a test of its own where it matters."""


def _given(arguments: tuple[Any, ...]) -> list[Any]:
    made = {
        "other": lambda: torch.full((128, 96), 0.5, dtype=torch.bfloat16), "index": lambda: torch.tensor([0, 2]),
        "mask": lambda: torch.ones((128, 96), dtype=torch.bool),
        "rows": lambda: torch.ones((2, 96), dtype=torch.bfloat16),
    }  # fmt: skip
    return [made[a]() if isinstance(a, str) and a in made else a for a in arguments]


def _outcome(name: str, layer: Attention, arguments: tuple[Any, ...]) -> Any:
    torch.manual_seed(0)
    attribute = getattr(layer.wo_a.weight, name)
    value = attribute(*_given(arguments)) if callable(attribute) else attribute
    return value.clone() if isinstance(value, Tagged) else value


@pytest.mark.filterwarnings("ignore")
def test_every_method_and_property_of_a_tensor() -> None:
    """Cases 18, 19: by enumeration, what the plain weight answers the tag answers alike, or names the layer."""
    names = {f.__name__ for f in get_overridable_functions()[torch.Tensor] if hasattr(f, "__name__")} | set(
        dir(torch.Tensor)
    )
    tried, wrong = 0, {}
    for name in sorted(names - OBJECTS):
        if not hasattr(torch.Tensor, name) or name in vars(object):
            continue
        for arguments in ARGUMENTS:
            plain = Attention(WEIGHT.clone())
            try:
                with torch.no_grad():
                    expected = _outcome(name, plain, arguments)
            except Exception:  # noqa: BLE001, S112  arguments that do not fit this method
                continue
            tried += 1
            layer = reclaimed(WEIGHT)
            try:
                with torch.no_grad():
                    actual = _outcome(name, layer, arguments)
            except mr.TagAccessError:
                break
            except Exception as error:  # noqa: BLE001  reported below
                wrong[name] = repr(error)[:100]
                break
            if (
                isinstance(expected, torch.Tensor)
                and expected.layout is torch.strided
                and not same_bits(actual, expected)
            ):
                wrong[name] = "other bits"
            elif isinstance(expected, (int, float, bool, list, torch.Size, torch.dtype)) and actual != expected:
                wrong[name] = f"{actual!r:.80} instead of {expected!r:.80}"
            elif not same_bits(layer.wo_a.weight.clone(), plain.wo_a.weight):
                wrong[name] = "another content"
            break
    assert (tried > 350, wrong) == (True, {})


# Savers


def test_state_dict_is_exact_and_plain() -> None:
    """Case 18: ``state_dict`` hands out plain tensors with storage of their own, and loads back into a plain model."""
    model, rec = stack(2), reclaimer()
    expected = {name: value.clone() for name, value in model.state_dict().items()}
    rec.reclaim(model)
    state = model.state_dict()
    assert all(type(value) is torch.Tensor for value in state.values())
    assert all(same_bits(state[name], expected[name]) for name in expected)
    assert list(state) == list(expected)
    fresh = stack(2)
    fresh.load_state_dict(state)
    assert same_bits(fresh.layers[1].wo_a.weight, expected["layers.1.wo_a.weight"])


def test_state_dict_keeping_variables() -> None:
    """Case 18: ``keep_vars=True`` hands out the parameters, which are still tags."""
    model = stack(1)
    reclaimer().reclaim(model)
    assert model.state_dict(keep_vars=True)["layers.0.wo_a.weight"] is model.layers[0].wo_a.weight


@pytest.mark.parametrize("what", ["module", "tag", "view", "state"])
@pytest.mark.parametrize("how", ["pickle", "torch.save", "deepcopy"])
def test_savers_store_the_exact_weight(how: str, what: str) -> None:
    """Case 18: pickle, ``torch.save`` and ``deepcopy`` of a module, tag, view or state give plain exact tensors."""
    layer = reclaimed(WEIGHT)
    layer.wo_a.weight.loader = "kept"
    thing = {"module": layer, "tag": layer.wo_a.weight, "view": layer.wo_a.weight[3:], "state": layer.state_dict()}[
        what
    ]
    if how == "pickle":
        loaded = pickle.loads(pickle.dumps(thing))  # noqa: S301
    elif how == "torch.save":
        buffer = io.BytesIO()
        torch.save(thing, buffer)
        buffer.seek(0)
        loaded = torch.load(buffer, weights_only=what != "module")
    else:
        loaded = copy.deepcopy(thing)
    value = {"module": lambda: loaded.wo_a.weight, "state": lambda: loaded["wo_a.weight"]}.get(what, lambda: loaded)()
    assert not isinstance(value, Tagged)
    assert same_bits(value, WEIGHT[3:] if what == "view" else WEIGHT)
    if what in ("module", "tag"):
        assert (type(value), value.requires_grad) == (nn.Parameter, False)
    assert mr.is_tag(layer.wo_a.weight)


def test_a_saved_module_knows_nothing_of_memreclaim() -> None:
    """Case 18: a pickled module loads where memreclaim is not installed, and gives and takes state dicts there."""
    linear = nn.Linear(96, 128, bias=False, dtype=torch.bfloat16)
    linear.weight = nn.Parameter(WEIGHT.clone(), requires_grad=False)
    layer = Attention(WEIGHT)
    layer.wo_a = linear
    drop(layer)
    pickled = pickle.dumps(linear)
    assert b"memreclaim" not in pickled
    loaded = pickle.loads(pickled)  # noqa: S301
    assert same_bits(loaded.state_dict()["weight"], WEIGHT)
    assert same_bits(linear.state_dict()["weight"], WEIGHT)


def test_deepcopy_of_a_module_keeps_ties_and_is_independent() -> None:
    """Case 18: a copied module shares what its original shared, and a write into it leaves the original alone."""
    model = stack(2)
    model.layers[1].wo_a.weight = model.layers[0].wo_a.weight
    reclaimer().reclaim(model)
    copied = copy.deepcopy(model)
    assert copied.layers[0].wo_a.weight is copied.layers[1].wo_a.weight
    copied.layers[0].wo_a.weight.data.fill_(1)
    assert mr.is_tag(model.layers[0].wo_a.weight)
    assert same_bits(copied.layers[0](activations(2)), copied.layers[1](activations(2)))


def test_safetensors(tmp_path: Path) -> None:
    """Case 18: safetensors stores the exact weight, from a model and from a ``state_dict``."""
    layer = reclaimed(WEIGHT)
    safetensors.torch.save_model(layer, str(tmp_path / "model.safetensors"))
    safetensors.torch.save_file(layer.state_dict(), tmp_path / "state.safetensors")
    for file in ("model", "state"):
        loaded = safetensors.torch.load_file(tmp_path / f"{file}.safetensors")
        assert same_bits(loaded["wo_a.weight"], WEIGHT)


def test_safetensors_of_the_tag_itself_is_exact_or_refused(tmp_path: Path) -> None:
    """Cases 17, 18: a saver that takes raw memory gets exact bytes or an error, never the placeholder."""
    file = tmp_path / "tag.safetensors"
    try:
        safetensors.torch.save_file({"w": reclaimed(WEIGHT).wo_a.weight}, file)
    except (mr.TagAccessError, RuntimeError, ValueError):
        return
    assert same_bits(safetensors.torch.load_file(file)["w"], WEIGHT)


# Writes


WRITES: dict[str, Callable[[Attention], Any]] = {
    "fill_": lambda m: m.wo_a.weight.fill_(1),
    "zero_": lambda m: m.wo_a.weight.zero_(),
    "one element": lambda m: m.wo_a.weight.__setitem__((0, 0), 1),
    "slice": lambda m: m.wo_a.weight.__setitem__(slice(3, 5), 1),
    "data slice": lambda m: m.wo_a.weight.data[1:3].fill_(1),
    "copy_": lambda m: m.wo_a.weight.copy_(exact_weight(seed=4)),
    "data.copy_": lambda m: m.wo_a.weight.data.copy_(exact_weight(seed=4)),
    "set data": lambda m: setattr(m.wo_a.weight, "data", exact_weight(seed=4)),
    "add_": lambda m: m.wo_a.weight.add_(1),
    "iadd": lambda m: m.wo_a.weight.__iadd__(1),
    "out": lambda m: torch.add(WEIGHT, 1, out=m.wo_a.weight),
    "out into a view": lambda m: torch.mul(WEIGHT[3], 2, out=m.wo_a.weight[3]),
    "foreach": lambda m: torch._foreach_mul_([m.wo_a.weight, m.wo_a.weight[0]], 2.0),
    "index_copy_": lambda m: m.wo_a.weight.index_copy_(0, torch.tensor([2]), torch.ones((1, 96), dtype=torch.bfloat16)),
    "masked_fill_": lambda m: m.wo_a.weight.masked_fill_(WEIGHT > 0, 0),
    "init": lambda m: nn.init.constant_(m.wo_a.weight, 2.0),
    "load_state_dict": lambda m: m.load_state_dict({"wo_a.weight": exact_weight(seed=4)}),
    "load_state_dict assign": lambda m: m.load_state_dict({"wo_a.weight": exact_weight(seed=4)}, assign=True),
    "apply_": lambda m: m.wo_a.weight.apply_(lambda x: x + 1),
    "loader": lambda m: m.wo_a.weight.data.narrow(0, 64, 64).copy_(exact_weight(seed=4)[:64]),
    "row by row": lambda m: [row.fill_(i) for i, row in enumerate(m.wo_a.weight.data)],
    "swap into itself": lambda m: m.wo_a.weight.copy_(m.wo_a.weight.flip(0)),
    "overlap": lambda m: m.wo_a.weight[1:].copy_(m.wo_a.weight[:-1].clone()),
    "negated view": lambda m: torch._neg_view(m.wo_a.weight).fill_(1),
    "fill by bits": lambda m: m.wo_a.weight.data.view(torch.int16)[0].fill_(0x3F80),
}


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
@pytest.mark.parametrize("write", WRITES)
def test_a_write_restores_first_and_is_proven_again(write: str, mode: Callable[[], Any]) -> None:
    """Cases 19, 28: every way to write gives what it gives on a plain weight; afterwards the layer is proven anew."""
    plain, layer, rec = Attention(WEIGHT.clone()), Attention(WEIGHT.clone()), reclaimer()
    rec.reclaim(layer)
    tag = layer.wo_a.weight
    with mode():
        for one in (plain, layer):
            WRITES[write](one)
    assert not mr.is_tag(layer.wo_a.weight)
    assert same_bits(layer.wo_a.weight, plain.wo_a.weight)
    if write != "load_state_dict assign":  # there the old parameter, too, keeps its old values
        assert same_bits(tag.clone(), plain.wo_a.weight)
    assert type(layer.wo_a.weight) is nn.Parameter
    rec.check_integrity()
    assert sum(entry.gross_bytes for entry in rec.ledger.layers()) == 0
    tag = layer.wo_a.weight
    del tag
    report = rec.reclaim(layer)
    rec.check_integrity()
    assert same_bits(layer.wo_a.weight.clone(), plain.wo_a.weight)
    assert report.layers[0].state.value == ("reclaimed" if mr.is_tag(layer.wo_a.weight) else "kept")


def test_a_failed_load_leaves_the_old_weights() -> None:
    """Case 27: ``load_state_dict`` that raises for another key leaves exact weights, old or new, in every layer."""
    model, rec = stack(2), reclaimer()
    weights = [layer.wo_a.weight.detach().clone() for layer in model.layers]
    rec.reclaim(model)
    with pytest.raises(RuntimeError, match="size mismatch"):
        model.load_state_dict({"layers.0.wo_a.weight": exact_weight(seed=5), "layers.1.wo_a.weight": torch.zeros(3)})
    assert same_bits(model.layers[0].wo_a.weight.clone(), exact_weight(seed=5))
    assert same_bits(model.layers[1].wo_a.weight.clone(), weights[1])
    rec.check_integrity()


@pytest.mark.parametrize("move", [lambda m: m.to(torch.float32), lambda m: m.half(), lambda m: m.float(),
                                  lambda m: m.cpu(),
                                  lambda m: m.requires_grad_(True), lambda m: m.eval(), lambda m: m.to("meta")])  # fmt: skip  # noqa: E501
def test_moving_the_module(move: Callable[[nn.Module], nn.Module]) -> None:
    """Case 19: ``module.to`` and its like leave what they leave of a plain weight."""
    plain, layer = Attention(WEIGHT.clone()), reclaimed(WEIGHT)
    for one in (plain, layer):
        move(one)
    ours, theirs = layer.wo_a.weight, plain.wo_a.weight
    assert (ours.dtype, ours.device, ours.requires_grad, ours.shape) == (
        theirs.dtype,
        theirs.device,
        theirs.requires_grad,
        theirs.shape,
    )
    if theirs.device.type != "meta":
        assert same_bits(ours.detach().clone(), theirs)


# Refusals


def _custom(library: torch.library.Library, name: str, schema: str) -> Any:
    library.define(name + schema)
    library.impl(name, lambda x, *_: x, "CompositeExplicitAutograd")
    return getattr(torch.ops.memreclaim_test, name)


REFUSED: dict[str, Callable[[torch.Tensor], Any]] = {
    "data_ptr": lambda t: t.data_ptr(),
    "data_ptr of a view": lambda t: t.view(2, 64, 96).data_ptr(),
    "data_ptr of data": lambda t: t.data.data_ptr(),
    "storage pointer": lambda t: t.storage().data_ptr(),
    "__dlpack__": lambda t: t.__dlpack__(),
    "from_dlpack": torch.from_dlpack,
    "numpy from_dlpack": lambda t: np.from_dlpack(t.view(torch.int16)),
    "to_dlpack": torch.utils.dlpack.to_dlpack,
    "array interface": lambda t: t.__cuda_array_interface__,
    "share_memory_": lambda t: t.share_memory_(),
    "resize_": lambda t: t.resize_(1),
    "set_": lambda t: t.set_(torch.zeros(3, dtype=torch.bfloat16)),
    "t_": lambda t: t.t_(),
    "as_strided": lambda t: t.as_strided((2, 2), t.stride()),
    "as_strided of a view": lambda t: torch.as_strided(t.view(2, 64, 96), (2,), (1,)),
    "fill_diagonal_": lambda t: t.fill_diagonal_(1),
    "out of another shape": lambda t: torch.sum(torch.ones((2, 2), dtype=torch.bfloat16), dim=0, out=t),
}


@pytest.mark.parametrize("access", REFUSED)
def test_raw_memory_is_refused_by_name(access: str) -> None:
    """Case 17: whatever needs the pointer or the layout raises an error, and the layer stays as it was."""
    layer = reclaimed(WEIGHT)
    with pytest.raises((mr.TagAccessError, RuntimeError, BufferError, TypeError)) as caught:
        REFUSED[access](layer.wo_a.weight)
    if access != "to_dlpack":  # the legacy function asks C++, which only knows that the pointer is closed
        assert isinstance(caught.value, mr.TagAccessError)
        assert (caught.value.layer, "wo_a" in str(caught.value)) == ("wo_a", True)
    assert mr.is_tag(layer.wo_a.weight)
    assert same_bits(layer.wo_a.weight.clone(), WEIGHT)


@pytest.mark.parametrize("schema", ["(Tensor x) -> Tensor", "(Tensor(a!) x) -> Tensor(a!)", "(Tensor[] x) -> Tensor"])
def test_operators_outside_aten_are_refused(schema: str) -> None:
    """Case 17: a custom operator may hand the pointer to a kernel: an error names layer and operator."""
    library = torch.library.Library("memreclaim_test", "FRAGMENT")
    name = f"op{abs(hash(schema))}"
    op = _custom(library, name, schema)
    layer = reclaimed(WEIGHT)
    argument = [layer.wo_a.weight[3:]] if "[]" in schema else layer.wo_a.weight
    with pytest.raises(mr.TagAccessError, match=name) as caught:
        op(argument)
    assert caught.value.layer == "wo_a"
    assert mr.is_tag(layer.wo_a.weight)


def test_a_python_class_with_torch_function_beside_a_tag() -> None:
    """Case 17: another tensor subclass in the same call does not make the placeholder readable."""

    class Other(torch.Tensor):
        """A subclass without a dispatch of its own."""

    other = torch.ones(WEIGHT.shape, dtype=torch.bfloat16).as_subclass(Other)
    assert same_bits((other * tag_of()).as_subclass(torch.Tensor), WEIGHT)


def test_refusals_are_counted() -> None:
    """Case 17: each refusal is counted by operation."""
    tag = tag_of()
    before = counters.refusals.snapshot().get(("data_ptr",), 0)
    with pytest.raises(mr.TagAccessError):
        tag.data_ptr()
    assert counters.refusals.snapshot()["data_ptr",] == before + 1


def test_the_storage_counts_what_it_takes() -> None:
    """Case 24: who sums storage sizes sees one element, not the weight."""
    assert tag_of().untyped_storage().nbytes() == 2


def test_tags_are_not_made_by_hand() -> None:
    """A tag without a twin would stand for nothing."""
    with pytest.raises(TypeError, match="Reclaimer"):
        mr.Tag()


def test_repr_names_the_layer_without_decoding() -> None:
    """Printing a model reads nothing."""
    layer = reclaimed(WEIGHT)
    before = counters.materializations.snapshot()
    assert "Tag(wo_a, shape=(128, 96), serves=twin)" in repr(layer.wo_a.weight)
    assert "TagView" in repr(layer.wo_a.weight[0])
    repr(layer)
    assert counters.materializations.snapshot() == before


DOORS: dict[str, Callable[[torch.Tensor], Any]] = {
    "as_subclass": lambda t: t.as_subclass(torch.Tensor),
    "make_subclass": lambda t: torch.Tensor._make_subclass(nn.Parameter, t, False),
    "make_subclass of data": lambda t: torch.Tensor._make_subclass(nn.Parameter, t.data, False),
    "parameter": lambda t: nn.Parameter(t, requires_grad=False),
    "parameter of data": lambda t: nn.Parameter(t.data, requires_grad=False),
    "buffer": nn.Buffer,
    "tensor": torch.Tensor,
    "storage of another": lambda t: torch.empty(0, dtype=torch.bfloat16).set_(t),
    "copy": lambda t: torch.zeros(WEIGHT.shape, dtype=torch.bfloat16).copy_(t),
    "asarray": torch.asarray,
    "from storage": lambda t: torch.empty(0, dtype=torch.bfloat16).set_(t.untyped_storage(), 0, t.shape, t.stride()),
    "alias": torch.ops.aten.alias.default,
    "lift": torch.ops.aten.lift_fresh.default,
    "swapped": lambda t: _swapped(t),  # noqa: PLW0108  defined below
    "functional_call": lambda t: torch.func.functional_call(Weightless(), {"weight": t}, ()),
    "checkpointed": lambda t: torch.utils.checkpoint.checkpoint(lambda w: w * 1, t, use_reentrant=False),
    "jvp": lambda t: torch.func.jvp(lambda w: w * 1, (t,), (t,))[0],
    "vmap": torch.func.vmap(lambda row: row * 1),
    "cond": lambda t: torch.utils._pytree.tree_map(lambda w: w * 1, [t])[0],
}


class Weightless(nn.Module):
    """A module whose parameter comes from elsewhere."""

    def __init__(self) -> None:
        """Start with zeros."""
        super().__init__()
        self.weight = nn.Parameter(torch.zeros_like(WEIGHT), requires_grad=False)

    def forward(self) -> torch.Tensor:
        """The parameter."""
        return self.weight * 1


def _swapped(tag: torch.Tensor) -> torch.Tensor:
    other = nn.Parameter(torch.zeros(WEIGHT.shape, dtype=torch.bfloat16), requires_grad=False)
    torch.utils.swap_tensors(tag, other)
    return other


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.parametrize("door", DOORS)
def test_no_door_leads_to_the_placeholder(door: str) -> None:
    """Case 17: ways to make another tensor of a tag give the exact values or an error, and never its NaN."""
    layer = reclaimed(WEIGHT)
    try:
        value = DOORS[door](layer.wo_a.weight)
    except (RuntimeError, TypeError, ValueError, NotImplementedError):
        return
    assert same_bits(value.clone(), WEIGHT)
    assert same_bits(value.detach() * 1, WEIGHT)


def test_data_of_another_tensor_shows_no_plausible_value() -> None:
    """Case 17: ``other.data = tag`` asks nothing of Python: NaN or an error comes out, no value."""
    other = torch.zeros(WEIGHT.shape, dtype=torch.bfloat16)
    other.data = tag_of()
    try:
        assert bool(other.isnan().all())
    except RuntimeError as error:
        assert "released" in str(error)  # noqa: PT017


def test_setting_data_of_a_tag_to_a_tag() -> None:
    """Case 19: data set to a weight's own is no write; set to another tag, it takes the exact values."""
    layer, other = reclaimed(WEIGHT), reclaimed(exact_weight(seed=3))
    layer.cpu()
    layer.wo_a.weight.data = layer.wo_a.weight.data
    assert mr.is_tag(layer.wo_a.weight)
    layer.wo_a.weight.data = other.wo_a.weight
    assert same_bits(layer.wo_a.weight, exact_weight(seed=3))
    other.wo_a.weight.data = other.wo_a.weight[:3]
    assert same_bits(other.wo_a.weight, exact_weight(seed=3)[:3])


def test_is_tag_and_twin_of() -> None:
    """``is_tag`` and ``twin_of`` speak of tags and their views, and of nothing else."""
    layer = reclaimed(WEIGHT)
    tag = layer.wo_a.weight
    twin = mr.twin_of(tag)
    assert twin is not None
    assert [mr.is_tag(x) for x in (tag, tag[0], WEIGHT, None, "w")] == [True, True, False, False, False]
    assert mr.twin_of(tag.view(2, 64, 96)[1]) is twin
    assert mr.twin_of(WEIGHT) is None


def test_regrouping_is_cached() -> None:
    """An engine views the weight on each call: the same view comes back, and goes with the twin."""
    tag = tag_of()
    assert tag.view(2, 64, 96) is tag.view(2, 64, 96)
    assert same_bits(tag.view(2, 64, 96).view(-1).clone(), WEIGHT.view(-1))
    view = tag.view(2, 64, 96)
    tag.fill_(1)
    assert bool((view.clone() == 1).all())


@pytest.mark.parametrize("how", ["list", "size=", "dtype="])
def test_every_way_to_call_view(how: str) -> None:
    """A view asked for by a list, or by name, is that of a plain weight."""
    ways: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
        "list": lambda t: t.view([2, 64, 96]),  # type: ignore[arg-type]
        "size=": lambda t: t.view(size=(2, 64, 96)),  # type: ignore[call-overload]
        "dtype=": lambda t: t.view(dtype=torch.int16),  # type: ignore[call-overload]
    }
    assert same_bits(ways[how](tag_of()).clone(), ways[how](WEIGHT))


def test_a_cached_view_is_no_dead_end_for_gradients() -> None:
    """A weight that is trained after it was served gets its gradient, though its view was cached before."""
    layer, o = reclaimed(WEIGHT), activations(2)
    layer(o)
    layer.requires_grad_()
    layer(o).sum().backward()
    plain = Attention(WEIGHT.clone())
    plain.requires_grad_()
    plain(o).sum().backward()
    assert same_bits(layer.wo_a.weight.grad, plain.wo_a.weight.grad)


# Twin mode


def test_twin_mode_serves_and_reads_the_weight_itself() -> None:
    """Case 28: in twin mode both are there: products come from the twin, memory is the weight's, nothing is claimed."""
    model, rec = stack(1), reclaimer("twin")
    pointer = model.layers[0].wo_a.weight.data_ptr()
    expected = model.layers[0].wo_a.weight.detach().clone()
    report = rec.reclaim(model)
    tag = model.layers[0].wo_a.weight
    assert (report.layers[0].state.value, report.gross_bytes, mr.is_tag(tag)) == ("proven", 0, False)
    assert report.twin_bytes == mr.twin_of(tag).nbytes
    assert same_bits(tag.clone(), expected)
    assert tag.untyped_storage().data_ptr() == pointer
    rec.check_integrity()


@pytest.mark.parametrize("write", WRITES)
def test_twin_mode_never_serves_a_stale_twin(write: str) -> None:
    """Case 28: a write to a weight whose twin is served while bf16 is kept ends the twin."""
    plain, layer, rec = Attention(WEIGHT.clone()), Attention(WEIGHT.clone()), reclaimer("twin")
    rec.reclaim(layer)
    view = layer.wo_a.weight.view(2, 64, 96)
    with torch.no_grad():
        for one in (plain, layer):
            WRITES[write](one)
    o = activations(3)
    assert same_bits(layer(o), plain(o))
    assert same_bits(mr.grouped_projection(o, layer.wo_a.weight), plain(o))
    if write != "load_state_dict assign":
        assert same_bits(torch.einsum("tgd,grd->tgr", o, view), plain(o))
    rec.check_integrity()


SHARING: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "numpy": lambda t: torch.from_numpy(t.view(torch.int16).numpy()),
    "asarray": lambda t: torch.from_numpy(np.asarray(t.view(torch.int16))),
    "unsafe_split": lambda t: torch.unsafe_split(t, 64)[1],
    "_unsafe_view": lambda t: torch.ops.aten._unsafe_view(t, [2, 64, 96]),
    "set_": lambda t: torch.empty(0, dtype=torch.bfloat16).set_(t),
}


@pytest.mark.parametrize("way", SHARING)
def test_twin_mode_ends_where_memory_is_shared(way: str) -> None:
    """Case 28: a write through memory that a reader was given in twin mode is served, never the stale twin."""
    layer, o = Attention(WEIGHT.clone()), activations(3)
    reclaimer("twin").reclaim(layer)
    SHARING[way](layer.wo_a.weight).zero_()
    written = layer.wo_a.weight.clone()
    assert not same_bits(written, WEIGHT)
    assert same_bits(layer(o), Attention(written)(o))


def test_twin_mode_raw_pointer_ends_the_twin() -> None:
    """Case 28: who is given the pointer may write unseen, so the twin is not served from then on."""
    model, rec = stack(1), reclaimer("twin")
    rec.reclaim(model)
    tag = model.layers[0].wo_a.weight
    alias = torch.from_dlpack(tag)
    alias.fill_(1)
    assert mr.twin_of(model.layers[0].wo_a.weight) is None
    assert bool((model.layers[0](torch.ones((1, 2, 96), dtype=torch.bfloat16)) == 96).all())


# Compile


@pytest.fixture
def _compiler() -> Any:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


@pytest.mark.usefixtures("_compiler")
@pytest.mark.filterwarnings("ignore")
def test_compiled_projection_is_one_graph_through_two_lives() -> None:
    """A compiled ``grouped_projection`` has no graph break, and is right after a restore and after a second reclaim."""
    model, rec = stack(1), reclaimer()
    layer, o = model.layers[0], activations(3)
    expected = layer(o)
    compiled = torch.compile(
        lambda x: mr.grouped_projection(x, layer.wo_a.weight) * 1, backend="aot_eager", fullgraph=True
    )
    rec.reclaim(model)
    assert same_bits(compiled(o), expected)
    rec.restore(model)
    assert same_bits(compiled(o), expected)
    model.load_state_dict({"layers.0.wo_a.weight": exact_weight(seed=7)})
    assert same_bits(compiled(o), layer(o))
    rec.reclaim(model)
    assert same_bits(compiled(o), layer(o))
    assert not same_bits(compiled(o), expected)


@pytest.mark.usefixtures("_compiler")
@pytest.mark.filterwarnings("ignore")
def test_compiled_model_with_its_own_einsum() -> None:
    """Case 14: a compiled model with a plain einsum breaks its graph at the tag and keeps every bit."""
    model, rec = stack(1), reclaimer()
    layer, o = model.layers[0], activations(3)
    expected = layer(o) + 1
    compiled = torch.compile(lambda x: layer(x) + 1, backend="aot_eager")
    assert same_bits(compiled(o), expected)
    rec.reclaim(model)
    assert same_bits(compiled(o), expected)
    rec.restore(model)
    assert same_bits(compiled(o), expected)
    model.load_state_dict({"layers.0.wo_a.weight": exact_weight(seed=7)})
    rec.reclaim(model)
    assert same_bits(compiled(o), layer(o) + 1)


def test_helper_tells_bits_apart() -> None:
    """Case 2: the comparison used here sees the sign of zero and every NaN payload."""
    zeros = torch.zeros(2, dtype=torch.bfloat16)
    assert not same_bits(zeros, -zeros)
    assert bits(torch.tensor([float("nan")])).tolist() == bits(torch.tensor([float("nan")])).tolist()
    assert isinstance(Stack(Weighted(WEIGHT)), nn.Module)
