"""The embedded engine's answers, and what an unknown reader means."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
import torch

from memreclaim import Reclaimer
from memreclaim.engines import reference as ref
from memreclaim.engines.base import EngineAdapter, Role, refusals
from memreclaim.engines.reference.attention import Attention
from memreclaim.errors import EngineError
from memreclaim.states import Phase, Reason, State

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = pytest.mark.cpu


class OwnReader(Attention):
    """A layer that reads its weight itself, as a draft in the field did."""

    def project(self, o: torch.Tensor, phase: Phase) -> torch.Tensor:
        """Bypass memreclaim."""
        del phase
        weight = self.wo_a.weight.view(self.n_local_groups, self.o_lora_rank, -1)
        return torch.einsum("bgd,grd->bgr", o.float(), weight.float()).to(o.dtype)


def all_refusals(adapter: EngineAdapter) -> dict[str, Reason]:
    """Refusals of every part."""
    return {name: reason for part in adapter.models() for name, reason in refusals(adapter, part).items()}


def test_adapter_is_an_engine_adapter(model: ref.ReferenceModel, pool: ref.PagedPool) -> None:
    """An instance passes the protocol's runtime check and hands out the live pool."""
    adapter = ref.ReferenceAdapter(model, pool)
    assert isinstance(adapter, EngineAdapter)
    assert adapter.pool() is pool
    assert adapter.group() is None
    assert not adapter.graphs_captured()


def test_parts_name_every_layer_once(model: ref.ReferenceModel) -> None:
    """Target and draft between them have each ``wo_a`` of the checkpoint exactly once."""
    target, draft = ref.ReferenceAdapter(model).models()
    assert (target.role, list(target.layers())) == (Role.TARGET, ["layers.0.attn.wo_a", "layers.1.attn.wo_a"])
    assert (draft.role, list(draft.layers())) == (Role.DRAFT, ["mtp.0.attn.wo_a"])


def test_stock_model_has_known_readers_only(model: ref.ReferenceModel) -> None:
    """Nothing is refused in a model as it was loaded."""
    adapter = ref.ReferenceAdapter(model)
    assert all_refusals(adapter) == {}
    (reader,) = adapter.readers(adapter.models()[0], "layers.0.attn.wo_a")
    assert reader.where == "memreclaim.engines.reference.attention.Attention.project"


def test_layer_of_another_class_has_an_unknown_reader(model: ref.ReferenceModel) -> None:
    """A layer that may read its weight in its own way is refused, the others are not."""
    model.mtp[0].attn.__class__ = OwnReader
    adapter = ref.ReferenceAdapter(model)
    assert all_refusals(adapter) == {"mtp.0.attn.wo_a": Reason.UNKNOWN_READER}
    (reader,) = adapter.readers(adapter.models()[1], "mtp.0.attn.wo_a")
    assert "OwnReader" in reader.note


def test_function_put_on_one_layer_is_an_unknown_reader(
    model: ref.ReferenceModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A replaced method of one instance is noticed."""
    monkeypatch.setattr(model.layers[1].attn, "project", lambda o, _phase: o)
    assert all_refusals(ref.ReferenceAdapter(model)) == {"layers.1.attn.wo_a": Reason.UNKNOWN_READER}


def test_function_put_on_the_class_is_an_unknown_reader(
    model: ref.ReferenceModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A method replaced for all layers refuses all of them."""
    monkeypatch.setattr(Attention, "project", OwnReader.project)
    assert set(all_refusals(ref.ReferenceAdapter(model)).values()) == {Reason.UNKNOWN_READER}
    assert len(all_refusals(ref.ReferenceAdapter(model))) == 3


def test_hook_on_a_layer_is_an_unknown_reader(model: ref.ReferenceModel) -> None:
    """A forward hook may read anything."""
    handle = model.layers[0].attn.register_forward_hook(lambda *_: None)
    assert all_refusals(ref.ReferenceAdapter(model)) == {"layers.0.attn.wo_a": Reason.UNKNOWN_READER}
    handle.remove()
    assert all_refusals(ref.ReferenceAdapter(model)) == {}


def test_after_capture_everything_is_refused(model: ref.ReferenceModel, monkeypatch: pytest.MonkeyPatch) -> None:
    """Once graphs hold addresses of weights, no layer may be dropped."""
    monkeypatch.setattr(ref.ReferenceAdapter, "graphs_captured", lambda _self: True)
    assert set(all_refusals(ref.ReferenceAdapter(model)).values()) == {Reason.AFTER_CAPTURE}


def test_unknown_layer_is_an_error(model: ref.ReferenceModel) -> None:
    """Asking for the readers of a layer that does not exist names it."""
    adapter = ref.ReferenceAdapter(model)
    with pytest.raises(EngineError, match=r"layers\.9\.attn\.wo_a"):
        adapter.readers(adapter.models()[0], "layers.9.attn.wo_a")


def test_phase_comes_from_the_batch_and_the_model(model: ref.ReferenceModel) -> None:
    """The target's phase is the batch's, a draft block drafts, and another object is refused."""
    adapter = ref.ReferenceAdapter(model)
    batch = ref.Batch(Phase.VERIFY, torch.zeros(0, dtype=torch.long), ())
    assert adapter.phase_of(batch, Role.TARGET) is Phase.VERIFY
    assert adapter.phase_of(batch, Role.DRAFT) is Phase.DRAFT
    with pytest.raises(EngineError, match="dict"):
        adapter.phase_of({}, Role.TARGET)


def test_refused_layer_keeps_its_weight(model: ref.ReferenceModel) -> None:
    """A layer with an unknown reader is kept with that reason, its parameter untouched; the rest is reclaimed."""
    model.layers[0].attn.__class__ = OwnReader
    before = model.layers[0].attn.wo_a.weight
    report = Reclaimer().reclaim(model, refused=all_refusals(ref.ReferenceAdapter(model)))
    states = {layer.name: (layer.state, layer.reason) for layer in report.layers}
    assert states == {
        "layers.0.attn.wo_a": (State.KEPT, Reason.UNKNOWN_READER),
        "layers.1.attn.wo_a": (State.RECLAIMED, None),
        "mtp.0.attn.wo_a": (State.RECLAIMED, None),
    }
    assert model.layers[0].attn.wo_a.weight is before


def test_book_of_released_bytes_moves_both_ways(checkpoint: Path) -> None:
    """What a reclaim releases and a restore takes back cancels out."""
    adapter = ref.ReferenceAdapter(ref.load_model(checkpoint))
    with adapter.safe_point(), adapter.allocations():
        adapter.released(100)
        adapter.released(-100)
    assert adapter.released_bytes == 0
