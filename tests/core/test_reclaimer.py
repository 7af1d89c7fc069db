"""The main job: one layer at a time, bytes that are really free, and a pool that is told no more than that."""

from __future__ import annotations

import json
import weakref
from typing import TYPE_CHECKING, Any

import pytest
import torch
from core.models import Attention, Stack, activations, exact_weight, reclaimer, same_bits, stack
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

import memreclaim as mr
import memreclaim.reclaimer as reclaimer_module
from memreclaim.config import OnMismatch
from memreclaim.meter import Change

if TYPE_CHECKING:
    from collections.abc import Callable

pytestmark = pytest.mark.cpu

MIB = 2**20


class LiveBytes(TorchDispatchMode):
    """Counts the storage of every tensor that operators make, and its peak, exactly and on any device."""

    def __init__(self) -> None:
        """Start at nothing."""
        super().__init__()
        self.live = self.peak = 0
        self._known: set[int] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run the operator and note new storages."""
        del types
        result = func(*args, **(kwargs or {}))
        for tensor in pytree.tree_leaves(result):
            if type(tensor) is torch.Tensor and tensor.device.type != "meta":
                self.note(tensor.untyped_storage())
        return result

    def note(self, storage: torch.UntypedStorage) -> None:
        """Count a storage until it is gone."""
        key, size = storage._cdata, storage.nbytes()
        if key in self._known or size == 0:
            return
        self._known.add(key)
        self.live += size
        self.peak = max(self.peak, self.live)

        def gone() -> None:
            self._known.discard(key)
            self.live -= size

        weakref.finalize(storage, gone)


def test_peak_extra_memory_is_one_twin(monkeypatch: pytest.MonkeyPatch) -> None:
    """Case 23: no more than one twin and 4 MiB is ever live beyond the weights; twins built ahead would be noticed."""

    def extra(model: torch.nn.Module) -> tuple[int, int]:
        with LiveBytes() as count:
            for layer in model.layers:
                count.note(layer.wo_a.weight.untyped_storage())
            start, count.peak = count.live, count.live
            report = reclaimer().reclaim(model)
        assert report.count(mr.State.RECLAIMED) == len(model.layers)
        return count.peak - start, report.twin_bytes // len(model.layers)

    shape = {"groups": 2, "rank": 1024, "depth": 4096}
    most, twin = extra(stack(3, **shape))
    assert twin > 4 * MIB
    assert twin <= most <= twin + 4 * MIB
    ahead: list[mr.Twin] = []
    real = reclaimer_module.build_twin

    def hoard(weight: torch.Tensor, **kwargs: int) -> mr.Twin:
        ahead.append(real(weight, **kwargs))
        return real(weight, **kwargs)

    monkeypatch.setattr(reclaimer_module, "build_twin", hoard)
    most, _ = extra(stack(1, **shape))
    assert most > twin + 4 * MIB


def test_figures_of_a_report() -> None:
    """Case 1: states, bytes and JSON of a report agree with the shapes."""
    model, rec = stack(3), reclaimer()
    report = rec.reclaim(model)
    gross, twin = 3 * 128 * 96 * 2, 3 * (128 * 96 + 12)
    assert (report.gross_bytes, report.twin_bytes, report.net_bytes) == (gross, twin, gross - twin)
    assert report.freed.nominal == gross
    told = report.to_dict()
    assert json.loads(json.dumps(told)) == told
    assert told["schema_version"] >= 1
    assert [layer["state"] for layer in told["layers"]] == ["reclaimed"] * 3
    for key in ("gross_bytes", "twin_bytes", "net_bytes"):
        assert type(told[key]) is int


def test_outputs_are_identical_through_a_whole_life() -> None:
    """Cases 1, 14: outputs have the same bits before, reclaimed, restored and reclaimed again."""
    model, rec, o = stack(3), reclaimer(), activations(7)
    expected = [layer(o) for layer in model.layers]
    for step in (rec.reclaim, rec.restore, rec.reclaim, rec.reclaim, rec.restore, rec.restore):
        step(model)
        rec.check_integrity()
        assert all(same_bits(layer(o), out) for layer, out in zip(model.layers, expected, strict=True))


def test_a_layer_that_does_not_match_stays_and_serves() -> None:
    """Case 6: a mismatch is no error: the layer is kept with count and coordinate, the others are reclaimed."""
    model, rec = stack(3), reclaimer()
    model.layers[1].wo_a.weight.data[5, 7] = 0.3333
    report = rec.reclaim(model)
    assert [layer.state.value for layer in report.layers] == ["reclaimed", "kept", "reclaimed"]
    kept = report.layers[1]
    assert (kept.reason, kept.mismatched_elements, kept.gross_bytes) == (mr.Reason.MISMATCH, 1, 0)
    assert kept.to_dict()["first_mismatch"]["coordinate"] == [5, 7]
    rec.check_integrity()


def test_abort_on_mismatch_raises_and_keeps_what_was_proven() -> None:
    """Case 6: with ``on_mismatch=abort`` the first mismatch is raised; layers before it stay reclaimed."""
    model, rec = stack(3), reclaimer(on_mismatch=OnMismatch.ABORT)
    model.layers[1].wo_a.weight.data[5, 7] = 0.3333
    with pytest.raises(mr.NotExact):
        rec.reclaim(model)
    rec.check_integrity()
    assert [mr.is_tag(layer.wo_a.weight) for layer in model.layers] == [True, False, False]


@pytest.mark.parametrize(("mode", "state", "reason"), [("off", "kept", "policy"), ("observe", "proven", "policy")])
def test_modes_that_change_nothing(mode: str, state: str, reason: str) -> None:
    """``off`` looks at nothing, ``observe`` proves and keeps no twin; the parameters are the same objects."""
    model, rec = stack(2), reclaimer(mode)
    weights = [id(layer.wo_a.weight) for layer in model.layers]
    report = rec.reclaim(model)
    assert [(layer.state.value, layer.reason.value) for layer in report.layers] == [(state, reason)] * 2
    assert (report.gross_bytes, report.twin_bytes) == (0, 0)
    assert [id(layer.wo_a.weight) for layer in model.layers] == weights
    rec.check_integrity()


def test_refusals_of_an_adapter() -> None:
    """Case 15: what an adapter does not know is kept before anything is dropped."""
    model, rec = stack(2), reclaimer()
    report = rec.reclaim(model, refused={"layers.1.wo_a": mr.Reason.UNKNOWN_READER})
    assert [(layer.state.value, layer.reason) for layer in report.layers] == [
        ("reclaimed", None), ("kept", mr.Reason.UNKNOWN_READER),
    ]  # fmt: skip


def test_after_graph_capture(monkeypatch: pytest.MonkeyPatch) -> None:
    """A reclaim during a capture keeps every layer with ``after_capture``."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    report = reclaimer().reclaim(stack(1))
    assert [layer.reason for layer in report.layers] == [mr.Reason.AFTER_CAPTURE]


