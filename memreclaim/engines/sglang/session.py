"""What memreclaim holds in one rank's process of the engine, and how it reclaims there."""

from __future__ import annotations

from contextlib import ExitStack, nullcontext
from typing import TYPE_CHECKING, Any, NamedTuple

from memreclaim import events
from memreclaim.agree import Agreement, Terms
from memreclaim.config import Mode
from memreclaim.engines import base, operate
from memreclaim.engines.sglang import dispatch, hooks, pool, readers_check
from memreclaim.errors import SwapError
from memreclaim.reclaimer import Reclaimer
from memreclaim.states import Reason
from memreclaim.tag import Tag

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping
    from contextlib import AbstractContextManager

    from torch import nn

    from memreclaim.config import Settings
    from memreclaim.engines.sglang.adapter import SGLangAdapter
    from memreclaim.engines.sglang.lines import Line
    from memreclaim.service.rank import RankService
    from memreclaim.snapshot import Report
    from memreclaim.twin import Twin


class Budget(NamedTuple):
    """What the engine sized its pool from."""

    n_bytes: int
    """Of all ranks the least free memory, less the engine's slack."""
    free_bytes: int
    """What was free on this rank."""


class Session:
    """What memreclaim holds in one rank's process."""

    def __init__(self, line: Line, settings: Settings) -> None:
        """One per process; models come later."""
        self.line = line
        self.settings = settings
        self.reclaimer = Reclaimer(settings)
        self.adapters: list[SGLangAdapter] = []
        self.reports: dict[str, Report] = {}
        self.ranks: dict[str, list[dict[str, Any] | None]] = {}
        """By component, every rank's report as this rank knows them; complete on rank 0."""
        self.captured = False
        self.may_write = 0
        """Weight updates that are under way: only they may bring a weight back once graphs hold its twin."""
        self.budget: Budget | None = None
        self.service: RankService | None = None
        self.pause = ExitStack()
        """Holds :meth:`quiet` while the engine has paused the weights' memory; closed when it is mapped again."""
        self.paused = False

    def quiet(self) -> AbstractContextManager[object]:
        """Keep the service's audit and probe from reading twins and from allocating; re-entrant within a thread."""
        return nullcontext() if self.service is None else self.service.quiet

    def reclaim(self, adapter: SGLangAdapter, *, storage: Mapping[str, Twin] | None = None) -> Report:
        """Swap the weights of one runner's model; ranks agree first."""
        (part,) = adapter.models()
        adapter.captured = self.captured
        held = storage or {}
        refused = {
            name: reason
            for name, reason in base.refusals(adapter, part, self.settings.targets).items()
            # Graphs that hold a twin's address go on working when the twin is written anew in its place.
            if not (reason is Reason.AFTER_CAPTURE and name in held)
        }
        if part.role is base.Role.DRAFT and not self.settings.draft:
            refused = dict.fromkeys(part.layers(self.settings.targets), Reason.POLICY)
        group, agree = adapter.group(), None
        if group is not None:
            readers_check.judge_kernels(part.root, self.settings.targets, refused)
            agree = Agreement(group, self.fingerprint(adapter), adapter.component)
        terms = Terms(agree, readers_check.check_for(part.root), held, self.guard)
        before = twins_of(part.root)
        try:
            with self.quiet(), adapter.allocations():
                report = self.reclaimer.reclaim(part.root, component=adapter.component, refused=refused, terms=terms)
        finally:
            readers_check.forget()
        self.book(adapter)
        self._account(adapter, report, agree)
        self.proven(twin for name, twin in twins_of(part.root).items() if name not in before)
        return report

    def book(self, adapter: SGLangAdapter) -> None:
        """Bring the engine's book of weight memory to what the ledger says of this model now.

        Against what was booked before, so that layers which writes brought back since are taken out again.
        """
        net = operate.net_bytes(self.reclaimer, adapter.component)
        adapter.released(net - adapter.booked)

    def proven(self, twins: Iterable[Twin]) -> None:
        """``twins`` were proven just now: the audit's clock starts anew, unless another twin serves that was not.

        It never starts on a line whose graph capture is not hooked: the audit's allocations would break it.
        """
        served = {id(twin) for one in self.adapters for twin in twins_of(one.models()[0].root).values()}
        watched = any(hook.target == hooks.CAPTURE for hook in hooks.of_line(self.line.name))
        if self.service is not None and watched and served and served <= set(map(id, twins)):
            self.service.auditor.proven()

    def _account(self, adapter: SGLangAdapter, report: Report, agree: Agreement | None) -> None:
        (part,) = adapter.models()
        twins = twins_of(part.root)
        if part.role is base.Role.DRAFT:
            dispatch.draft_twins.update(map(id, twins.values()))
        self.reports[adapter.component] = report
        for reader in (
            reader for layer in part.layers() for reader in adapter.readers(part, layer) if not reader.known
        ):
            events.emit("warning", "reader_unknown", engine="sglang", reader=reader.where, detail=reader.note)
            break
        if agree is None:
            self.ranks[adapter.component] = [report.to_dict()]
            return
        if not agree.decision.go:
            events.emit("warning", "ranks_disagreed", component=adapter.component, detail=agree.decision.why)
            return
        self.ranks[adapter.component] = agree.share(report.to_dict(), "report")

    def guard(self, layer: str) -> None:
        """Refuse to bring ``layer`` back behind the engine's back: captured graphs would go on reading its twin."""
        if self.captured and not self.may_write:
            message = f"{layer}: CUDA graphs hold its twin; change it through the engine's weight update"
            raise SwapError(message)

    def fingerprint(self, adapter: SGLangAdapter) -> dict[str, str]:
        """What must be the same on every rank."""
        device = next(adapter.runner.model.parameters()).device
        return operate.fingerprint(self.settings, f"sglang {self.line.version} ({self.line.name})", device)

    def adapter_of(self, model: nn.Module) -> SGLangAdapter | None:
        """The adapter whose runner holds ``model`` now."""
        return next((one for one in self.adapters if getattr(one.runner, "model", None) is model), None)

    def size(self, runner: Any) -> None:  # noqa: ANN401
        """Note what the engine's pool did with the freed bytes."""
        if self.budget is None or self.settings.mode is not Mode.ON or getattr(runner, "is_draft_worker", False):
            return
        net = sum(report.net_bytes for report in self.reports.values())
        ranks, rank = self._memories(net)
        change = pool.change(runner, self.budget.n_bytes, ranks, rank)
        self.reclaimer.journal.pool_changed(change)
        events.emit(
            "info",
            "pool_sized",
            kv_tokens_before=change.tokens_before,
            kv_tokens_after=change.tokens_after,
            kv_tokens_gained=change.tokens_gained,
            bytes_per_token=round(change.bytes_per_token, 2),
            pool_bytes=pool.pool_bytes(runner.token_to_kv_pool),
            limited_by=change.limited_by,
            head_room_bytes=change.head_room_bytes,
        )

    def _memories(self, net: int) -> tuple[list[pool.RankMemory], str]:
        """Free and freed bytes of every rank that answers, and this rank's name."""
        assert self.budget is not None
        mine = pool.RankMemory("0", self.budget.free_bytes, net)
        group = self.adapters[0].group()
        if group is None or any(None in answers for answers in self.ranks.values()) or not self.ranks:
            return [mine], mine.rank
        exchange = Agreement(group, {}, "pool")
        answers = exchange.share({"free": mine.free_bytes, "net": net}, "memory")
        names = exchange.names
        known = [(name, answer) for name, answer in zip(names, answers, strict=True) if answer is not None]
        return [pool.RankMemory(name, answer["free"], answer["net"]) for name, answer in known], exchange.name


_session: Session | None = None


def configure(line: Line, settings: Settings) -> None:
    """Make this process's session; done when the hooks are registered."""
    global _session  # noqa: PLW0603  one rank is one process
    dispatch.forget()
    _session = Session(line, settings)


def session() -> Session:
    """The session of this process."""
    assert _session is not None
    return _session


def twins_of(model: nn.Module) -> dict[str, Twin]:
    """The twin that serves each layer, by the layer's name."""
    tags = ((name, parameter) for name, parameter in model.named_parameters() if isinstance(parameter, Tag))
    found = ((name.rpartition(".")[0], tag.memreclaim_backing.twin) for name, tag in tags)
    return {name: twin for name, twin in found if twin is not None}
