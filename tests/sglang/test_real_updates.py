"""Weights that change after start, by the real engine's own ways."""

from __future__ import annotations

import importlib
import threading
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest
import safetensors.torch
import torch
from sglang_engine import DEPTH, GROUPS, RANK, activations, checkpoint, copies, weights

from memreclaim import IntegrityError, Reason, State, SwapError, is_tag, twin_of
from memreclaim.engines.sglang import occupation, rank_service, reclaim_point
from memreclaim.twin import Twin

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from sglang_engine import Engine

    from memreclaim.engines.sglang.session import Session

pytestmark = pytest.mark.cpu
_COMPONENTS = "sglang.srt.model_executor.model_runner_components"


class Rank:
    """A reclaimed model in a real runner, with the real updater of its weights."""

    def __init__(self, engine: Engine, session: Session, runner: Any) -> None:
        """Put it together."""
        self.engine, self.session, self.runner = engine, session, runner
        self.model = runner.model
        self.recaptured: list[str] = []
        runner.recapture_decode_cuda_graph = lambda: self.recaptured.append("graphs")
        module = importlib.import_module(f"{_COMPONENTS}.weight_updater")
        self.updater = module.WeightUpdater(
            tp_rank=0,
            device="cpu",
            gpu_id=0,
            model_config=runner.model_config,
            custom_weight_loaders={},
            get_model=lambda: self.model,
            update_model_fields=lambda *_args, **_kwargs: None,
            recapture_cuda_graph=lambda: self.recaptured.append("asked"),
            get_model_runner=lambda: runner,
        )

    def bits(self) -> dict[str, torch.Tensor]:
        """Exact bits of every wo_a weight, as the model has them now."""
        return {name: weight.clone().view(torch.int16) for name, weight in weights(self.model).items()}

    def addresses(self) -> list[int]:
        """Where the twins' codes are."""
        return [twin.packed.data_ptr() for twin in map(twin_of, weights(self.model).values()) if twin is not None]

    def serves(self, expected: dict[str, torch.Tensor]) -> bool:
        """Whether the dispatch gives the products of ``expected``."""
        o, shape = activations(3), (GROUPS, RANK, DEPTH)
        return all(
            torch.equal(
                self.engine.v4._apply_wo_a_bf16_matmul(o, weight.view(shape), is_decode=True),
                torch.einsum("tgd,grd->tgr", o, expected[name].view(shape)),
            )
            for name, weight in weights(self.model).items()
        )


@pytest.fixture
def rank(engine: Engine, start: Callable[..., Session], load: Callable[..., Any]) -> Rank:
    """One reclaimed target."""
    session = start()
    return Rank(engine, session, load(engine.target(seed=0)))


def expected(engine: Engine, seed: int) -> dict[str, torch.Tensor]:
    """The weights of another checkpoint."""
    return copies(engine.target(seed=seed))


def by_tensor(rank: Rank, tensors: list[tuple[str, torch.Tensor]]) -> Any:
    """``update_weights_from_tensor`` as the engine calls it."""
    return rank.updater.update_weights_from_tensor(named_tensors=tensors)


def by_group(rank: Rank, tensors: list[tuple[str, torch.Tensor]]) -> Any:
    """The second half of ``update_weights_from_distributed``."""
    return rank.updater.load_weights_from_distributed(tensors)


def by_session(rank: Rank, tensors: list[tuple[str, torch.Tensor]]) -> Any:
    """Between ``begin`` and ``end``, in two parts."""
    rank.updater.begin_weight_update()
    rank.updater.update_weights_from_tensor(named_tensors=tensors[:2])
    result = rank.updater.update_weights_from_tensor(named_tensors=tensors[2:])
    rank.updater.end_weight_update(run_post_load=False)
    return result


@pytest.fixture
def cpu_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """The updater asks the device for its index, which the CPU gives as a word."""
    monkeypatch.setattr(
        torch, "get_device_module", lambda _device=None: SimpleNamespace(current_device=lambda: "cpu", synchronize=int)
    )


