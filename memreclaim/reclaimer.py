"""The main job: find the weights, prove a twin of each, drop the bf16 bytes, and give them to the KV pool.

One layer at a time: twin, proof and swap of a layer are done before the next layer's twin is allocated, so that the
most extra memory is one twin and 4 MiB. Building all twins first would need half of everything once more, which alone
stopped 3-node boots in the field.
"""

from __future__ import annotations

import threading
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from memreclaim import discover, events, serve, swap
from memreclaim.agree import Terms
from memreclaim.backing import Backing
from memreclaim.config import Mode, OnMismatch, Settings
from memreclaim.errors import NotExact, PoolError
from memreclaim.fingerprint import Fingerprints
from memreclaim.journal import Journal
from memreclaim.kvpool import PoolChange
from memreclaim.ledger import Entry, Ledger
from memreclaim.meter import Meter, meter_for
from memreclaim.snapshot import FreedBytes, Report
from memreclaim.states import Reason, State
from memreclaim.tag import Tag
from memreclaim.twin import build_twin

if TYPE_CHECKING:
    from collections.abc import Mapping

    from torch import nn

    from memreclaim.discover import Candidate
    from memreclaim.kvpool import KVPool

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
        """
        with _one_at_a_time, self.journal.operation("reclaim") as outcome:
            report = _Run(self, model, component, prefix, terms or Terms()).reclaim(refused or {})
            self.journal.measured(component, report)
            outcome.result = "mismatch" if report.mismatched else "ok"
            return report

    def restore(self, model: nn.Module) -> Report:
        """Make every tag of ``model`` its exact bf16 parameter again.

        The pool is asked to give the bytes back first; tokens in use stay, and the weights are restored if memory
        allows.
        """
        with _one_at_a_time, self.journal.operation("restore"):
            report = _Run(self, model, None, "", Terms()).restore()
            if report.pool is not None:
                self.journal.pool_changed(report.pool)
            return report

    def check_integrity(self) -> None:
        """Raise :class:`~memreclaim.errors.IntegrityError` when the ledger and the live tensors disagree."""
        self.ledger.check_integrity()


class _Run:
    """One operation on one model: the measurements around it, and what it came to."""

    def __init__(self, owner: Reclaimer, model: nn.Module, component: str | None, prefix: str, terms: Terms) -> None:
        self._ledger, self._settings, self._pool = owner.ledger, owner.settings, owner.pool
        self._journal, self._fingerprints, self._prefix = owner.journal, owner.fingerprints, prefix
        self._model, self._component, self._terms = model, component, terms
        self._meter: Meter = meter_for(_device_of(model))
        self._started = time.perf_counter()

    def reclaim(self, refused: Mapping[str, Reason]) -> Report:
        """See :meth:`Reclaimer.reclaim`."""
        component = self._component
        assert component is not None
        found = discover.discover(self._model, self._settings.targets)
        candidates = [one for one in found if one.name.startswith(self._prefix)]
        refused = self._terms.refusals(candidates, refused)
        self._meter.settle()
        allocated, free = self._meter.allocated(), self._meter.free()
        self._meter.restart_peak()
        dropped = _Sum()
        for candidate in candidates:
            entry = self._ledger.open(component, candidate.name, candidate.sites, candidate.gross_bytes)
            refusal = candidate.refusal or refused.get(candidate.name) or self._policy()
            if refusal is not None:
                self._keep(entry, refusal)
            elif self._one(candidate, entry):
                dropped.add(entry)
                self._meter.reuse()
        peak = self._meter.peak()
        self._verify_kernels()
        self._meter.settle()
        freed = FreedBytes(
            nominal=dropped.gross,
            allocator=_fallen(allocated, self._meter.allocated(), dropped.twin),
            device=_fallen(self._meter.free(), free, dropped.twin),
        )
        return self._report("reclaimed", freed, _above(peak, allocated), self._grow(freed, dropped))

    def _verify_kernels(self) -> None:
        """Compare kernels with the stock path now: what the check allocates is less than what was just released."""
        for tag in _tags(self._model):
            twin = tag.memreclaim_backing.twin
            if twin is not None:
                serve.verify_kernels(twin.shape, twin.device, tag.memreclaim_backing.numerics)

    def _policy(self) -> Reason | None:
        """Why nothing may be dropped just now."""
        if self._settings.mode is Mode.OFF:
            return Reason.POLICY
        capturing = torch.cuda.is_available() and torch.cuda.is_current_stream_capturing()
        return Reason.AFTER_CAPTURE if capturing else None

    def _one(self, candidate: Candidate, entry: Entry) -> bool:
        """Take one layer as far as the settings go; True when its bf16 bytes are released."""
        mode = self._settings.mode
        try:
            with self._journal.proof():
                backing = self._prove(candidate, entry)
            if mode is Mode.ON:
                swap.drop(candidate, backing)
            elif mode is Mode.TWIN:
                swap.shadow(candidate, backing)
        except NotExact as error:
            self._keep(entry, error.reason, error)
            if self._settings.on_mismatch is OnMismatch.ABORT:
                raise
            return False
        except swap.StillHeldError as error:
            self._keep(entry, Reason.SHARED_STORAGE, error)
            return False
        if mode is Mode.OBSERVE:
            self._ledger.settle(entry, State.PROVEN, Reason.POLICY)
            return False
        state = State.RECLAIMED if mode is Mode.ON else State.PROVEN
        self._ledger.settle(entry, state, backing=backing)
        events.layer_reclaimed(entry)
        return mode is Mode.ON

    def _prove(self, candidate: Candidate, entry: Entry) -> Backing:
        """A backing whose twin is proven against the weight; holds no reference to the weight when it returns."""
        twin = self._terms.place(candidate.name, build_twin(candidate.sites[0].get(), groups=candidate.groups))
        self._fingerprints.take(twin)
        home = swap.ModelHome(candidate.sites, lambda: self._restored(entry))
        return Backing(candidate.name, twin, home, self._settings.numerics.value)

    def _restored(self, entry: Entry) -> None:
        self._terms.guard(entry.name)
        self._ledger.restored(entry)

    def _keep(self, entry: Entry, reason: Reason, error: NotExact | swap.StillHeldError | None = None) -> None:
        self._ledger.keep(entry, reason, error)
        events.layer_kept(entry, str(error) if error else "")

    def _grow(self, freed: FreedBytes, dropped: _Sum) -> PoolChange | None:
        """Give the pool what was freed by every measure there is, never more."""
        if self._pool is None:
            return None
        measures = [figure for figure in (freed.nominal, freed.allocator, freed.device) if figure is not None]
        return _grow(self._pool, max(0, min(measures) - dropped.twin))

    def restore(self) -> Report:
        """See :meth:`Reclaimer.restore`."""
        backings = {id(tag.memreclaim_backing): tag.memreclaim_backing for tag in _tags(self._model)}
        entries = [entry for entry in self._ledger.entries() if id(entry.backing) in backings]
        self._component = entries[0].component if entries else None
        pool = None if self._pool is None else _shrink(self._pool, sum(map(_net, entries)))
        allocated = self._meter.allocated()
        self._meter.restart_peak()
        for backing in backings.values():
            backing.make_dense()
        peak = self._meter.peak()
        self._meter.settle()
        return self._report("restored", FreedBytes(0, None, None), _above(peak, allocated), pool)

    def _report(self, operation: str, freed: FreedBytes, extra: int | None, pool: PoolChange | None) -> Report:
        layers = self._ledger.layers(self._component)
        report = Report(layers, freed, extra, pool, time.perf_counter() - self._started)
        events.summary(operation, report)
        return report


@dataclass
class _Sum:
    """Bytes of the layers that one run dropped."""

    gross: int = 0
    twin: int = 0

    def add(self, entry: Entry) -> None:
        self.gross += entry.weight_bytes
        self.twin += entry.weight_bytes - _net(entry)


def _net(entry: Entry) -> int:
    """Bytes that a layer's restore will take."""
    twin = None if entry.backing is None else entry.backing.twin
    return (
        0
        if twin is None or entry.backing is None or entry.backing.dense is not None
        else entry.weight_bytes - twin.nbytes
    )


