"""Ranks agree before any of them drops a weight.

Each rank proves every layer and throws the twin away (:func:`prepare`), then all exchange their verdicts and a
fingerprint of what could differ between them, and only if all say the same does any of them swap (:class:`Agreement`).

The exchange goes through the rendezvous store of the ranks' own ``torch.distributed`` group, not through its
collectives: a rank with the feature off never joins, its own next collective would be paired with ours, and a gloo
operation that times out closes the connections of the engine's group. A store can be asked for a bounded time, and
says who has not answered.

All ranks come to the same decision even if one is slow: the decision is one key of the store, written by whoever is
first (a compare-and-set), and everybody obeys what stands there.
"""

from __future__ import annotations

import json
import time
from collections import Counter
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from memreclaim.errors import NotExact
from memreclaim.states import Reason
from memreclaim.twin import build_twin

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence

    from torch.distributed import ProcessGroup

    from memreclaim.discover import Candidate
    from memreclaim.twin import Twin

    Check = Callable[[Candidate, Twin], Reason | None]

Verdicts = dict[str, Reason | None]
"""By layer: why it stays in bf16, None when it may go."""
PATIENCE_SECONDS = 30.0
"""How long the slowest rank may take from the first one's proof to its own: proofs of 43 layers take 0.2 s on an H200,
and engines bring their ranks together after loading.
"""
_POLL_SECONDS = 0.01
_GO = "go"
_rounds: Counter[tuple[int, str]] = Counter()


def prepare(candidates: Iterable[Candidate], refused: Mapping[str, Reason], check: Check | None = None) -> Verdicts:
    """Prove each layer, have ``check`` compare its readers, and keep nothing; at most one twin is alive at a time."""
    return {one.name: one.refusal or refused.get(one.name) or _verdict(one, check) for one in candidates}


def _verdict(candidate: Candidate, check: Check | None) -> Reason | None:
    try:
        twin = build_twin(candidate.sites[0].get(), groups=candidate.groups)
    except NotExact as error:
        return error.reason
    return None if check is None else check(candidate, twin)


@dataclass(frozen=True)
class Decision:
    """What all ranks do."""

    go: bool
    why: str
    """Why nothing is dropped: which ranks differ in what, or did not answer. Empty when ``go``."""
    kept: Mapping[str, Reason]
    """This rank's layers that must stay because of other ranks."""