@pytest.mark.usefixtures("cpu_device")
@pytest.mark.parametrize("captured", [False, True])
@pytest.mark.parametrize("way", [by_tensor, by_group, by_session])
def test_new_weights_are_proven_and_dropped_again(rank: Rank, way: Callable[..., Any], captured: bool) -> None:
    """After an update the twins hold the new weights, at the addresses that graphs know."""
    rank.session.captured = captured
    addresses = rank.addresses()
    new = expected(rank.engine, 7)

    assert way(rank, list(checkpoint("layers", 2, 7)))[0]

    assert all(map(is_tag, weights(rank.model).values()))
    assert rank.addresses() == addresses
    assert rank.serves(new)
    assert {layer.state for layer in rank.session.reports["target"].layers} == {State.RECLAIMED}
    assert rank.session.reclaimer.journal.counts()["operations_total", "update", "api", "ok"] == 1


@pytest.mark.usefixtures("cpu_device")
@pytest.mark.parametrize("layers", [1, 2])
def test_the_engines_book_of_weight_memory_does_not_drift(
    engine: Engine, start: Callable[..., Session], load: Callable[..., Any], layers: int
) -> None:
    """It is lowered by the net bytes of the twins that serve, after any number of updates, exactly."""
    session = start()
    rank = Rank(engine, session, load(engine.target(seed=0)))
    loaded, net = rank.runner.weight_load_mem_usage, session.reports["target"].net_bytes
    assert net > 0

    for seed in (7, 8):
        assert by_tensor(rank, list(checkpoint("layers", layers, seed)))[0]
        assert rank.runner.weight_load_mem_usage == loaded

    weight = next(iter(weights(rank.model).values()))
    with torch.no_grad():
        weight.fill_(1.00390625 * 3e-3)  # no hook sees it; the next update books it
    by_tensor(rank, [])
    assert rank.session.adapters[0].booked == net // 2
    assert rank.runner.weight_load_mem_usage == loaded + net / 2 / (1 << 30)


@pytest.mark.usefixtures("cpu_device")
def test_the_direct_format_goes_around_load_weights_and_is_seen(rank: Rank) -> None:
    """It copies straight into parameters."""
    new = expected(rank.engine, 8)
    tensors = [(f"{name}.weight", value) for name, value in new.items()]

    assert rank.updater.update_weights_from_tensor(named_tensors=tensors, load_format="direct")[0]

    assert all(map(is_tag, weights(rank.model).values()))
    assert rank.serves(new)


@pytest.mark.usefixtures("cpu_device")
@pytest.mark.parametrize("way", [by_group, by_tensor])
def test_a_reload_that_fails_half_way_keeps_the_old_weights(rank: Rank, way: Callable[..., Any]) -> None:
    """One layer was written when the second fails: both serve the old bits."""
    old = rank.bits()
    tensors = list(checkpoint("layers", 2, 9))
    tensors[2] = (tensors[2][0], tensors[2][1][:32].clone())

    try:
        assert not way(rank, tensors)[0]
    except (AssertionError, RuntimeError, ValueError):
        assert way is by_tensor

    assert all(map(is_tag, weights(rank.model).values()))
    assert {name: bool((bits == old[name]).all()) for name, bits in rank.bits().items()} == dict.fromkeys(old, True)


@pytest.mark.usefixtures("cpu_device")
def test_new_weights_without_a_twin_stay_in_bf16(rank: Rank) -> None:
    """As a trainer sends them: not representable, kept, served right; graphs are captured again."""
    rank.session.captured = True
    new = {name: torch.randn_like(value) for name, value in expected(rank.engine, 0).items()}
    tensors = [(f"{name}.weight", value) for name, value in new.items()]

    rank.updater.update_weights_from_tensor(named_tensors=tensors, load_format="direct")

    assert not any(map(is_tag, weights(rank.model).values()))
    assert {layer.reason for layer in rank.session.reports["target"].layers} == {Reason.MISMATCH}
    assert rank.serves(new)
    assert rank.recaptured == ["graphs"]


