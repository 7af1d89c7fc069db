"""The object that takes snapshots of one rank.

Metrics, HTTP, the command line and the status page all show the same snapshot, so they can never disagree. Taking one
reads the ledger, the journal and a few memory figures; it starts no kernel and touches no weight.
"""

from __future__ import annotations

import threading
import time
from itertools import count
from typing import TYPE_CHECKING

import torch

from memreclaim import counters, events, figures
from memreclaim.config import Mode
from memreclaim.journal import HOLDING
from memreclaim.rank_snapshot import AuditFigures, Baselines, Build, Identity, PoolFigures, RankSnapshot, RankState
from memreclaim.snapshot import FreedBytes
from memreclaim.states import State

if TYPE_CHECKING:
    from collections.abc import Callable

    from memreclaim.journal import Journal, Key
    from memreclaim.kvpool import KVPool
    from memreclaim.reclaimer import Reclaimer
    from memreclaim.snapshot import LayerReport


class Rank:
    """Takes snapshots of one rank; thread-safe."""

    def __init__(
        self,
        reclaimer: Reclaimer,
        identity: Identity | None = None,
        *,
        device: torch.device | str = "cpu",
        ranks: int = 1,
        pool: Callable[[], KVPool | None] | None = None,
    ) -> None:
        """Look at ``reclaimer``; ``pool`` is asked for the live pool each time (default: the reclaimer's own)."""
        self.reclaimer = reclaimer
        self.identity = identity or Identity()
        self.ranks = ranks
        self.device = torch.device(device)
        self.started = False
        """Set once the first reclaim was tried."""
        self.failure: str | None = None
        """Why this rank must not serve."""
        self.audit = AuditFigures()
        self.baselines = Baselines()
        self._pool = pool or (lambda: reclaimer.pool)
        self._versions = count(1)
        self._build = Build.here(self.device)
        self._lock = threading.Lock()
        self._stop_listening: Callable[[], None] | None = events.listen(self.journal.note)

    @property
    def journal(self) -> Journal:
        """What happened here."""
        return self.reclaimer.journal

    def close(self) -> None:
        """Stop listening to events; snapshots can still be taken."""
        with self._lock:
            if self._stop_listening is not None:
                self._stop_listening()
                self._stop_listening = None

    def snapshot(self) -> RankSnapshot:
        """The rank as it is now."""
        journal, settings = self.journal, self.reclaimer.settings
        layers = self.reclaimer.ledger.layers()
        audit = self.audit
        freed, peak = self._freed(layers)
        return RankSnapshot(
            version=next(self._versions),
            taken_at=time.time(),
            identity=self.identity,
            build=self._build,
            mode=settings.mode.value,
            numerics=settings.numerics.value,
            state=self._state(layers, audit),
            ranks=self.ranks,
            layers=layers,
            freed=freed,
            peak_extra_bytes=peak,
            pool=self._pool_figures(),
            memory=figures.memory(self.device),
            audit=audit,
            baselines=self.baselines,
            counts=journal.counts() | _tallies(),
            histograms=journal.histograms(),
            running=journal.running,
            events=journal.events(),
        )

    def _state(self, layers: tuple[LayerReport, ...], audit: AuditFigures) -> RankState:
        if self.failure is not None or audit.damaged:
            return RankState.FAILED
        if self.reclaimer.settings.mode is Mode.OFF:
            return RankState.OFF
        running = self.journal.running
        if not self.started and (running is not None or not layers):
            return RankState.STARTING
        if running in HOLDING:
            return RankState.WORKING
        return RankState.DEGRADED if any(layer.is_mismatch for layer in layers) else RankState.READY

    def _freed(self, layers: tuple[LayerReport, ...]) -> tuple[FreedBytes, int | None]:
        """What was measured when it was freed, less what came back since."""
        live = sum(layer.gross_bytes for layer in layers if layer.state is State.RECLAIMED)
        found = tuple(self.journal.measurements().values())
        returned = max(0, sum(one.freed.nominal for one in found) - live)

        def left(measured: list[int | None]) -> int | None:
            known = [one for one in measured if one is not None]
            return max(0, sum(known) - returned) if known and len(known) == len(measured) else None

        freed = FreedBytes(
            live, left([one.freed.allocator for one in found]), left([one.freed.device for one in found])
        )
        peaks = [one.peak_extra_bytes for one in found if one.peak_extra_bytes is not None]
        return freed, max(peaks, default=None)

    def _pool_figures(self) -> PoolFigures | None:
        pool, change = self._pool(), self.journal.pool
        if pool is None:
            return None
        tokens = pool.capacity_tokens
        return PoolFigures(
            n_bytes=figures.pool_bytes(pool),
            tokens=tokens,
            gained_tokens=0 if change is None else tokens - change.tokens_before,
            limited_by=pool.limited_by,
            bytes_per_token=pool.bytes_per_token,
            head_room_bytes=0 if change is None else change.head_room_bytes,
        )


def _tallies() -> dict[Key, int]:
    """What is counted where tags are read and projections are routed, under the names of metrics."""
    tallies = {
        "calls_total": counters.calls,
        "materializations_total": counters.materializations,
        "tag_refusals_total": counters.refusals,
    }
    return {(name, *key): n for name, tally in tallies.items() for key, n in tally.snapshot().items()}
