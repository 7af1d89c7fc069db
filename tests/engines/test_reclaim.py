"""Reclaiming the embedded engine's weights while it serves: same bits, more room, and back again."""

from __future__ import annotations

import threading
from dataclasses import replace
from typing import TYPE_CHECKING

import pytest
import torch
from engine_runs import WAIT, bits, serve

from memreclaim import Reclaimer, counters, is_tag, reclaimer, twin_of
from memreclaim.checkpoint import Checkpoint, write_checkpoint
from memreclaim.engines import operate
from memreclaim.engines import reference as ref
from memreclaim.engines.reference.attention import Attention
from memreclaim.errors import PoolError
from memreclaim.meter import ProcessMeter
from memreclaim.states import Phase, Reason, State

if TYPE_CHECKING:
    from pathlib import Path

    from memreclaim import Report

pytestmark = pytest.mark.cpu

CONFIG = ref.ModelConfig.tiny()
WORK = ref.workload(CONFIG, seed=1)
PROMPTS = ref.burst(CONFIG, 5, seed=2, length=10)
WO_A = ("layers.0.attn.wo_a", "layers.1.attn.wo_a", "mtp.0.attn.wo_a")
NET_BYTES = 3 * (128 * 128 - 128 * 128 // 1024)
"""Three weights of 128 x 128: two bytes an element become one, and one byte more per 32x32 block."""


class ExactMeter(ProcessMeter):
    """Counts the weights' own bytes: the process's memory moves by more than these weights are large."""

    def __init__(self, model: ref.ReferenceModel) -> None:
        """Count the three weights of ``model``."""
        super().__init__()
        self._model = model

    def allocated(self) -> int:
        """Bytes of what serves now."""
        weights = [weight_of(self._model, layer) for layer in WO_A]
        return sum(twin_of(weight).nbytes if is_tag(weight) else weight.nbytes for weight in weights)


class OwnReader(Attention):
    """A layer that may read its weight in a way of its own."""


@pytest.fixture
def measured(model: ref.ReferenceModel, monkeypatch: pytest.MonkeyPatch) -> ref.ReferenceModel:
    """The model, with its memory measured exactly."""
    monkeypatch.setattr(reclaimer, "meter_for", lambda _device: ExactMeter(model))
    return model


def weight_of(model: ref.ReferenceModel, layer: str) -> torch.Tensor:
    """The parameter that stands in the model now."""
    return model.get_submodule(layer).get_parameter("weight")


def states(report: Report) -> dict[str, State]:
    """State of each layer."""
    return {layer.name: layer.state for layer in report.layers}


def stock_calls() -> int:
    """Projections that were served from bf16 weights so far."""
    return sum(calls for key, calls in counters.calls.snapshot().items() if key[0] == "stock")


def test_whole_workload_is_bit_identical_on_twins_and_after_restoring(
    model: ref.ReferenceModel, pool: ref.PagedPool
) -> None:
    """Every score of every token is the same on bf16, on twins and on restored weights, at all row ranges."""
    manager = Reclaimer(pool=pool)
    before = ref.serve_workload(model, pool, WORK)
    report = manager.reclaim(model)
    assert states(report) == dict.fromkeys(WO_A, State.RECLAIMED)
    assert all(is_tag(weight_of(model, layer)) for layer in WO_A)
    stock = stock_calls()
    assert before.first_difference(ref.serve_workload(model, pool, WORK)) is None
    assert stock_calls() == stock
    restored = manager.restore(model)
    assert states(restored) == dict.fromkeys(WO_A, State.RESTORED)
    assert not any(is_tag(weight_of(model, layer)) for layer in WO_A)
    assert before.first_difference(ref.serve_workload(model, pool, WORK)) is None
    assert stock_calls() > stock


def test_workload_has_every_row_range_of_every_phase(model: ref.ReferenceModel, pool: ref.PagedPool) -> None:
    """Decode of one request and of batches, verification and drafts of one and of many, long and short prefill."""
    ranges = ref.serve_workload(model, pool, WORK).row_ranges()
    assert {phase: set(calls) for phase, calls in ranges.items()} == {
        Phase.DECODE: {"1", "2..8", "9..192"},
        Phase.VERIFY: {"2..8", "9..192"},
        Phase.DRAFT: {"2..8", "9..192"},
        Phase.PREFILL: {"9..192", ">192"},
    }
    assert [ref.row_range(rows) for rows in (1, 2, 8, 9, 192, 193)] == ["1", "2..8", "2..8", "9..192", "9..192", ">192"]


def test_phases_and_rows_reach_the_projection(model: ref.ReferenceModel, pool: ref.PagedPool) -> None:
    """Each forward of each layer is one call with the phase that the engine is in."""
    Reclaimer().reclaim(model)
    before = counters.calls.snapshot()
    run = ref.serve_workload(model, pool, WORK)
    counted: dict[str, int] = {}
    for (path, phase), calls in counters.calls.snapshot().items():
        counted[phase] = counted.get(phase, 0) + calls - before.get((path, phase), 0)
    layers = {Phase.DECODE: 2, Phase.VERIFY: 2, Phase.DRAFT: 1, Phase.PREFILL: 2}
    assert {phase: calls for phase, calls in counted.items() if calls} == {
        phase.value: layers[phase] * sum(run.rows[phase].values()) for phase in Phase
    }


def test_comparison_of_runs_sees_one_bit(model: ref.ReferenceModel, pool: ref.PagedPool) -> None:
    """A score that differs in its last bit, a token, a missing request: each is named; -0.0 is not +0.0."""
    run = ref.serve_workload(model, pool, WORK)
    flipped = [logits.clone() for logits in run.logits]
    flipped[3].view(torch.int32)[1, 7] ^= 1
    assert "request 3, token 1: the score of 7" in (run.first_difference(replace(run, logits=tuple(flipped))) or "")
    zeros = [torch.zeros_like(logits) for logits in run.logits]
    zero, negative = replace(run, logits=tuple(zeros)), replace(run, logits=tuple(-logits for logits in zeros))
    assert zero.first_difference(negative) is not None
    other = ((0,) * len(run.outputs[0]), *run.outputs[1:])
    assert "request 0 chose other tokens" in (run.first_difference(replace(run, outputs=other)) or "")
    shorter = replace(run, outputs=run.outputs[1:], logits=run.logits[1:])
    assert run.first_difference(shorter) == f"{len(run.outputs)} requests against {len(run.outputs) - 1}"


def test_pool_takes_freed_bytes_and_gives_them_back(measured: ref.ReferenceModel, pool: ref.PagedPool) -> None:
    """The pool grows by the whole pages in the net bytes, and is what it was after the restore."""
    manager = Reclaimer(pool=pool)
    report = manager.reclaim(measured)
    tokens = NET_BYTES // (16 * 384) * 16
    assert report.net_bytes == NET_BYTES
    assert report.pool is not None
    assert (report.pool.tokens_before, report.pool.tokens_after) == (1024, 1024 + tokens)
    assert (report.pool.limited_by, report.pool.head_room_bytes) == ("memory", NET_BYTES - tokens * 384)
    assert pool.capacity_tokens == 1024 + tokens
    manager.restore(measured)
    assert pool.capacity_tokens == 1024
    pool.check_integrity()
    manager.check_integrity()


def test_pinned_pool_keeps_its_size_and_says_so(measured: ref.ReferenceModel) -> None:
    """The operator's size stands: no tokens gained, the bytes are head-room."""
    pool = ref.PagedPool(CONFIG, capacity_tokens=256, pinned=True)
    report = Reclaimer(pool=pool).reclaim(measured)
    assert report.pool is not None
    assert (report.pool.tokens_gained, report.pool.limited_by) == (0, "pin")
    assert report.pool.head_room_bytes == NET_BYTES


def test_second_reclaim_books_what_it_released_itself(measured: ref.ReferenceModel) -> None:
    """A layer that comes later adds its own net bytes to the engine's book; twins of earlier runs cost nothing more."""
    adapter, manager = ref.ReferenceAdapter(measured), Reclaimer()
    one = measured.layers[0].attn
    stock, one.__class__ = type(one), OwnReader
    operate.reclaim(manager, adapter)
    assert adapter.released_bytes == NET_BYTES * 2 // 3
    one.__class__ = stock
    operate.reclaim(manager, adapter)
    assert adapter.released_bytes == NET_BYTES
    operate.restore(manager, adapter)
    assert adapter.released_bytes == 0


def test_grown_pool_serves_more_requests_at_once(measured: ref.ReferenceModel) -> None:
    """Requests that waited for pages are in flight after the reclaim, in the middle of serving."""
    pool = ref.PagedPool(CONFIG, capacity_tokens=64)
    server = ref.Server(measured, pool)
    requests = [server.submit(prompt, 20) for prompt in PROMPTS]
    server.step()
    assert (server.running, server.waiting) == (2, 3)
    with server.safe_point():
        Reclaimer(pool=pool).reclaim(measured)
    server.step()
    assert (server.running, server.waiting) == (5, 0)
    server.run()
    assert [len(request.result(0)) for request in requests] == [20] * 5


@pytest.mark.parametrize("drafts", [0, 3])
def test_reclaim_and_restore_between_any_two_steps_change_no_bit(
    model: ref.ReferenceModel, pool: ref.PagedPool, drafts: int
) -> None:
    """With five requests in flight, weights come and go after every step; the scores are those of bf16 throughout."""
    expected = bits(serve(model, pool, PROMPTS, 8, drafts))
    manager = Reclaimer(pool=pool)
    server = ref.Server(model, pool, draft_tokens=drafts, max_running=len(PROMPTS))
    adapter = ref.ReferenceAdapter(model, pool, server)
    requests = [server.submit(prompt, 8) for prompt in PROMPTS]
    turns = 0
    while server.step():
        with adapter.safe_point():
            report = manager.restore(model) if turns % 2 else manager.reclaim(model)
        assert set(states(report).values()) == {State.RESTORED if turns % 2 else State.RECLAIMED}
        manager.check_integrity()
        turns += 1
    assert turns > 2
    assert bits(requests) == expected


def test_restore_leaves_pages_in_use_alone(measured: ref.ReferenceModel) -> None:
    """A restore while requests hold grown pages brings the weights back, keeps the pages, and changes no bit."""
    expected = bits(serve(measured, ref.PagedPool(CONFIG, capacity_tokens=256), PROMPTS[:2], 30))
    pool = ref.PagedPool(CONFIG, capacity_tokens=64, paging=ref.Paging(extent_tokens=32))
    manager = Reclaimer(pool=pool)
    manager.reclaim(measured)
    server = ref.Server(measured, pool)
    requests = [server.submit(prompt, 30) for prompt in PROMPTS[:2]]
    server.step()
    assert pool.used_tokens > 64
    with server.safe_point():
        report = manager.restore(measured)
    assert states(report) == dict.fromkeys(WO_A, State.RESTORED)
    server.run()
    assert bits(requests) == expected
    pool.check_integrity()


@pytest.mark.parametrize("held", [True, False])
def test_threads_serve_while_another_reclaims_and_restores(
    model: ref.ReferenceModel, pool: ref.PagedPool, *, held: bool
) -> None:
    """Two servers answer in threads of their own while weights come and go, at safe points or in mid-step."""
    expected = [bits(serve(model, pool, PROMPTS, 8, drafts)) for drafts in (0, 3)]
    manager = Reclaimer(pool=pool)
    servers = [ref.Server(model, pool, draft_tokens=drafts, max_running=5) for drafts in (0, 3)]
    rounds, failures = 2, []

    def work(index: int) -> None:
        server = servers[index]
        for turn in range(rounds):
            requests = [server.submit(prompt, 8) for prompt in PROMPTS]
            server.run()
            if bits(requests) != expected[index]:
                failures.append((index, turn))

    threads = [threading.Thread(target=work, args=(index,)) for index in range(2)]
    for thread in threads:
        thread.start()
    operations = 0
    while any(thread.is_alive() for thread in threads):
        operation = manager.restore if operations % 2 else manager.reclaim
        if held:
            with servers[0].safe_point(), servers[1].safe_point():
                report = operation(model)
            assert set(states(report).values()) == {State.RESTORED if operations % 2 else State.RECLAIMED}
        else:
            operation(model)
        manager.check_integrity()
        operations += 1
    for thread in threads:
        thread.join(WAIT)
    assert operations > 2
    assert failures == []
    assert pool.used_tokens == 0


def test_second_load_replaces_reclaimed_weights(model: ref.ReferenceModel, pool: ref.PagedPool, tmp_path: Path) -> None:
    """The engine's own loaders write new weights through the tags; they serve, and can be reclaimed again."""
    other = ref.write_random_checkpoint(tmp_path / "other", CONFIG, seed=8)
    expected = bits(serve(ref.load_model(other), pool, PROMPTS, 6, 3))
    manager = Reclaimer()
    manager.reclaim(model)
    with Checkpoint(other) as opened:
        ref.load_weights(model, ref.weights(opened))
    assert bits(serve(model, pool, PROMPTS, 6, 3)) == expected
    assert states(manager.reclaim(model)) == dict.fromkeys(WO_A, State.RECLAIMED)
    assert bits(serve(model, pool, PROMPTS, 6, 3)) == expected
    manager.check_integrity()


def test_load_that_fails_half_way_serves_old_weights_exactly(model: ref.ReferenceModel, pool: ref.PagedPool) -> None:
    """A tensor of the wrong shape stops a reload: what was not written yet is still served from its twin."""
    expected = bits(serve(model, pool, PROMPTS, 6, 3))
    manager = Reclaimer()
    manager.reclaim(model)
    same = weight_of(model, WO_A[0]).clone()
    broken = [(f"{WO_A[0]}.weight", same), (f"{WO_A[1]}.weight", same[:96])]
    with pytest.raises(ValueError, match="does not fit"):
        ref.load_weights(model, broken)
    assert [is_tag(weight_of(model, layer)) for layer in WO_A] == [False, True, True]
    assert bits(serve(model, pool, PROMPTS, 6, 3)) == expected
    manager.check_integrity()


def test_layer_without_an_exact_twin_is_kept_and_served(checkpoint: Path, pool: ref.PagedPool, tmp_path: Path) -> None:
    """A checkpoint with one layer in random bf16: that layer stays, the others go, the answers are the same."""
    (tensors,) = ref.random_checkpoint_tensors(CONFIG, seed=0, shards=1)
    tensors["layers.1.attn.wo_a.weight"] = weight_of(ref.load_model(checkpoint), WO_A[1]).detach() * 1.01
    del tensors["layers.1.attn.wo_a.scale"]
    model = ref.load_model(write_checkpoint(tmp_path / "mixed", [tensors], CONFIG.to_dict()))
    expected = bits(serve(model, pool, PROMPTS, 6, 3))
    report = Reclaimer().reclaim(model)
    kept = {layer.name: layer.reason for layer in report.layers if layer.state is State.KEPT}
    assert kept == {WO_A[1]: Reason.MISMATCH}
    assert bits(serve(model, pool, PROMPTS, 6, 3)) == expected


@pytest.mark.parametrize("padding", ["zeros", "repeat"])
@pytest.mark.parametrize("rank", [0, 1, 2])
def test_padded_ranks_are_reclaimed_whole(tmp_path: Path, rank: int, padding: str) -> None:
    """Eight groups on three ranks: every rank's weights have twins, also where all groups are padding."""
    eight = replace(CONFIG, num_attention_heads=16, o_groups=8, num_hidden_layers=1)
    path = ref.write_random_checkpoint(tmp_path / "eight", eight, seed=5)
    model = ref.load_model(path, parallel=ref.TensorParallel(rank, 3, padding))
    pool = ref.PagedPool(eight, capacity_tokens=512)
    expected = bits(serve(model, pool, PROMPTS, 4, 3))
    report = Reclaimer().reclaim(model)
    assert {layer.state for layer in report.layers} == {State.RECLAIMED}
    assert report.gross_bytes == 2 * 4 * 64 * 128 * 2
    assert bits(serve(model, pool, PROMPTS, 4, 3)) == expected


def test_workload_needs_the_room_that_it_says(model: ref.ReferenceModel) -> None:
    """With less room batches would depend on the pool, so the run is refused."""
    needed = WORK.tokens_needed(16)
    ref.serve_workload(model, ref.PagedPool(CONFIG, capacity_tokens=needed), WORK)
    with pytest.raises(PoolError, match=f"needs {needed} free tokens"):
        ref.serve_workload(model, ref.PagedPool(CONFIG, capacity_tokens=needed - 16), WORK)


def test_workload_reports_progress_and_lets_others_in(model: ref.ReferenceModel, pool: ref.PagedPool) -> None:
    """Requests done only grow, up to all of them, and between steps requests are in flight."""
    seen: list[tuple[int, int]] = []
    running: list[int] = []
    ref.serve_workload(
        model,
        pool,
        WORK,
        progress=lambda done, total: seen.append((done, total)),
        between_steps=lambda server: running.append(server.running),
    )
    assert seen == sorted(seen)
    assert seen[-1] == (WORK.requests, WORK.requests)
    assert max(running) == 16