@pytest.mark.usefixtures("cpu_device")
def test_an_update_of_other_weights_touches_no_twin(rank: Rank) -> None:
    """Nothing is restored for it."""
    report, addresses = rank.session.reports["target"], rank.addresses()
    name, norm = next((name, p) for name, p in rank.model.named_parameters() if name.endswith("norm.weight"))

    rank.updater.update_weights_from_tensor(named_tensors=[(name, torch.ones_like(norm))], load_format="direct")

    assert rank.addresses() == addresses
    assert rank.session.reports["target"] is report


def test_a_write_behind_the_engines_back_is_refused_once_graphs_are_captured(rank: Rank) -> None:
    """The graphs would go on reading the old twin."""
    weight = next(iter(weights(rank.model).values()))
    old = weight.clone()
    rank.session.captured = True

    with pytest.raises(SwapError, match=r"layers\.0.*weight update"), torch.no_grad():
        weight.fill_(1)

    assert is_tag(weight)
    assert torch.equal(weight.clone(), old)


@pytest.mark.parametrize("fails", [False, True])
def test_update_from_disk(rank: Rank, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fails: bool) -> None:
    """The real loader reads safetensors; a broken checkpoint leaves the old weights."""
    old = rank.bits()
    new = expected(rank.engine, 11)
    old_path, new_path = tmp_path / "old", tmp_path / "new"
    for path, seed in ((old_path, 0), (new_path, 11)):
        path.mkdir()
        tensors = dict(checkpoint("layers", 2, seed))
        if fails and seed:
            tensors["layers.1.attn.wo_a.weight"] = tensors["layers.1.attn.wo_a.weight"][:32].clone()
        safetensors.torch.save_file(tensors, path / "model.safetensors")
    rank.runner.model_config.revision = rank.runner.model_config.quantization = None
    rank.session.captured = True
    loader = importlib.import_module("sglang.srt.model_loader.loader").DefaultModelLoader
    source = loader.Source
    if fails:
        # The engine rolls back from the path in its config, which it has overwritten by then: point it at the old one.
        made = iter([new_path, old_path])
        monkeypatch.setattr(
            source, "init_new", classmethod(lambda cls, config, _model: cls(str(next(made)), None, model_config=config))
        )

    success, message = rank.updater.update_weights_from_disk(str(new_path), "auto", recapture_cuda_graph=True)

    assert success is not fails, message
    assert all(map(is_tag, weights(rank.model).values()))
    if fails:
        assert all(torch.equal(bits, old[name]) for name, bits in rank.bits().items())
    else:
        assert rank.serves(new)
        assert rank.recaptured == ["asked"]


def test_save_sharded_model_writes_exact_values(rank: Rank, tmp_path: Path) -> None:
    """The real sharded saver reads state_dict."""
    loader = importlib.import_module("sglang.srt.model_loader.loader").ShardedStateLoader
    expected_bits = rank.bits()

    loader.save_model(rank.model, str(tmp_path))

    saved: dict[str, torch.Tensor] = {}
    for file in tmp_path.glob("*.safetensors"):
        saved |= safetensors.torch.load_file(file)
    for name, bits in expected_bits.items():
        assert torch.equal(saved[f"{name}.weight"].view(torch.int16), bits)


def test_get_weights_by_name_gives_exact_values(rank: Rank, monkeypatch: pytest.MonkeyPatch) -> None:
    """The real exporter; V4 has no method of that name, so the model is lent one as other models have it."""
    module = importlib.import_module(f"{_COMPONENTS}.weight_exporter")

    def by_name(model: torch.nn.Module, name: str, truncate_size: int, tp_size: int) -> list[list[float]]:
        assert tp_size == 1
        return model.get_parameter(name).cpu().to(torch.float32).numpy().tolist()[:truncate_size]

    monkeypatch.setattr(type(rank.model), "get_weights_by_name", by_name, raising=False)
    exporter = module.WeightExporter(
        tp_rank=0, tp_size=1, gpu_id=0, get_model_path=lambda: "", get_model=lambda: rank.model
    )

    for name, value in copies(rank.model).items():
        assert exporter.get_weights_by_name(f"{name}.weight", truncate_size=3) == value[:3].float().tolist()


