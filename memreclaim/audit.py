"""The audit: whether the twins that serve are still the bytes that were proven.

It reads every served twin slab by slab, at most so many bytes a second, and compares each slab with its fingerprint.
Reading needs no safe point: a twin that serves keeps its bytes until :meth:`~memreclaim.twin.Twin.overwrite`, which is
called at safe points only. Between two slabs it holds no reference to a twin, so that a restore frees memory at once. A
damaged twin is rebuilt in place from a source of exact weights, if there is one, at a safe point; its address stays,
since CUDA graphs may hold it. A twin that cannot be rebuilt turns the rank unready.
"""

from __future__ import annotations

import threading
import time
from contextlib import nullcontext
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from memreclaim import events
from memreclaim.errors import MemreclaimError
from memreclaim.fingerprint import fingerprint, slab_sum, slabs
from memreclaim.states import State
from memreclaim.twin import build_twin

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from contextlib import AbstractContextManager

    import torch

    from memreclaim.ledger import Entry
    from memreclaim.rank import Rank
    from memreclaim.twin import Twin

    Source = Callable[[Entry], torch.Tensor]
    """Gives the exact bf16 weight of a layer, in the layer's shape and on its device, from where the engine loaded
    it."""

_LONGEST_NAP = 0.25
"""Seconds between two looks at whether the audit should end."""


@dataclass(frozen=True)
class Verdict:
    """What one audit found."""

    layers: int
    n_bytes: int
    damaged: Mapping[str, int]
    """Slabs that differ, by layer."""
    seconds: float

    def to_dict(self) -> dict[str, Any]:
        """JSON-ready."""
        return {
            "layers": self.layers,
            "bytes": self.n_bytes,
            "damaged": dict(self.damaged),
            "seconds": round(self.seconds, 3),
        }


