"""Twins are compared with their fingerprints; damage is seen and repaired, or turns the rank unready."""

from __future__ import annotations

import threading
import time
from dataclasses import replace
from typing import TYPE_CHECKING

import pytest
import torch
from observed import QUIET, Engine, engine
from service_calls import get, until

from memreclaim import Twin
from memreclaim.audit import Auditor
from memreclaim.fingerprint import SLAB_BYTES, Fingerprint, fingerprint
from memreclaim.rebuild import checkpoint_source

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = pytest.mark.cpu

LAYER = "target/layers.1.attn.wo_a"


def damage(made: Engine, index: int = 1) -> Twin:
    """Flip one bit of a served twin."""
    backing = made.reclaimer.ledger.entries()[index].backing
    assert backing is not None
    twin = backing.twin
    assert twin is not None
    twin.packed.view(-1)[77] ^= 4
    return twin


def test_every_single_byte_counts() -> None:
    """Any change of any one byte changes the fingerprint of its slab, codes and exponents alike."""
    generator = torch.Generator().manual_seed(0)
    packed = torch.randint(0, 256, (1, 32, 33, 512), dtype=torch.uint8, generator=generator)
    twin = Twin(packed, torch.randint(100, 120, (1, 16, 33), dtype=torch.uint8, generator=generator))
    noted = fingerprint(twin)
    assert len(noted.slabs) == -(-packed.numel() // SLAB_BYTES) + 1
    for part in (twin.packed, twin.exponents):
        flat = part.view(-1)
        for position in torch.randint(0, flat.numel(), (40,), generator=generator).tolist():
            before = int(flat[position])
            flat[position] = before ^ 0x10
            assert noted.differing(fingerprint(twin)) == 1, position
            flat[position] = before
    assert fingerprint(twin) == noted


def test_swapped_words_are_seen() -> None:
    """The order of bytes matters, not only their sum."""
    packed = torch.zeros((1, 2, 1, 512), dtype=torch.uint8)
    packed.view(-1)[:8], packed.view(-1)[8:16] = 1, 2
    other = packed.clone()
    other.view(-1)[:8], other.view(-1)[8:16] = 2, 1
    exponents = torch.full((1, 1, 1), 120, dtype=torch.uint8)
    assert fingerprint(Twin(packed, exponents)) != fingerprint(Twin(other, exponents))


def test_clean_audit_reads_every_byte(checkpoint: Path) -> None:
    """All served twins, whole; the time stamp moves."""
    with engine(str(checkpoint)) as made:
        before = made.service.rank.audit.last_timestamp
        verdict = made.service.auditor.audit()
        twins = sum(layer.twin_bytes for layer in made.reclaimer.ledger.layers())
        assert (verdict.layers, verdict.n_bytes, verdict.damaged) == (3, twins, {})
        assert made.service.rank.audit.last_timestamp >= before > 0


def test_damage_without_a_checkpoint_makes_the_rank_unready(checkpoint: Path) -> None:
    """The layer is named, metrics say how many elements, and readiness is gone for good."""
    with engine(str(checkpoint)) as made:
        damage(made)
        assert made.service.auditor.audit().damaged == {LAYER: 1}
        assert made.service.auditor.rebuild() == ()
        url = made.service.url
        assert get(url, "/readyz") == (503, {"ready": False, "state": "failed"})
        (bad,) = [layer for layer in until(lambda: get(url, "/v1/layers")[1]["layers"]) if layer["damaged"]]
        assert (bad["state"], bad["mismatched_elements"]) == ("reclaimed", 1)


def test_damage_is_rebuilt_in_place_from_the_checkpoint(checkpoint: Path) -> None:
    """The same bytes at the same address, and the rank is ready again."""
    with engine(str(checkpoint), source=checkpoint_source(checkpoint)) as made:
        twin = made.reclaimer.ledger.entries()[1].backing.twin  # type: ignore[union-attr]
        assert twin is not None
        noted, address = fingerprint(twin), twin.packed.data_ptr()
        damage(made)
        made.service.auditor.audit()
        assert made.service.rank.snapshot().ready is False
        assert made.service.auditor.rebuild() == (LAYER,)
        assert (fingerprint(twin), twin.packed.data_ptr()) == (noted, address)
        assert made.service.rank.snapshot().ready is True
        assert made.service.rank.snapshot().counts["operations_total", "audit", "api", "mismatch"] == 1


def test_nothing_is_read_while_a_twin_is_rebuilt(checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The rebuild holds what keeps the audit and the probe away while it writes."""
    held = []
    stock = Twin.overwrite

    def overwrite(twin: Twin, other: Twin) -> None:
        other_thread = threading.Thread(target=lambda: held.append(not quiet.acquire(blocking=False)))
        other_thread.start()
        other_thread.join()
        stock(twin, other)

    monkeypatch.setattr(Twin, "overwrite", overwrite)
    with engine(str(checkpoint), source=checkpoint_source(checkpoint)) as made:
        quiet = made.service.quiet
        damage(made)
        made.service.auditor.audit()
        assert made.service.auditor.rebuild() == (LAYER,)
    assert held == [True]


def test_source_with_other_bits_is_not_taken(checkpoint: Path) -> None:
    """A checkpoint that was replaced since cannot repair: the twin stays damaged and the rank unready."""

    def other(_entry: object) -> torch.Tensor:
        return torch.ones((128, 128), dtype=torch.bfloat16)

    with engine(str(checkpoint), source=other) as made:
        damage(made)
        made.service.auditor.audit()
        assert made.service.auditor.rebuild() == ()
        assert made.service.rank.snapshot().ready is False


def test_background_audit_repairs_by_itself(checkpoint: Path) -> None:
    """The timer finds the damage, asks for a safe point, and the twin is whole again without anybody asking."""
    settings = replace(QUIET, audit_seconds=0.05)
    with engine(str(checkpoint), settings, source=checkpoint_source(checkpoint)) as made:
        damage(made)
        until(lambda: any(event.event == "twin_rebuilt" for event in made.service.rank.snapshot().events))
        until(lambda: made.service.rank.snapshot().ready)
        assert made.service.rank.snapshot().counts["operations_total", "audit", "timer", "mismatch"] == 1


def test_cap_on_bytes_per_second_holds(checkpoint: Path) -> None:
    """An audit within the cap takes at least its bytes divided by the rate."""
    with engine(str(checkpoint)) as made:
        twins = sum(layer.twin_bytes for layer in made.reclaimer.ledger.layers())
        slow = Auditor(made.service.rank, interval_seconds=0, bytes_per_second=twins * 5)
        started = time.monotonic()
        slow.audit(capped=True)
        assert time.monotonic() - started >= 0.2


def test_restored_layers_are_not_audited(checkpoint: Path) -> None:
    """There is nothing left to compare, and that is no damage."""
    with engine(str(checkpoint)) as made:
        made.reclaimer.restore(made.model)
        assert made.service.auditor.audit().n_bytes == 0


def test_fingerprints_of_equal_length_are_compared() -> None:
    """Fingerprints of different shapes cannot be mixed up silently."""
    with pytest.raises(ValueError, match="zip"):
        Fingerprint((1, 2)).differing(Fingerprint((1,)))