def test_the_weight_checker_sees_the_weights_it_saw_before(
    engine: Engine, start: Callable[..., Session], load: Callable[..., Any]
) -> None:
    """Checksums of every parameter are those of the bf16 model, and its snapshot holds the exact values."""
    session = start()
    module = importlib.import_module("sglang.srt.utils.weight_checker")
    model = engine.target()
    checker = module.WeightChecker(get_model=lambda: model)
    before, old = checker.handle("checksum", role="target"), copies(model)
    load(model)

    assert checker.handle("checksum", role="target")["checksums"] == before["checksums"]
    checker.handle("snapshot", role="target")
    assert all(torch.equal(checker._snapshot_tensors[f"{name}.weight"], value) for name, value in old.items())
    assert session.reports["target"].net_bytes > 0


def test_the_weight_checkers_reset_restores_first(rank: Rank) -> None:
    """It writes noise into every parameter: weights come back, get the noise, and are judged anew."""
    module = importlib.import_module("sglang.srt.utils.weight_checker")
    old = rank.bits()
    with torch.no_grad():
        module.WeightChecker(get_model=lambda: rank.model).handle("reset_tensors", role="target")

    assert {layer.reason for layer in rank.session.reports["target"].layers} == {Reason.MISMATCH}
    assert not any(torch.equal(bits, old[name]) for name, bits in rank.bits().items())


class Pausing:
    """A memory saver whose pause loses every twin, or leaves it alone."""

    def __init__(self, rank: Rank, *, loses: bool) -> None:
        """Put it together."""
        self._rank, self._loses = rank, loses

    def pause(self, tag: str) -> None:
        """Release."""
        if tag == "weights" and self._loses:
            for weight in weights(self._rank.model).values():
                twin = twin_of(weight)
                assert twin is not None
                twin.packed.fill_(0x55)

    def resume(self, tag: str) -> None:
        """Map again."""


@pytest.mark.parametrize("loses", [False, True])
def test_twins_survive_release_and_resume(rank: Rank, monkeypatch: pytest.MonkeyPatch, loses: bool) -> None:
    """The engine's real handlers; bytes that a pause lost are put back before the first call, in place."""
    module = importlib.import_module("sglang.srt.managers.scheduler_components.weight_updater")
    monkeypatch.setattr(torch.distributed, "barrier", lambda *_args, **_kwargs: None)
    manager = object.__new__(module.SchedulerWeightUpdaterManager)
    for name, value in {
        "scheduler": None,
        "is_fully_idle": lambda **_: True,
        "offload_tags": set(),
        "memory_saver_adapter": Pausing(rank, loses=loses),
        "tp_worker": SimpleNamespace(model_runner=rank.runner),
        "tp_cpu_group": None,
        "flush_cache": lambda **_: True,
    }.items():
        setattr(manager, name, value)
    old, addresses = copies(rank.model), rank.addresses()

    manager.release_memory_occupation(SimpleNamespace(tags=["weights"]))
    manager.resume_memory_occupation(SimpleNamespace(tags=["weights"]))

    assert rank.addresses() == addresses
    assert rank.serves(old)
    assert occupation._saved == []


def test_bytes_that_cannot_be_put_right_fail_the_resume(rank: Rank, monkeypatch: pytest.MonkeyPatch) -> None:
    """Never served: the engine's request fails and names the layers."""
    occupation.around_release(lambda *_: None, None, SimpleNamespace(tags=None))
    twin = twin_of(next(iter(weights(rank.model).values())))
    assert twin is not None
    twin.packed.fill_(0x55)
    monkeypatch.setattr(occupation.Saved, "put_back", lambda _self: None)

    with pytest.raises(IntegrityError, match=r"layers\.0"):
        occupation.around_resume(lambda *_: None, None, SimpleNamespace(tags=None))


