"""The main job: find the weights, prove a twin of each, drop the bf16 bytes, and give them to the KV pool.

One layer at a time: twin, proof and swap of a layer are done before the next layer's twin is allocated, so that the
most extra memory is one twin and 4 MiB. Building all twins first would need half of everything once more, which alone
stopped 3-node boots in the field.
"""

from __future__ import annotations

import threading
import time
from functools import partial
from typing import TYPE_CHECKING

import torch

from memreclaim import discover, events, kvpool, serve, swap
from memreclaim.agree import Terms
from memreclaim.backing import Backing
from memreclaim.config import Mode, OnMismatch, Settings
from memreclaim.errors import NotExact
from memreclaim.fingerprint import Fingerprints
from memreclaim.journal import Journal
from memreclaim.ledger import Ledger
from memreclaim.meter import Change, meter_for
from memreclaim.snapshot import FreedBytes, Report
from memreclaim.states import Reason, State
from memreclaim.twin import build_twin

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping

    from torch import nn

    from memreclaim.discover import Candidate
    from memreclaim.kvpool import KVPool, PoolChange
    from memreclaim.ledger import Entry
    from memreclaim.twin import Twin

TARGET = "target"
_one_at_a_time = threading.RLock()
"""Of the process, not of a reclaimer: two may share a model, and a weight is found and dropped by one of them."""


class Reclaimer:
    """Reclaims, serves and restores the weights of one rank's models; all methods may be called from any thread.

    One operation runs at a time in a process; a second waits for it and then finds the work done.
    """

    def __init__(self, settings: Settings | None = None, pool: KVPool | None = None, registry: object = None) -> None:
        """Work by ``settings``, give freed bytes to ``pool``, and export metrics in ``registry``.

        ``registry`` is a ``prometheus_client`` registry; None exports nothing and does not import prometheus_client.
        """
        self.settings = Settings() if settings is None else settings
        self.ledger = Ledger()
        self.journal = Journal()
        self.fingerprints = Fingerprints()
        self.pool = pool
        self.graphs_captured = False
        """Set by whoever captures CUDA graphs of a model: they hold addresses, so from then on no weight is dropped."""
        if registry is not None:
            from memreclaim.observe.metrics import register

            register(self, registry)

    def reclaim(
        self,
        model: nn.Module,
        *,
        component: str = TARGET,
        prefix: str = "",
        refused: Mapping[str, Reason] | None = None,
        terms: Terms | None = None,
    ) -> Report:
        """Drop every bf16 weight of ``model`` that has an exact twin.

        ``component`` names the model in reports (``target``, ``draft``); only layers whose name starts with ``prefix``
        belong to it, since an engine may hold target and draft in one tree. ``refused`` maps layer names to the reason
        an engine adapter has for keeping them, ``terms`` what else it adds: how ranks agree, how readers are compared.
        Layers that are kept change nothing and raise nothing, except that
        :class:`~memreclaim.errors.NotExact` is raised for the first one without an exact twin under
        ``MEMRECLAIM_ON_MISMATCH=abort``. Whatever is raised, every layer is either whole in bf16 or proven.

        Reclaim before CUDA graphs are captured: a graph holds the weight's address, which nothing in Python shows.
        After a capture set :attr:`graphs_captured`, or name the layers in ``refused``: they are kept then
        (``after_capture``).
        """
        with _one_at_a_time, self.journal.operation("reclaim") as outcome:
            report = _Run(self, model, terms or Terms()).reclaim(component, prefix, refused or {})
            self.journal.measured(component, report)
            outcome.result = "mismatch" if report.mismatched else "ok"
            return report

    def restore(self, model: nn.Module) -> Report:
        """Make every tag of ``model`` its exact bf16 parameter again.

        The pool is asked to give the bytes back first; tokens in use stay, and the weights are restored if memory
        allows.
        """
        with _one_at_a_time, self.journal.operation("restore"):
            report = _Run(self, model, Terms()).restore()
            if report.pool is not None:
                self.journal.pool_changed(report.pool)
            return report

    def check_integrity(self) -> None:
        """Raise :class:`~memreclaim.errors.IntegrityError` when the ledger and the live tensors disagree."""
        self.ledger.check_integrity()


