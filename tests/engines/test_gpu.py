"""The embedded engine on a GPU: the demo's shapes, kernels instead of decoding, memory by the allocator's count."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
import torch
from engine_runs import bits, serve

from memreclaim import Reclaimer
from memreclaim.engines import reference as ref
from memreclaim.states import State

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = pytest.mark.gpu

DEMO = ref.ModelConfig.demo()
WORK = ref.workload(DEMO, seed=0)
MIB = 1 << 20


@pytest.fixture(scope="module")
def demo_checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Five layers of 16 MiB."""
    return ref.write_random_checkpoint(tmp_path_factory.mktemp("engine") / "demo", DEMO)


@pytest.fixture
def demo(demo_checkpoint: Path) -> ref.ReferenceModel:
    """The demo's model on the GPU."""
    return ref.load_model(demo_checkpoint, device="cuda")


def test_weights_on_the_gpu_are_those_on_the_cpu(demo: ref.ReferenceModel, demo_checkpoint: Path) -> None:
    """Loading is by copying: the device changes no bit."""
    on_cpu = ref.load_model(demo_checkpoint)
    for (name, one), (_, other) in zip(demo.named_parameters(), on_cpu.named_parameters(), strict=True):
        assert torch.equal(one.cpu().view(torch.int16), other.view(torch.int16)), name


def test_reclaimed_and_restored_weights_give_the_same_bits(demo: ref.ReferenceModel) -> None:
    """Every score of the demo's workload is the same on bf16, on twins and on restored weights; the pool grows."""
    pool = ref.PagedPool(DEMO, capacity_tokens=1024, device="cuda")
    reclaimer = Reclaimer(pool=pool)
    before = ref.serve_workload(demo, pool, WORK)
    assert before.first_difference(ref.serve_workload(demo, pool, WORK)) is None
    report = reclaimer.reclaim(demo)
    assert [layer.state for layer in report.layers] == [State.RECLAIMED] * 5
    assert report.gross_bytes == 80 * MIB
    assert report.freed.allocator is not None
    # Tables and buffers that kernels keep from their first use on count against what was freed.
    assert report.gross_bytes - MIB < report.freed.allocator <= report.gross_bytes
    assert report.pool is not None
    # The driver counts what CUDA loaded meanwhile as used: the pool is offered what all measures agree on.
    offered = report.freed.least - report.twin_bytes
    taken = int(report.pool.tokens_gained * pool.bytes_per_token)
    assert offered == taken + report.pool.head_room_bytes
    assert 0 < taken <= report.net_bytes
    assert before.first_difference(ref.serve_workload(demo, pool, WORK)) is None
    reclaimer.restore(demo)
    assert before.first_difference(ref.serve_workload(demo, pool, WORK)) is None
    reclaimer.check_integrity()
    pool.check_integrity()


def test_reclaim_between_steps_changes_no_bit(demo: ref.ReferenceModel) -> None:
    """Weights come and go at safe points with eight requests in flight, and the scores are those of bf16."""
    pool = ref.PagedPool(DEMO, capacity_tokens=1024, device="cuda")
    prompts = ref.burst(DEMO, 8, seed=2)
    expected = bits(serve(demo, pool, prompts, 12, 4))
    reclaimer = Reclaimer(pool=pool)
    server = ref.Server(demo, pool, draft_tokens=4, max_running=8)
    requests = [server.submit(prompt, 12) for prompt in prompts]
    turns = 0
    while server.step():
        with server.safe_point():
            report = reclaimer.restore(demo) if turns % 2 else reclaimer.reclaim(demo)
        assert {layer.state for layer in report.layers} == {State.RESTORED if turns % 2 else State.RECLAIMED}
        turns += 1
    assert turns > 2
    assert bits(requests) == expected


def test_shrunk_pool_returns_its_memory() -> None:
    """What the pool grew by is off the allocator's count after shrinking."""
    pool = ref.PagedPool(DEMO, capacity_tokens=1024, device="cuda")
    before = torch.cuda.memory_allocated()
    gained = pool.grow(40 * MIB)
    assert torch.cuda.memory_allocated() - before == gained * pool.bytes_per_token
    assert pool.shrink(40 * MIB) == gained * pool.bytes_per_token
    assert torch.cuda.memory_allocated() == before
