"""Reclaiming and restoring a whole engine through its adapter: every part, its refusals, its books, at a safe point.

The caller holds the engine's safe point. Twins are allocated where the adapter says.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from memreclaim._version import __version__
from memreclaim.agree import Agreement, Terms
from memreclaim.engines.base import refusals
from memreclaim_kernels import plan

if TYPE_CHECKING:
    from torch import nn

    from memreclaim.config import Settings
    from memreclaim.engines.base import EngineAdapter, ModelPart
    from memreclaim.reclaimer import Reclaimer
    from memreclaim.snapshot import Report


def reclaim(reclaimer: Reclaimer, adapter: EngineAdapter) -> tuple[Report, ...]:
    """Reclaim every model of the engine that the settings allow; one report per part."""
    parts = [part for part in adapter.models() if part.role != "draft" or reclaimer.settings.draft]
    return tuple(adapter.reclaim(reclaimer, part) for part in parts)


def reclaim_part(reclaimer: Reclaimer, adapter: EngineAdapter, part: ModelPart) -> Report:
    """Reclaim one part by what the adapter says of it, for an engine that adds no terms of its own."""
    before = net_bytes(reclaimer)
    with adapter.allocations():
        report = reclaimer.reclaim(
            part.root,
            component=part.role.value,
            prefix=part.prefix,
            refused=refusals(adapter, part, reclaimer.settings.targets),
            terms=_terms(reclaimer, adapter, part.role.value),
        )
    adapter.released(net_bytes(reclaimer) - before)
    return report


def restore(reclaimer: Reclaimer, adapter: EngineAdapter) -> tuple[Report, ...]:
    """Make every tag of the engine its bf16 weight again; one report per model tree."""
    roots: dict[int, nn.Module] = {id(part.root): part.root for part in adapter.models()}
    reports = []
    for root in roots.values():
        before = net_bytes(reclaimer)
        with adapter.allocations():
            reports.append(reclaimer.restore(root))
        adapter.released(net_bytes(reclaimer) - before)
    return tuple(reports)


def _terms(reclaimer: Reclaimer, adapter: EngineAdapter, subject: str) -> Terms:
    """With several ranks, each proves first, and all drop the same layers or none."""
    group = adapter.group()
    if group is None:
        return Terms()
    device = next(adapter.models()[0].root.parameters()).device
    return Terms(agree=Agreement(group, fingerprint(reclaimer.settings, adapter.name, device), subject))


def fingerprint(settings: Settings, engine: str, device: torch.device) -> dict[str, str]:
    """What must be the same on every rank before any drops a weight: versions, settings, device, how calls are served.

    ``engine`` names the engine and its build. Kernels should be judged before: their verdicts are part of it. Each
    setting stands by its own name, so that ranks that differ say in what; addresses of HTTP may differ.
    """
    about = plan.device_of(device)
    return {
        **{name: str(value) for name, value in vars(settings).items() if name != "http"},
        "memreclaim": __version__,
        "engine": engine,
        "torch": torch.__version__,
        "device": f"{about.name} {about.capability}",
        "backend": plan.backend_for(about),
        "kernels": plan.digest(),
    }


def net_bytes(reclaimer: Reclaimer, component: str | None = None) -> int:
    """What released layers gain now by the ledger, of one component or of all: bf16 bytes less their twins'."""
    return sum(one.gross_bytes - one.twin_bytes for one in reclaimer.ledger.layers(component) if one.gross_bytes)
