"""One rank of a tensor-parallel group, as a process of its own."""

from __future__ import annotations

from pathlib import Path

import torch
from engine_runs import serve
from torch import distributed

from memreclaim import Reclaimer
from memreclaim.engines import reference as ref

PROMPTS = ((1, 2, 3, 4, 5), (9, 8, 7))
NEW_TOKENS, DRAFTS = 8, 3


def run_rank(rank: int, size: int, checkpoint: str, folder: str) -> None:
    """Serve on bf16 and on twins, and leave tokens and scores of both in ``folder``."""
    torch.set_num_threads(1)
    store = distributed.FileStore(f"{folder}/store", size)
    distributed.init_process_group("gloo", store=store, rank=rank, world_size=size)
    try:
        group = distributed.group.WORLD
        model = ref.load_model(checkpoint, parallel=ref.TensorParallel(rank, size, "repeat"), group=group)
        pool = ref.PagedPool(model.config, capacity_tokens=256)
        runs = [serve(model, pool, PROMPTS, NEW_TOKENS, DRAFTS)]
        report = Reclaimer().reclaim(model)
        runs.append(serve(model, pool, PROMPTS, NEW_TOKENS, DRAFTS))
        found = {
            "tokens": [[request.tokens for request in run] for run in runs],
            "logits": [[torch.stack(request.logits) for request in run] for run in runs],
            "states": [layer.state.value for layer in report.layers],
        }
        torch.save(found, Path(folder) / f"rank{rank}.pt")
    finally:
        distributed.destroy_process_group()