def test_after_a_capture_nothing_is_dropped() -> None:
    """Case 29: once graphs are captured each layer is kept with ``after_capture``, its parameter the same object."""
    model, rec = stack(2), reclaimer()
    parameters = [layer.wo_a.weight for layer in model.layers]
    rec.graphs_captured = True
    report = rec.reclaim(model)
    assert [layer.reason for layer in report.layers] == [mr.Reason.AFTER_CAPTURE] * 2
    assert all(layer.wo_a.weight is old for layer, old in zip(model.layers, parameters, strict=True))
    assert report.gross_bytes == 0


def test_a_restore_reports_all_that_it_restored() -> None:
    """Target and draft that stand in one tree are both in the report of its restore."""
    model, rec = stack(3), reclaimer()
    rec.reclaim(model, prefix="layers.0")
    rec.reclaim(model, component="draft")
    report = rec.restore(model)
    assert [(layer.component, layer.state.value) for layer in report.layers] == [
        ("target", "restored"),
        ("draft", "restored"),
        ("draft", "restored"),
    ]


def test_half_a_layer_claims_nothing() -> None:
    """A tied layer with a plain parameter in one place again frees nothing, so nothing is claimed."""
    model, rec = stack(2), reclaimer()
    model.layers[1].wo_a.weight = model.layers[0].wo_a.weight
    rec.reclaim(model)
    assert rec.ledger.layers()[0].gross_bytes == 128 * 96 * 2
    model.layers[1].wo_a.weight = torch.nn.Parameter(model.layers[1].wo_a.weight.clone(), requires_grad=False)
    assert [(layer.state.value, layer.gross_bytes) for layer in rec.ledger.layers()] == [("restored", 0)]
    with pytest.raises(mr.IntegrityError, match="1 of 2 places"):
        rec.check_integrity()


