"""What each layer held, costs and freed, always read from the live model.

A figure is never remembered when it can be looked up: a layer counts as reclaimed only while its tags stand in the
model and its backing holds a twin and no bf16 weight, so a parameter that was replaced behind memreclaim's back
claims nothing.
"""

from __future__ import annotations

import threading
from dataclasses import dataclass
from typing import TYPE_CHECKING

from memreclaim.errors import IntegrityError, NotExact
from memreclaim.snapshot import LayerReport
from memreclaim.states import Reason, State
from memreclaim.tag import Tag

if TYPE_CHECKING:
    from memreclaim.backing import Backing
    from memreclaim.discover import Site
    from memreclaim.proof import Mismatch


@dataclass
class Entry:
    """One layer's account."""

    name: str
    component: str
    sites: tuple[Site, ...]
    weight_bytes: int
    state: State = State.FOUND
    reason: Reason | None = None
    backing: Backing | None = None
    mismatched: int = 0
    first_mismatch: Mismatch | None = None

    def tags(self) -> list[Tag]:
        """All tags that stand in the layer's places now, of this account or of another."""
        standing = [site.module._parameters.get(site.attribute) for site in self.sites]
        return [tag for tag in standing if isinstance(tag, Tag)]

    def released(self) -> bool:
        """Whether the bf16 bytes are gone: all places hold this account's tags, with no bf16 weight behind them."""
        tags = self.tags()
        whole = len(tags) == len(self.sites) and all(tag.memreclaim_backing is self.backing for tag in tags)
        return whole and self.backing is not None and self.backing.released


class Ledger:
    """Accounts of all layers that one reclaimer looked at; thread-safe, its lock is never held while calling out."""

    def __init__(self) -> None:
        """Start empty."""
        self._lock = threading.Lock()
        self._entries: dict[tuple[str, str], Entry] = {}

    def open(self, component: str, name: str, sites: tuple[Site, ...], weight_bytes: int) -> Entry:
        """A fresh account for a layer, in place of an older one."""
        entry = Entry(name, component, sites, weight_bytes)
        with self._lock:
            self._entries[component, name] = entry
        return entry

    def settle(self, entry: Entry, state: State, reason: Reason | None = None, backing: Backing | None = None) -> None:
        """Write down how a layer ended up."""
        with self._lock:
            entry.state, entry.reason, entry.backing = state, reason, backing

    def keep(self, entry: Entry, reason: Reason, error: Exception | None = None) -> None:
        """Write down why a layer stays in bf16, with the mismatch that ``error`` found if it is one."""
        with self._lock:
            entry.state, entry.reason, entry.backing = State.KEPT, reason, None
            if isinstance(error, NotExact):
                entry.mismatched, entry.first_mismatch = error.mismatched, error.first_mismatch

    def restored(self, entry: Entry) -> None:
        """The layer's bf16 weight is back."""
        self.settle(entry, State.RESTORED)

    def entries(self, component: str | None = None) -> tuple[Entry, ...]:
        """All accounts, or those of one component, in the order they were opened."""
        with self._lock:
            return tuple(entry for entry in self._entries.values() if component in (None, entry.component))

    def layers(self, component: str | None = None) -> tuple[LayerReport, ...]:
        """Every layer as it is now."""
        return tuple(_report(entry) for entry in self.entries(component))

    def check_integrity(self) -> None:
        """Recompute every account from the live tensors. Raises :class:`IntegrityError` with all that is wrong."""
        problems = [problem for entry in self.entries() for problem in _problems(entry)]
        if problems:
            raise IntegrityError("; ".join(problems))


def _report(entry: Entry) -> LayerReport:
    state, backing = entry.state, entry.backing
    twin = None if backing is None else backing.twin
    released = entry.released()
    if state is State.RECLAIMED and not released:
        state = State.RESTORED
    return LayerReport(
        name=entry.name,
        component=entry.component,
        state=state,
        reason=entry.reason,
        weight_bytes=entry.weight_bytes,
        gross_bytes=entry.weight_bytes if released else 0,
        twin_bytes=0 if twin is None else twin.nbytes,
        mismatched_elements=entry.mismatched,
        first_mismatch=entry.first_mismatch,
    )


def _problems(entry: Entry) -> list[str]:
    backing, problems = entry.backing, []
    if entry.state is State.RECLAIMED and backing is None:
        problems.append("reclaimed without a twin")
    if backing is not None and backing.twin is not None:
        twin = backing.twin
        if twin.shape.numel * 2 != entry.weight_bytes:
            problems.append(f"{entry.weight_bytes} bytes are booked for a twin of {twin.shape.numel} elements")
        standing = sum(tag.memreclaim_backing is backing for tag in entry.tags())
        if standing not in (0, len(entry.sites)):
            problems.append(f"{standing} of {len(entry.sites)} places hold its tag")
        if entry.state is State.RECLAIMED and backing.dense is not None:
            problems.append("reclaimed, but the bf16 weight is there")
    if entry.state in (State.KEPT, State.RESTORED) and any(tag.memreclaim_backing.released for tag in entry.tags()):
        problems.append(f"{entry.state.value}, but a tag stands in the model")
    return [f"{entry.component}/{entry.name}: {problem}" for problem in problems]
