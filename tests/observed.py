"""Ranks to look at: a real tiny engine, and made-up snapshots of a large one."""

from __future__ import annotations

from contextlib import contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING

from memreclaim import Reclaimer, Settings
from memreclaim.engines import reference as ref
from memreclaim.figures import MemoryFigure
from memreclaim.journal import Event, Journal
from memreclaim.proof import Mismatch
from memreclaim.rank_snapshot import AuditFigures, Baselines, Build, Identity, PoolFigures, RankSnapshot, RankState
from memreclaim.service.rank import RankService, start_rank_service
from memreclaim.service.settings import ServiceSettings
from memreclaim.snapshot import FreedBytes, LayerReport
from memreclaim.states import Reason, State

if TYPE_CHECKING:
    from collections.abc import Iterator

    import torch

    from memreclaim.audit import Source

CONFIG = ref.ModelConfig.tiny()
TOKEN = "an-admin-token-of-the-tests"  # noqa: S105  no secret
SCRAPE_TOKEN = "a-scrape-token-of-the-tests"  # noqa: S105  no secret
QUIET = ServiceSettings(port=0, probe_seconds=0, audit_seconds=0)
"""A free port, nothing in the background."""
WEIGHT = 16 * 1024 * 1024
TWIN = WEIGHT // 2 + WEIGHT // 2048


def plant(model: torch.nn.Module, name: str = "layers.1.attn.wo_a.weight") -> None:
    """Change one bit of one weight, so that it has no exact twin."""
    import torch

    model.get_parameter(name).detach().view(torch.int16)[0, 0] ^= 1


class Engine:
    """A tiny engine with its reclaimer and service."""

    def __init__(self, path: str, settings: ServiceSettings, *, source: Source | None = None, tp_rank: int = 0) -> None:
        """Load the checkpoint at ``path``; nothing is reclaimed yet."""
        self.model = ref.load_model(path)
        self.pool = ref.PagedPool(CONFIG, capacity_tokens=256)
        self.server = ref.Server(self.model, self.pool, record_logits=False)
        self.adapter = ref.ReferenceAdapter(self.model, self.pool, self.server)
        self.reclaimer = Reclaimer(Settings(), pool=self.pool)
        self.service: RankService = start_rank_service(
            self.reclaimer, self.adapter, settings, identity=Identity("tiny", tp_rank=tp_rank), source=source
        )


@contextmanager
def engine(
    path: str,
    settings: ServiceSettings = QUIET,
    *,
    reclaim: bool = True,
    source: Source | None = None,
    tp_rank: int = 0,
) -> Iterator[Engine]:
    """A tiny engine for the length of a block, reclaimed unless told otherwise."""
    made = Engine(path, settings, source=source, tp_rank=tp_rank)
    try:
        if reclaim:
            made.service.reclaim_at_start()
        yield made
    finally:
        made.service.close()


def layer(
    index: int, state: State = State.RECLAIMED, reason: Reason | None = None, component: str = "target"
) -> LayerReport:
    """One made-up layer of V4.1 at TP4."""
    released = state is State.RECLAIMED
    wrong = reason is Reason.MISMATCH
    return LayerReport(
        name=f"{'mtp' if component == 'draft' else 'layers'}.{index}.attn.wo_a",
        component=component,
        state=state,
        reason=reason,
        weight_bytes=WEIGHT,
        gross_bytes=WEIGHT if released else 0,
        twin_bytes=TWIN if released else 0,
        mismatched_elements=3 if wrong else 0,
        first_mismatch=Mismatch((17, 2048), 0x3F81, 0x3F80) if wrong else None,
    )


def snapshot(tp_rank: int = 0, *, mismatch: int | None = None, damaged: bool = False) -> RankSnapshot:
    """A made-up rank of V4.1 at TP4: 40 layers and 3 of the draft."""
    layers = [layer(i) for i in range(40)] + [layer(i, component="draft") for i in range(3)]
    if mismatch is not None:
        layers[mismatch] = layer(mismatch, State.KEPT, Reason.MISMATCH)
    gross = sum(one.gross_bytes for one in layers)
    state = RankState.FAILED if damaged else RankState.DEGRADED if mismatch is not None else RankState.READY
    at = 1_790_000_000.0
    stock = {"1": 6.05e-6, "2..8": 8.0e-6, "9..192": 9.4e-6, ">192": 16.1e-6}
    twin = {"1": 4.1e-6, "2..8": 4.95e-6, "9..192": 7.4e-6, ">192": 19.2e-6}
    seconds = {("stock", rows): value for rows, value in stock.items()} | {
        ("twin", rows): v for rows, v in twin.items()
    }
    journal = Journal()
    for rows, value in twin.items():
        for _ in range(20):
            journal.observe("kernel_duration_seconds", value * 1.02, "small", rows)
    for _ in layers:
        journal.observe("proof_duration_seconds", 0.004)
    return RankSnapshot(
        version=1,
        taken_at=at,
        identity=Identity("DeepSeek-V4.1-Flash", tp_rank=tp_rank),
        build=Build("0.1.0", "2.11.0", "3.6.0", "NVIDIA H200", "9.0"),
        mode="on",
        numerics="identical",
        state=state,
        ranks=4,
        layers=tuple(layers),
        freed=FreedBytes(gross, gross, gross - 2 * 1024 * 1024),
        peak_extra_bytes=TWIN,
        pool=PoolFigures({"kv": 40_000_000_000}, 23_941_000, 215_700, "memory", 1670.75, 0),
        memory=(MemoryFigure("free", "cuda", 6_000_000_000), MemoryFigure("total", "cuda", 150_000_000_000)),
        audit=AuditFigures(3600.0, at - 600, {"target/layers.7.attn.wo_a": 1} if damaged else {}),
        baselines=Baselines(seconds),
        counts={("proofs_total", "exact"): 43, ("operations_total", "reclaim", "startup", "ok"): 2} | journal.counts(),
        histograms=journal.histograms(),
        running=None,
        events=_events(at, tp_rank, mismatch),
    )


def _events(at: float, tp_rank: int, mismatch: int | None) -> tuple[Event, ...]:
    found = [Event(at - 40 + tp_rank, "info", "service_started", {"url": f"http://127.0.0.1:{9411 + tp_rank}"})]
    if mismatch is not None:
        fields = {
            "layer": f"layers.{mismatch}.attn.wo_a",
            "component": "target",
            "reason": "mismatch",
            "mismatched_elements": 3,
        }
        found.append(Event(at - 34, "warning", "layer_kept", fields))
    done = {
        "layers": 43,
        "reclaimed": 42 if mismatch is not None else 43,
        "net_bytes": 360_400_000,
        "duration_s": 0.412,
    }
    return (*found, Event(at - 30 + tp_rank, "info", "weights_reclaimed", done))


class Still:
    """Stands for a :class:`memreclaim.rank.Rank` that shows one snapshot for ever."""

    def __init__(self, shown: RankSnapshot) -> None:
        """Show ``shown``."""
        self.shown = shown
        self.journal = Journal()

    def snapshot(self) -> RankSnapshot:
        """The same with what the service counted."""
        return replace(self.shown, counts={**self.shown.counts, **self.journal.counts()})