def test_fp8_weights_have_nothing_to_do() -> None:
    """Case 34: a weight that is fp8 already is no failure."""
    report = reclaimer().reclaim(Stack(Attention(torch.zeros((128, 96)).to(torch.float8_e4m3fn))))
    assert [(layer.state, layer.reason) for layer in report.layers] == [(mr.State.KEPT, mr.Reason.NOTHING_TO_DO)]


def test_two_components_have_accounts_of_their_own() -> None:
    """Target and draft are reclaimed by one reclaimer and reported apart."""
    target, draft, rec = stack(2), stack(1), reclaimer()
    rec.reclaim(target)
    report = rec.reclaim(draft, component="draft")
    assert [layer.component for layer in report.layers] == ["draft"]
    assert len(rec.ledger.layers()) == 3
    rec.restore(draft)
    assert [layer.state.value for layer in rec.ledger.layers()] == ["reclaimed", "reclaimed", "restored"]
    rec.check_integrity()


def test_a_second_load_on_a_reclaimed_model() -> None:
    """Case 27: loading again restores, a second reclaim proves the new values; the same values are proven again too."""
    model, rec, o = stack(2), reclaimer(), activations(3)
    state = {name: value.clone() for name, value in model.state_dict().items()}
    expected = [layer(o) for layer in model.layers]
    rec.reclaim(model)
    for values in (state, {name: exact_weight(seed=30 + i) for i, name in enumerate(state)}, state):
        model.load_state_dict(values)
        rec.check_integrity()
        assert sum(layer.gross_bytes for layer in rec.ledger.layers()) == 0
        assert rec.reclaim(model).count(mr.State.RECLAIMED) == 2
    assert all(same_bits(layer(o), out) for layer, out in zip(model.layers, expected, strict=True))


def test_a_parameter_replaced_behind_our_back_claims_nothing() -> None:
    """Case 33: figures are read from the live model, so an assigned parameter ends the claim."""
    model, rec = stack(1), reclaimer()
    rec.reclaim(model)
    model.layers[0].wo_a.weight = torch.nn.Parameter(exact_weight(seed=5), requires_grad=False)
    rec.check_integrity()
    assert [(layer.state.value, layer.gross_bytes) for layer in rec.ledger.layers()] == [("restored", 0)]


def test_the_ledger_notices_a_lie() -> None:
    """Case 33: an account that the live tensors contradict is an error that names the layer."""
    model, rec = stack(1), reclaimer()
    rec.reclaim(model)
    (entry,) = rec.ledger.entries()
    entry.weight_bytes += 2
    with pytest.raises(mr.IntegrityError, match=r"target/layers\.0\.wo_a: .* bytes are booked"):
        rec.check_integrity()
    entry.weight_bytes -= 2
    rec.ledger.keep(entry, mr.Reason.POLICY)
    with pytest.raises(mr.IntegrityError, match="a tag stands in the model"):
        rec.check_integrity()
    rec.ledger.settle(entry, mr.State.RECLAIMED)
    with pytest.raises(mr.IntegrityError, match="without a twin"):
        rec.check_integrity()


class Pool:
    """A KV pool by the protocol."""

    def __init__(
        self, bytes_per_token: float = 100.5, limited_by: str = "memory", share: float = 1.0, error: str = ""
    ) -> None:
        """``share`` of the bytes can be used; ``error`` is what growing and shrinking fail with."""
        self.capacity_tokens, self.bytes_per_token, self.limited_by = 1000, bytes_per_token, limited_by
        self.share, self.error, self.asked = share, error, []

    def grow(self, n_bytes: int) -> int:
        """Take a share."""
        self.asked.append(n_bytes)
        if self.error:
            raise mr.PoolError(self.error)
        gained = 0 if self.limited_by == "pin" else int(n_bytes * self.share / self.bytes_per_token)
        self.capacity_tokens += gained
        return gained

    def shrink(self, n_bytes: int) -> int:
        """Give it back."""
        self.asked.append(-n_bytes)
        if self.error:
            raise mr.PoolError(self.error)
        self.capacity_tokens = 1000
        return n_bytes