def _grow(pool: KVPool, n_bytes: int) -> PoolChange:
    before = pool.capacity_tokens
    try:
        gained = pool.grow(n_bytes)
    except PoolError as error:
        events.pool_refused("grow", n_bytes, str(error))
        gained = 0
    return PoolChange(
        before,
        pool.capacity_tokens,
        pool.bytes_per_token,
        pool.limited_by,
        n_bytes - int(gained * pool.bytes_per_token),
    )


def _shrink(pool: KVPool, n_bytes: int) -> PoolChange:
    before = pool.capacity_tokens
    try:
        pool.shrink(n_bytes)
    except PoolError as error:
        events.pool_refused("shrink", n_bytes, str(error))
    return PoolChange(before, pool.capacity_tokens, pool.bytes_per_token, pool.limited_by, 0)


def _fallen(higher: int | None, lower: int | None, twin: int) -> int | None:
    """By how much a figure fell, with the twins that were allocated meanwhile added back."""
    return None if higher is None or lower is None else higher - lower + twin


def _above(peak: int | None, start: int | None) -> int | None:
    return None if peak is None or start is None else max(0, peak - start)


def _tags(model: nn.Module) -> list[Tag]:
    return [
        parameter
        for module in model.modules()
        for parameter in module._parameters.values()
        if isinstance(parameter, Tag)
    ]


def _device_of(model: nn.Module) -> torch.device:
    parameter = next(model.parameters(), None)
    return torch.device("cpu") if parameter is None else parameter.device