class Auditor:
    """Audits one rank and keeps :attr:`Rank.audit` up to date."""

    def __init__(  # noqa: PLR0913  each is a setting of its own
        self,
        rank: Rank,
        *,
        interval_seconds: float,
        bytes_per_second: int,
        source: Source | None = None,
        repair: Callable[[], None] | None = None,
        quiet: AbstractContextManager[object] | None = None,
    ) -> None:
        """Audit ``rank``; ``source`` gives exact weights to rebuild from.

        ``repair`` asks for :meth:`rebuild` to be run at a safe point; without it damage found in the background is
        only reported. ``quiet`` is held for each slab, some milliseconds at a time.
        """
        self._rank, self._source, self._repair = rank, source, repair
        self._interval, self._rate = interval_seconds, bytes_per_second
        self._quiet = nullcontext() if quiet is None else quiet
        self._lock = threading.Lock()
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None
        self._tried = 0.0
        rank.audit = replace(rank.audit, interval_seconds=interval_seconds)

    def start(self) -> None:
        """Audit every interval in a thread of its own; does nothing when the interval is 0."""
        if self._interval and self._thread is None:
            self._thread = threading.Thread(target=self._run, name="memreclaim-audit", daemon=True)
            self._thread.start()

    def close(self) -> None:
        """End the thread; an audit that runs ends at the next slab."""
        self._stop.set()
        if self._thread is not None:
            self._thread.join()

    def proven(self) -> None:
        """All twins were proven just now: the next audit is due one interval later."""
        self._rank.audit = replace(self._rank.audit, last_timestamp=time.time())

    def audit(self, *, capped: bool = False) -> Verdict:
        """Compare all served twins now, at full speed or within the cap. Counts as an operation of this rank."""
        with self._lock, self._rank.journal.operation("audit") as outcome:
            verdict = self._compare(capped=capped)
            outcome.result = "mismatch" if verdict.damaged else "ok"
        complete = not self._stop.is_set()
        last = time.time() if complete and not verdict.damaged else self._rank.audit.last_timestamp
        self._rank.audit = replace(self._rank.audit, last_timestamp=last, damaged=verdict.damaged)
        for layer, differing in verdict.damaged.items():
            events.emit("error", "twin_damaged", layer=layer, slabs=differing, rebuild=self._source is not None)
        return verdict

    def rebuild(self) -> tuple[str, ...]:
        """Rebuild damaged twins in place, at a safe point; returns the layers that are whole again.

        Peak extra memory: one bf16 weight and one twin. What cannot be rebuilt stays damaged and the rank unready.
        """
        rebuilt = []
        for entry in self._served():
            name = _name(entry)
            if name in self._rank.audit.damaged and self._rebuilt(entry):
                rebuilt.append(name)
        left = {name: n for name, n in self._rank.audit.damaged.items() if name not in rebuilt}
        self._rank.audit = replace(self._rank.audit, damaged=left)
        return tuple(rebuilt)

    def _rebuilt(self, entry: Entry) -> bool:
        twin = None if entry.backing is None else entry.backing.twin
        noted = None if twin is None else self._rank.reclaimer.fingerprints.of(twin)
        if self._source is None or twin is None or noted is None:
            return False
        try:
            fresh = build_twin(self._source(entry), groups=twin.shape.groups)
        except MemreclaimError as error:
            events.emit("error", "twin_not_rebuilt", layer=entry.name, component=entry.component, error=str(error))
            return False
        if fingerprint(fresh) != noted:
            events.emit(
                "error",
                "twin_not_rebuilt",
                layer=entry.name,
                component=entry.component,
                error="the source has other bits",
            )
            return False
        with self._quiet:  # a slab that the audit reads meanwhile would be half of each
            twin.overwrite(fresh)
        whole = fingerprint(twin) == noted
        events.emit("warning", "twin_rebuilt", layer=entry.name, component=entry.component, whole=whole)
        return whole

    def _compare(self, *, capped: bool) -> Verdict:
        started, read, layers = time.monotonic(), 0, 0
        damaged: dict[str, int] = {}
        for entry in self._served():
            layers += 1
            index = 0
            while (step := self._slab(entry, index)) is not None and not self._stop.is_set():
                n_bytes, same = step
                index, read = index + 1, read + n_bytes
                if not same:
                    damaged[_name(entry)] = damaged.get(_name(entry), 0) + 1
                if capped:
                    self._stop.wait(max(0.0, started + read / self._rate - time.monotonic()))
        return Verdict(layers, read, damaged, time.monotonic() - started)

    def _slab(self, entry: Entry, index: int) -> tuple[int, bool] | None:
        """Bytes of one slab and whether it is what was noted; None past the end, or when the twin is gone."""
        with self._quiet:
            backing = entry.backing
            twin: Twin | None = None if backing is None else backing.twin
            noted = None if twin is None else self._rank.reclaimer.fingerprints.of(twin)
            if twin is None or noted is None or index >= len(noted.slabs):
                return None
            slab = next(slab for i, slab in enumerate(slabs(twin)) if i == index)
            return slab.numel(), int(slab_sum(slab)) == noted.slabs[index]

    def _served(self) -> list[Entry]:
        served = (State.RECLAIMED, State.PROVEN)
        return [entry for entry in self._rank.reclaimer.ledger.entries() if entry.state in served and entry.backing]

    def _run(self) -> None:
        from memreclaim.journal import triggered_by

        while not self._stop.wait(min(_LONGEST_NAP, self._interval)):
            # Nothing to audit before the first twin: the clock starts with its proof.
            due = max(self._rank.audit.last_timestamp, self._tried) + self._interval
            if not self._rank.audit.last_timestamp or time.time() < due or self._rank.audit.damaged:
                continue
            self._tried = time.time()
            try:
                with triggered_by("timer"):
                    damaged = self.audit(capped=True).damaged
            except Exception as error:  # noqa: BLE001 - counted and logged; the next interval tries again
                self._rank.journal.add("internal_errors_total", "audit")
                events.emit("error", "audit_failed", error=f"{type(error).__name__}: {error}")
                continue
            if damaged and self._repair is not None:
                self._repair()


def _name(entry: Entry) -> str:
    return f"{entry.component}/{entry.name}"
