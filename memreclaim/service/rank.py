"""Starting everything that a rank runs beside its engine: HTTP, the desk's worker, the audit, the latency probe.

An engine that owns a loop calls :meth:`RankService.poll` at its safe points; for others a worker thread asks the
adapter for one.
"""

from __future__ import annotations

import threading
import time
from typing import TYPE_CHECKING, Any

from memreclaim import events
from memreclaim.audit import Auditor
from memreclaim.engines import operate
from memreclaim.errors import EngineError
from memreclaim.journal import triggered_by
from memreclaim.observe import metrics
from memreclaim.observe.probe import Probe
from memreclaim.rank import Rank
from memreclaim.service.app import RankApp
from memreclaim.service.desk import BusyError, Desk
from memreclaim.service.thread import HttpThread

if TYPE_CHECKING:
    from memreclaim.audit import Source
    from memreclaim.engines.base import EngineAdapter
    from memreclaim.rank_snapshot import Identity
    from memreclaim.reclaimer import Reclaimer
    from memreclaim.service.settings import ServiceSettings
    from memreclaim.snapshot import Report
    from memreclaim_kernels.plan import Stock

_TICK_SECONDS = 1.0
"""How often the worker looks at its clocks; an idle wake-up costs about 20 us."""


class RankService:
    """What runs beside one rank. Made by :func:`start_rank_service`."""

    def __init__(  # noqa: PLR0913  what differs between engines
        self,
        rank: Rank,
        adapter: EngineAdapter,
        settings: ServiceSettings,
        source: Source | None,
        *,
        worker: bool,
        stock: Stock = "bmm",
    ) -> None:
        """Put the parts together; nothing runs yet."""
        self.rank, self.adapter, self.settings = rank, adapter, settings
        self.desk = Desk(
            {"reclaim": self._reclaim, "restore": self._restore, "audit": self._audit, "rebuild": self._rebuild},
            rank.journal,
        )
        self.quiet = threading.RLock()
        """While somebody holds it, no probe and no step of an audit runs.

        Reclaims hold it, or a probe's temporaries would be taken for memory that they used; engines hold it while they
        capture CUDA graphs, which an allocation by another thread would break.
        """
        self.auditor = Auditor(
            rank,
            quiet=self.quiet,
            interval_seconds=settings.audit_seconds,
            bytes_per_second=settings.audit_bytes_per_second,
            source=source,
            repair=self._ask_for_rebuild,
        )
        self.probe = Probe(rank, settings.probe_seconds, stock)
        self._mirror = metrics.mirror_of(rank) if metrics.multiprocess() else None
        self._http = HttpThread(RankApp(rank, self.desk, settings).asgi, settings)
        self._stop = threading.Event()
        self._probed = time.monotonic()
        self._polls = worker
        self._worker = threading.Thread(target=self._work, name="memreclaim-worker", daemon=True)

    @property
    def url(self) -> str:
        """Where it listens."""
        return self._http.url

    def start(self) -> None:
        """Run."""
        self._http.start()
        self.auditor.start()
        self._worker.start()
        events.emit("info", "service_started", url=self.url)

    def close(self) -> None:
        """End all threads; the engine is left as it is."""
        self._stop.set()
        self.desk.close()
        self.auditor.close()
        self._worker.join()
        self._http.close()
        self.rank.close()

    def reclaim_at_start(self) -> None:
        """The first reclaim, by the operator's settings; called before serving, or at a safe point.

        What it raises is raised, after the rank was marked as failed.
        """
        try:
            with triggered_by("startup"):
                self._reclaim()
        except Exception as error:
            self.rank.failure = f"{type(error).__name__}: {error}"
            raise
        finally:
            self.rank.started = True
            self.update()

    def poll(self) -> None:
        """Run what waits on the desk, in this thread, which must be at a safe point. Free when nothing waits.

        An engine whose own loop calls this is sampled here as well: no other thread may use its device while it sizes
        its pool or captures CUDA graphs.
        """
        if self.desk.pending:
            self.desk.poll()
            self.update()
        if not self._polls:
            self._sample()

    def update(self) -> None:
        """Write the metrics of multiprocess mode; nothing to do otherwise."""
        if self._mirror is not None:
            self._mirror.update()

    def _work(self) -> None:
        """The worker: asks the engine for a safe point when there is work, samples latency, writes metrics to files."""
        while not self._stop.is_set():
            if not self._polls:
                self._stop.wait(_TICK_SECONDS)
            elif self.desk.wait(_TICK_SECONDS) and not self._stop.is_set():
                try:
                    with self.adapter.safe_point():
                        self.poll()
                except EngineError as error:
                    self.rank.journal.add("internal_errors_total", "operation")
                    events.emit("error", "safe_point_refused", error=str(error))
            if self._polls:
                self._sample()
            self.update()

    def _sample(self) -> None:
        now = time.monotonic()
        if not self.settings.probe_seconds or now - self._probed < self.settings.probe_seconds:
            return
        self._probed = now
        try:
            with self.quiet:
                if self.rank.journal.running is None:
                    self.probe.sample()
        except Exception as error:  # noqa: BLE001 - counted and logged; a probe must never stop a rank
            self.rank.journal.add("internal_errors_total", "probe")
            events.emit("warning", "probe_failed", error=f"{type(error).__name__}: {error}")

    def _reclaim(self) -> dict[str, Any]:
        with self.quiet:
            reports = operate.reclaim(self.rank.reclaimer, self.adapter)
        self.auditor.proven()
        return _summary(reports)

    def _restore(self) -> dict[str, Any]:
        with self.quiet:
            return _summary(operate.restore(self.rank.reclaimer, self.adapter))

    def _audit(self) -> dict[str, Any]:
        verdict = self.auditor.audit().to_dict()
        return {**verdict, "rebuilt": list(self.auditor.rebuild())} if verdict["damaged"] else verdict

    def _rebuild(self) -> dict[str, Any]:
        return {"rebuilt": list(self.auditor.rebuild())}

    def _ask_for_rebuild(self) -> None:
        try:
            self.desk.submit("rebuild")
        except BusyError as error:
            # The operation that is in the way may drop or restore the twin; the next audit looks again.
            events.emit("warning", "rebuild_postponed", why=str(error))


def start_rank_service(  # noqa: PLR0913  what differs between engines
    reclaimer: Reclaimer,
    adapter: EngineAdapter,
    settings: ServiceSettings,
    *,
    identity: Identity | None = None,
    ranks: int = 1,
    source: Source | None = None,
    worker: bool = True,
    stock: Stock = "bmm",
) -> RankService:
    """Start a rank's service; ``worker=False`` when the engine's own loop calls :meth:`RankService.poll`.

    ``source`` gives exact weights for damaged twins, ``stock`` is the engine's for the latency probe. Raises
    :class:`memreclaim.service.thread.ServiceError` when the address is taken.
    """
    root = adapter.models()[0].root
    device = next(iter(root.parameters())).device
    rank = Rank(reclaimer, identity, device=device, ranks=ranks, pool=adapter.pool)
    service = RankService(rank, adapter, settings, source, worker=worker, stock=stock)
    service.start()
    return service


def _summary(reports: tuple[Report, ...]) -> dict[str, Any]:
    return {
        "layers": sum(len(report.layers) for report in reports),
        "gross_bytes": sum(report.gross_bytes for report in reports),
        "net_bytes": sum(report.net_bytes for report in reports),
        "seconds": round(sum(report.seconds for report in reports), 3),
    }