class _Run:
    """One operation on one model, and what it came to."""

    def __init__(self, owner: Reclaimer, model: nn.Module, terms: Terms) -> None:
        self._ledger, self._settings, self._pool = owner.ledger, owner.settings, owner.pool
        self._journal, self._fingerprints, self._captured = owner.journal, owner.fingerprints, owner.graphs_captured
        self._model, self._terms = model, terms
        parameter = next(model.parameters(), None)
        self._meter = meter_for(torch.device("cpu") if parameter is None else parameter.device)
        self._started = time.perf_counter()
        self._gross = self._twins = self._taken = 0

    def reclaim(self, component: str, prefix: str, refused: Mapping[str, Reason]) -> Report:
        """See :meth:`Reclaimer.reclaim`."""
        found = discover.discover(self._model, self._settings.targets)
        candidates = [one for one in found if one.name.startswith(prefix)]
        refused = self._terms.refusals(candidates, refused)
        change = Change(self._meter)
        for candidate in candidates:
            entry = self._ledger.open(component, candidate.name, candidate.sites, candidate.gross_bytes)
            refusal = candidate.refusal or refused.get(candidate.name) or self._policy()
            if refusal is not None:
                self._keep(entry, refusal)
            elif self._one(candidate, entry):
                self._meter.reuse()
        extra = change.peak_extra()
        self._verify_kernels()
        freed = change.freed(self._gross, self._taken)
        pool = None if self._pool is None else kvpool.offer(self._pool, max(0, freed.least - self._twins))
        return self._report("reclaimed", {component}, freed, extra, pool)

    def restore(self) -> Report:
        """See :meth:`Reclaimer.restore`."""
        backings = {id(tag.memreclaim_backing): tag.memreclaim_backing for tag in discover.tags_of(self._model)}
        entries = [entry for entry in self._ledger.entries() if id(entry.backing) in backings]
        needed = sum(entry.weight_bytes - backing.twin.nbytes for entry, backing in _released(entries) if backing.twin)
        pool = None if self._pool is None else kvpool.ask_back(self._pool, needed)
        change = Change(self._meter)
        for backing in backings.values():
            backing.make_dense()
        swap.settle(self._model)
        components = {entry.component for entry in entries}
        return self._report("restored", components, FreedBytes(0, None, None), change.peak_extra(), pool)

    def _policy(self) -> Reason | None:
        """Why nothing may be dropped just now."""
        if self._settings.mode is Mode.OFF:
            return Reason.POLICY
        capturing = torch.cuda.is_available() and torch.cuda.is_current_stream_capturing()
        return Reason.AFTER_CAPTURE if self._captured or capturing else None

    def _one(self, candidate: Candidate, entry: Entry) -> bool:
        """Take one layer as far as the settings go; True when its bf16 bytes are released."""
        try:
            with self._journal.proof():
                built = build_twin(candidate.sites[0].get(), groups=candidate.groups)
            return self._swap(candidate, entry, built)
        except NotExact as error:
            self._keep(entry, error.reason, error)
            if self._settings.on_mismatch is OnMismatch.ABORT:
                raise
        except swap.StillHeldError as error:
            self._keep(entry, Reason.SHARED_STORAGE, error)
        return False

    def _swap(self, candidate: Candidate, entry: Entry, built: Twin) -> bool:
        mode = self._settings.mode
        if mode is Mode.OBSERVE:
            self._ledger.settle(entry, State.PROVEN, Reason.POLICY)
            return False
        twin = self._terms.place(candidate.name, built)
        self._fingerprints.take(twin)
        home = swap.ModelHome(candidate.sites, partial(_tell, self._terms.guard, self._ledger, entry))
        backing = Backing(candidate.name, twin, home, self._settings.numerics.value)
        (swap.drop if mode is Mode.ON else swap.shadow)(candidate, backing)
        state = State.RECLAIMED if mode is Mode.ON else State.PROVEN
        self._ledger.settle(entry, state, backing=backing)
        events.layer_reclaimed(entry)
        if mode is not Mode.ON:
            return False
        self._gross += entry.weight_bytes
        self._twins += twin.nbytes
        # A twin in memory that was set aside for it takes nothing new.
        self._taken += twin.nbytes if twin is built else 0
        return True

    def _keep(self, entry: Entry, reason: Reason, error: NotExact | swap.StillHeldError | None = None) -> None:
        self._ledger.keep(entry, reason, error)
        events.layer_kept(entry, str(error) if error else "")

    def _verify_kernels(self) -> None:
        """Compare kernels with the stock path in the room that was made; if that fails, calls go the stock way."""
        backings = {id(tag.memreclaim_backing): tag.memreclaim_backing for tag in discover.tags_of(self._model)}
        try:
            for backing in backings.values():
                if backing.twin is not None:
                    serve.verify_kernels(backing.shape, backing.twin.device, backing.numerics)
        except (RuntimeError, MemoryError) as error:
            events.kernels_unverified(str(error))

    def _report(
        self, operation: str, components: set[str], freed: FreedBytes, extra: int | None, pool: PoolChange | None
    ) -> Report:
        layers = tuple(layer for layer in self._ledger.layers() if layer.component in components)
        report = Report(layers, freed, extra, pool, time.perf_counter() - self._started)
        events.summary(operation, report)
        return report


def _released(entries: Iterable[Entry]) -> list[tuple[Entry, Backing]]:
    return [(entry, entry.backing) for entry in entries if entry.backing is not None and entry.released()]


def _tell(guard: Callable[[str], None], ledger: Ledger, entry: Entry) -> None:
    """A layer's bf16 weight is back. A backing keeps this for its life, so it holds nothing of the run."""
    guard(entry.name)
    ledger.restored(entry)