def _is_quiet(session: Session) -> bool:
    """Whether another thread is kept from reading twins just now."""
    got: list[bool] = []

    def knock() -> None:
        lock = session.quiet()
        got.append(lock.acquire(blocking=False))  # type: ignore[attr-defined]
        if got[0]:
            lock.release()  # type: ignore[attr-defined]

    other = threading.Thread(target=knock)
    other.start()
    other.join()
    return not got[0]


class Service:
    """What the session asks of a service, without its threads."""

    def __init__(self) -> None:
        """Nothing has been polled."""
        self.quiet = threading.RLock()
        self.auditor = self
        self.polls = self.proofs = 0

    def poll(self) -> None:
        """Count."""
        self.polls += 1

    def proven(self) -> None:
        """Count."""
        self.proofs += 1


@pytest.fixture
def service(rank: Rank) -> Service:
    """A service beside the rank."""
    rank.session.service = found = Service()  # type: ignore[assignment]
    return found  # type: ignore[return-value]


def test_nothing_reads_a_twin_while_the_weights_memory_is_paused(rank: Rank, service: Service) -> None:
    """From the pause to the end of the resume's own look, by any thread; what was asked for waits."""
    held: list[bool] = []

    def note(*_: object) -> None:
        held.append(_is_quiet(rank.session))

    occupation.around_release(note, None, SimpleNamespace(tags=["weights"]))
    rank_service.after_idle(None)
    occupation.around_release(note, None, SimpleNamespace(tags=["kv_cache"]))
    occupation.around_resume(note, None, SimpleNamespace(tags=["kv_cache"]))
    assert (service.polls, _is_quiet(rank.session)) == (0, True)
    occupation.around_resume(note, None, SimpleNamespace(tags=["weights"]))

    assert held == [True] * 4
    assert not _is_quiet(rank.session)
    rank_service.after_idle(None)
    assert service.polls == 1


def test_a_pause_that_the_engine_refuses_leaves_nothing_behind(rank: Rank, service: Service) -> None:
    """What was saved for it is not put back over the weights of a later update."""

    def busy(*_: object) -> None:
        message = "should be called only when server is idle"
        raise AssertionError(message)

    with pytest.raises(AssertionError):
        occupation.around_release(busy, None, SimpleNamespace(tags=None))

    assert occupation._saved == []
    assert not _is_quiet(rank.session)
    rank_service.after_idle(None)
    assert service.polls == 1


@pytest.mark.usefixtures("service")
def test_nothing_of_the_service_allocates_while_graphs_are_captured(rank: Rank) -> None:
    """An allocation by another thread breaks a capture."""
    held: list[bool] = []

    reclaim_point.around_capture(lambda _scheduler: held.append(_is_quiet(rank.session)), None)

    assert held == [True]
    assert not _is_quiet(rank.session)


@pytest.mark.usefixtures("cpu_device", "service")
def test_twins_are_written_anew_while_nobody_reads_them(rank: Rank, monkeypatch: pytest.MonkeyPatch) -> None:
    """An audit's slab would be half of the old twin and half of the new."""
    held: list[bool] = []
    overwrite = Twin.overwrite

    def note(old: Twin, new: Twin) -> None:
        held.append(_is_quiet(rank.session))
        overwrite(old, new)

    monkeypatch.setattr(Twin, "overwrite", note)
    by_tensor(rank, list(checkpoint("layers", 2, 7)))

    assert held == [True, True]
    assert not _is_quiet(rank.session)


@pytest.mark.usefixtures("cpu_device")
@pytest.mark.parametrize(("layers", "proofs"), [(2, 1), (1, 0)])
def test_the_audits_clock_starts_anew_when_an_update_proved_every_twin(
    rank: Rank, service: Service, layers: int, proofs: int
) -> None:
    """An update of some layers, repeated, must not keep the audit from ever seeing the others."""
    by_tensor(rank, list(checkpoint("layers", layers, 7)))

    assert all(map(is_tag, weights(rank.model).values()))
    assert service.proofs == proofs