class Agreement:
    """One subject (``target``, ``draft``) on which the ranks of ``group`` agree, each time it is called anew."""

    def __init__(
        self,
        group: ProcessGroup,
        fingerprint: Mapping[str, str],
        subject: str,
        seconds: float = PATIENCE_SECONDS,
    ) -> None:
        """``fingerprint`` names what must be the same everywhere: version, settings, engine build, plans.

        Every rank makes its agreements in the same order. ``seconds`` bounds each wait for others.
        """
        from torch import distributed as dist
        from torch.distributed import distributed_c10d

        self._store = distributed_c10d._get_process_group_store(group)
        self._size, self._rank = dist.get_world_size(group), dist.get_rank(group)
        self.names = [str(rank) for rank in dist.get_process_group_ranks(group)]
        """The ranks' names, by their order in the group."""
        self.name = self.names[self._rank]
        self._fingerprint = dict(fingerprint)
        self._subject, self._seconds = subject, seconds
        self._key = (id(self._store), subject)
        self.decision = Decision(go=False, why="not asked yet", kept={})

    def __call__(self, verdicts: Mapping[str, Reason | None]) -> Mapping[str, Reason]:
        """Exchange ``verdicts``; returns this rank's layers that must stay because of other ranks, with the reason."""
        self.decision = self._decide(verdicts)
        return self.decision.kept

    def _decide(self, verdicts: Mapping[str, Reason | None]) -> Decision:
        nobody: dict[str, Reason] = {name: Reason.RANKS_DISAGREE for name, reason in verdicts.items() if reason is None}
        try:
            answers = self.share({"fingerprint": self._fingerprint, "verdicts": verdicts}, "verdicts")
            word = self._settle(self._objection(answers))
            if word != _GO:
                return Decision(go=False, why=word, kept=nobody)
        except RuntimeError as error:  # torch's store errors are RuntimeErrors: the rank that holds the store has died
            return Decision(go=False, why=f"the ranks' store cannot be reached: {error}", kept=nobody)
        theirs = [answer["verdicts"] for answer in answers if answer is not None]
        kept = {name: Reason.RANKS_DISAGREE for name in nobody if any(verdict.get(name) for verdict in theirs)}
        return Decision(go=True, why="", kept=kept)

    def _objection(self, answers: list[dict[str, Any] | None]) -> str:
        """Why not to go, :data:`_GO` when nothing speaks against it. Ranks that see all answers say the same."""
        silent = [name for name, answer in zip(self.names, answers, strict=True) if answer is None]
        if silent:
            return (
                f"rank {', '.join(silent)} did not answer within {self._seconds:g} s: "
                "memreclaim is off there (is its environment forwarded?), or it is dead or slow"
            )
        prints = [answer["fingerprint"] for answer in answers if answer is not None]
        for about in sorted(set().union(*prints)):
            values = {name: prints[at].get(about, "") for at, name in enumerate(self.names)}
            if len(set(values.values())) > 1:
                return f"{about} differs: " + ", ".join(f"rank {name} has {value!r}" for name, value in values.items())
        return _GO

    def _settle(self, proposal: str) -> str:
        """Write ``proposal`` unless another rank was first; returns what stands."""
        return self._store.compare_set(f"{self._path}/decision", "", proposal).decode()

    def share(self, answer: Mapping[str, Any], what: str) -> list[dict[str, Any] | None]:
        """Every rank's JSON-ready ``answer`` by rank, None for one that gave none within the bound.

        Raises ``RuntimeError`` when the store cannot be reached.
        """
        _rounds[self._key] += 1
        self._path = f"memreclaim/{self._subject}/{_rounds[self._key]}/{what}"
        self._store.set(f"{self._path}/{self._rank}", json.dumps(answer))
        return self._collect(self._path)

    def _collect(self, path: str) -> list[dict[str, Any] | None]:
        """Answers of all ranks, waited for until the bound, or until another rank has decided without them."""
        keys = [f"{path}/{rank}" for rank in range(self._size)]
        deadline = time.monotonic() + self._seconds
        while not self._store.check(keys):
            if time.monotonic() > deadline or self._store.check([f"{path}/decision"]):
                break
            time.sleep(_POLL_SECONDS)
        return [json.loads(self._store.get(key)) if self._store.check([key]) else None for key in keys]


@dataclass(frozen=True)
class Terms:
    """What an engine's adapter adds to a reclaim."""

    agree: Callable[[Mapping[str, Reason | None]], Mapping[str, Reason]] | None = None
    """Given this rank's verdicts, says which of its layers must stay because of others; an :class:`Agreement`."""
    check: Check | None = None
    """Compares a layer's readers with the bf16 weight and with its twin; gives the reason when they differ."""
    storage: Mapping[str, Twin] = field(default_factory=dict)
    """By layer: a twin whose memory takes the new bytes, because captured graphs hold its address."""
    guard: Callable[[str], None] = lambda _layer: None
    """Asked before a layer is restored; what it raises stops the restore, and the twin goes on serving."""

    def refusals(self, candidates: Sequence[Candidate], refused: Mapping[str, Reason]) -> Mapping[str, Reason]:
        """``refused``, and what the check and the other ranks add to it."""
        if self.agree is None and self.check is None:
            return refused
        verdicts = prepare(candidates, refused, self.check)
        ours = {name: reason for name, reason in verdicts.items() if reason is Reason.UNKNOWN_READER}
        theirs = {} if self.agree is None else self.agree(verdicts)
        return {**theirs, **ours, **refused}

    def place(self, layer: str, twin: Twin) -> Twin:
        """``twin``, in the memory that was set aside for it, if any of its shape was; at the engine's safe point."""
        old = self.storage.get(layer)
        if old is None or old.shape != twin.shape:
            return twin
        old.overwrite(twin)
        return old
