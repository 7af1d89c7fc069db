"""Which calls the latency probe makes, and which it leaves alone."""

from __future__ import annotations

import threading
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest
from core.models import reclaimer, stack
from observed import CONFIG, QUIET

from memreclaim import Reclaimer
from memreclaim.engines import reference as ref
from memreclaim.observe.probe import BUCKETS, SHARE, Probe
from memreclaim.rank import Rank
from memreclaim.rank_snapshot import Baselines
from memreclaim.service.rank import start_rank_service
from memreclaim_kernels import ops

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

pytestmark = pytest.mark.cpu

LABELS = [label for label, _, _ in BUCKETS]
AMPLE = 3600.0 / SHARE
"""Seconds between samples when a call may take an hour."""


@pytest.fixture
def rank() -> Iterator[Rank]:
    """Two reclaimed layers, and no baseline."""
    rec = reclaimer()
    rec.reclaim(stack(2))
    made = Rank(rec)
    yield made
    made.close()


def samples(rank: Rank) -> dict[str, int]:
    """How often each row bucket was timed."""
    found = rank.journal.histograms().items()
    return {key[2]: one.count for key, one in found if key[0] == "kernel_duration_seconds"}


def takes(seconds: float) -> Callable[..., float]:
    """A clock by which every call takes ``seconds``."""
    return lambda _self, call: (call(), seconds)[1]


def test_without_baselines_every_bucket_is_sampled(rank: Rank) -> None:
    """A cost that nobody knows is measured; it does not mean that the call is too slow."""
    probe = Probe(rank, AMPLE)
    for _ in range(2 * len(BUCKETS)):
        probe.sample()
    assert samples(rank) == dict.fromkeys(LABELS, 2)


def test_a_bucket_that_costs_too_much_is_measured_once(rank: Rank, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is judged by what was measured, and larger buckets are not tried."""
    monkeypatch.setattr(Probe, "_time", takes(0.2))
    probe = Probe(rank, 0.1 / SHARE)
    for _ in range(5):
        probe.sample()
    assert samples(rank) == {LABELS[0]: 1}


def test_a_known_cost_is_not_measured_again(rank: Rank, monkeypatch: pytest.MonkeyPatch) -> None:
    """A baseline that is too slow rules its bucket out from the start, and those of more rows."""
    monkeypatch.setattr(Probe, "_time", takes(0.05))
    rank.baselines = Baselines({("twin", LABELS[0]): 0.05, ("twin", LABELS[1]): 0.2})
    probe = Probe(rank, 0.1 / SHARE)
    for _ in range(5):
        probe.sample()
    assert samples(rank) == {LABELS[0]: 5}


@pytest.mark.parametrize(("numerics", "stock"), [("identical", "sglang"), ("fused", "bmm")])
def test_probe_asks_for_the_plan_of_the_engines_calls(
    monkeypatch: pytest.MonkeyPatch, numerics: str, stock: Any
) -> None:
    """Numerics are the layer's, the stock path is the engine's; so for baselines too."""
    asked = []
    plan_for = ops.plan_for

    def spy(*args: Any, **kwargs: Any) -> Any:
        asked.append((kwargs["numerics"], kwargs["stock"]))
        return plan_for(*args, **kwargs)

    rec, model = reclaimer(numerics=numerics), stack(1)
    rank = Rank(rec)
    probe = Probe(rank, AMPLE, stock)
    monkeypatch.setattr(ops, "plan_for", spy)
    probe.baseline(model.layers[0].wo_a.weight, 2)
    rec.reclaim(model)
    probe.sample()
    rank.close()
    assert set(asked) == {(numerics, stock)}
    assert len(asked) == len(BUCKETS) + 1


def test_engine_that_polls_itself_is_sampled_by_its_own_thread(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Only there is it known that no pool is sized and no graph captured; the stock path is the one it gave."""
    monkeypatch.setattr("memreclaim.service.rank._TICK_SECONDS", 0.001)
    model = ref.load_model(ref.write_random_checkpoint(tmp_path / "checkpoint", CONFIG))
    manager = Reclaimer()
    manager.reclaim(model)
    settings = replace(QUIET, probe_seconds=1e-6)
    adapter = ref.ReferenceAdapter(model, ref.PagedPool(CONFIG, capacity_tokens=256))
    service = start_rank_service(manager, adapter, settings, worker=False, stock="sglang")
    try:
        service.probe._longest = 10.0
        ticked = threading.Event()
        monkeypatch.setattr(service, "update", ticked.set)
        assert ticked.wait(10)
        assert samples(service.rank) == {}
        service.poll()
        assert sum(samples(service.rank).values()) == 1
        assert service.probe.stock == "sglang"
    finally:
        service.close()
