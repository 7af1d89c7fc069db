"""What the service measures on a GPU: fingerprints, latency, memory."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
import torch

from memreclaim import Reclaimer, Twin, build_twin, figures
from memreclaim.audit import Auditor
from memreclaim.engines import reference as ref
from memreclaim.fingerprint import fingerprint
from memreclaim.observe.probe import BUCKETS, Probe
from memreclaim.rank import Rank
from memreclaim.service.demo import first_weight

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = pytest.mark.gpu


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> ref.ReferenceModel:
    """The demo's model on the GPU."""
    path: Path = tmp_path_factory.mktemp("demo") / "checkpoint"
    config = ref.ModelConfig.demo()
    ref.write_random_checkpoint(path, config)
    return ref.load_model(path, device="cuda")


def test_fingerprint_is_the_same_on_both_devices(model: ref.ReferenceModel) -> None:
    """A twin that is copied keeps its fingerprint."""
    weight, groups = first_weight(model)
    twin = build_twin(weight, groups=groups)
    assert fingerprint(Twin(twin.packed.cpu(), twin.exponents.cpu())) == fingerprint(twin)


def test_audit_finds_one_bit_in_the_gpus_memory(model: ref.ReferenceModel) -> None:
    """Baselines, reclaim, samples, a clean audit, and one after a bit was flipped."""
    reclaimer = Reclaimer()
    rank = Rank(reclaimer, device="cuda")
    probe = Probe(rank, 30.0)
    probe.baseline(*first_weight(model))
    assert set(rank.baselines.seconds) == {(path, bucket[0]) for path in ("stock", "twin") for bucket in BUCKETS}
    assert all(0 < seconds < 0.05 for seconds in rank.baselines.seconds.values())
    reclaimer.reclaim(model)
    for _ in range(2 * len(BUCKETS)):
        probe.sample()
    assert sum(h.count for key, h in rank.journal.histograms().items() if key[0] == "kernel_duration_seconds") == 8
    auditor = Auditor(rank, interval_seconds=0, bytes_per_second=1 << 30)
    clean = auditor.audit(capped=True)
    assert (clean.damaged, clean.n_bytes) == ({}, sum(layer.twin_bytes for layer in reclaimer.ledger.layers()))
    backing = reclaimer.ledger.entries()[2].backing
    assert backing is not None
    assert backing.twin is not None
    backing.twin.packed.view(-1)[123_456] ^= 1
    assert auditor.audit().damaged == {"target/layers.2.attn.wo_a": 1}
    assert rank.snapshot().ready is False


def test_memory_figures_come_from_the_driver_and_the_allocator() -> None:
    """Free and total, allocated and reserved; total is the device's own."""
    device = torch.device("cuda")
    torch.zeros(1, device=device)
    found = {figure.kind: figure.n_bytes for figure in figures.memory(device) if figure.source == "cuda"}
    assert found["total"] == torch.cuda.mem_get_info(device)[1]
    assert 0 < found["torch_allocated"] <= found["torch_reserved"] < found["total"]
