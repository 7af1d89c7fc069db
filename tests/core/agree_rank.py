"""One of four ranks of the agreement tests; prints one JSON object per scenario."""

from __future__ import annotations

import json
import os
import sys
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import torch
from torch import distributed as dist
from torch.distributed import distributed_c10d

from memreclaim import Reason, Reclaimer
from memreclaim.agree import Agreement, Terms

if TYPE_CHECKING:
    from collections.abc import Mapping

PATIENT, SHORT = 60.0, 0.3
SAME = {"memreclaim": "1", "settings": "a"}


def settle(subject: str, seconds: float, verdicts: Mapping[str, Reason | None], prints: Mapping[str, str]) -> None:
    """Agree once and print what this rank was told."""
    agreement = Agreement(dist.group.WORLD, prints, subject, seconds)
    kept = agreement(verdicts)
    tell(subject, {"go": agreement.decision.go, "why": agreement.decision.why, "kept": dict(kept)})


def tell(scenario: str, result: Mapping[str, Any]) -> None:
    """Print one scenario's result."""
    print(json.dumps({"scenario": scenario, **result}), flush=True)  # noqa: T201  what the test reads


def reclaim(rank: int) -> None:
    """A real reclaim: rank 2's second layer has no twin."""
    model = torch.nn.ModuleDict({f"layer{index}": torch.nn.Module() for index in range(2)})
    for layer in model.values():
        layer.n_local_groups = 2
        layer.wo_a = torch.nn.Linear(32, 64, bias=False, dtype=torch.bfloat16)
        torch.nn.init.constant_(layer.wo_a.weight, 0.5)
    if rank == 2:
        with torch.no_grad():
            model["layer1"].wo_a.weight[3, 4] = 1.0078125
    agreement = Agreement(dist.group.WORLD, SAME, "reclaim", PATIENT)
    report = Reclaimer().reclaim(model, terms=Terms(agree=agreement))
    all_ranks = agreement.share(report.to_dict(), "report")
    tell(
        "reclaim",
        {
            "layers": {layer.name: [layer.state, layer.reason] for layer in report.layers},
            "reports": [None if one is None else one["gross_bytes"] for one in all_ranks],
        },
    )


def main(rank: int, port: int) -> None:
    """Run all scenarios in order; rank 2 dies in the last but one, rank 0, which holds the store, in the last."""
    dist.init_process_group(
        "gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=4, timeout=timedelta(seconds=120)
    )
    exact: dict[str, Reason | None] = {"a": None, "b": None}
    settle("agree", PATIENT, exact, SAME)
    settle("verdict", PATIENT, {**exact, "b": Reason.MISMATCH} if rank == 1 else exact, SAME)
    settle("version", PATIENT, exact, {**SAME, "memreclaim": "2"} if rank == 3 else SAME)
    reclaim(rank)
    if rank != 1:
        settle("off", SHORT, exact, SAME)
    dist.barrier()
    if rank == 3:
        store = distributed_c10d._get_process_group_store(dist.group.WORLD)
        store.wait(["memreclaim/slow/1/verdicts/decision"], timedelta(seconds=PATIENT))
    settle("slow", SHORT, exact, SAME)
    total = torch.ones(1)
    dist.all_reduce(total)
    tell("engine", {"sum": float(total)})
    if rank == 2:
        os._exit(9)
    settle("dead", SHORT, exact, SAME)
    store = distributed_c10d._get_process_group_store(dist.group.WORLD)
    if rank == 0:
        store.wait(["told/1", "told/3"], timedelta(seconds=PATIENT))
        os._exit(0)
    store.set(f"told/{rank}", "")
    settle("host", SHORT, exact, SAME)
    sys.stdout.flush()
    os._exit(0)  # the group cannot be taken down in order: two of its ranks are gone


if __name__ == "__main__":
    torch.set_num_threads(1)
    main(int(sys.argv[1]), int(sys.argv[2]))