@pytest.fixture
def steady(monkeypatch: pytest.MonkeyPatch) -> Callable[[int | None], None]:
    """Replace the process's memory figures, which drown small weights, by the nominal ones or by what is given."""

    def use(allocator: int | None) -> None:
        monkeypatch.setattr(Change, "freed", lambda _self, nominal, _taken: mr.FreedBytes(nominal, allocator, None))

    use(None)
    return use


@pytest.mark.usefixtures("steady")
def test_a_pool_grows_by_the_net_bytes() -> None:
    """Case 25: the pool is offered gross minus twin, and the report says what it made of it."""
    pool = Pool()
    assert isinstance(pool, mr.KVPool)
    model, rec = stack(3), mr.Reclaimer(pool=pool)
    report = rec.reclaim(model)
    change = report.pool
    assert change is not None
    assert pool.asked == [report.net_bytes]
    assert (change.tokens_before, change.tokens_gained) == (1000, int(report.net_bytes / 100.5))
    assert 0 <= change.head_room_bytes < 101
    rec.restore(model)
    assert (pool.asked[1:], pool.capacity_tokens) == ([-report.net_bytes], 1000)


@pytest.mark.usefixtures("steady")
@pytest.mark.parametrize(("limited_by", "share"), [("pin", 1.0), ("rank 2", 0.5)])
def test_a_pool_that_takes_less(limited_by: str, share: float) -> None:
    """Case 25: pinned, or bound by another rank, the rest is reported as head-room, not as tokens."""
    pool = Pool(limited_by=limited_by, share=share)
    report = mr.Reclaimer(pool=pool).reclaim(stack(3))
    told = report.to_dict()["kv_pool"]
    taken = int(told["tokens_gained"] * 100.5)
    assert (told["limited_by"], told["head_room_bytes"]) == (limited_by, report.net_bytes - taken)
    assert told["tokens_gained"] == (0 if limited_by == "pin" else int(report.net_bytes * share / 100.5))


@pytest.mark.usefixtures("steady")
def test_a_pool_that_refuses() -> None:
    """Case 25: a pool that cannot grow or shrink is reported; the weights are reclaimed and restored all the same."""
    pool = Pool(error="no memory")
    model, rec = stack(2), mr.Reclaimer(pool=pool)
    report = rec.reclaim(model)
    assert (report.count(mr.State.RECLAIMED), report.pool.tokens_gained) == (2, 0)
    assert report.pool.head_room_bytes == report.net_bytes
    assert rec.restore(model).count(mr.State.RESTORED) == 2
    rec.check_integrity()


def test_a_pool_is_never_offered_more_than_was_measured(steady: Callable[[int | None], None]) -> None:
    """Case 24: of several measures the smallest decides, and never less than nothing."""
    net = 3 * (128 * 96 - 12)
    for measured, offered in ((net // 2, 0), (3 * 128 * 96 * 2 - 100, net - 100), (10**9, net), (-5, 0)):
        steady(measured)
        pool = Pool()
        mr.Reclaimer(pool=pool).reclaim(stack(3))
        assert pool.asked == [offered]


def test_freed_bytes_of_the_process() -> None:
    """Case 24: on a CPU the process's own anonymous memory falls by what is claimed, within one percent and 1 MiB."""
    model, rec = stack(4, groups=2, rank=512, depth=2048), reclaimer()
    report = rec.reclaim(model)
    if report.freed.allocator is None:
        pytest.skip("this kernel shows no memory figures")
    assert report.gross_bytes == 4 * 2 * 512 * 2048 * 2
    assert report.freed.allocator >= report.gross_bytes - MIB - report.gross_bytes // 100
