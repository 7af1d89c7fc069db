"""Tensor parallelism with real processes: partial sums are added over the group."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import pytest
import torch
from engine_ranks import DRAFTS, NEW_TOKENS, PROMPTS, run_rank
from engine_runs import serve
from torch import multiprocessing

from memreclaim.engines import reference as ref

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = pytest.mark.integration

EIGHT = replace(ref.ModelConfig.tiny(), num_attention_heads=16, o_groups=8, num_hidden_layers=1)


def test_three_padded_ranks_answer_as_one(tmp_path: Path) -> None:
    """All ranks agree in every bit, on bf16 and on twins; the scores are those of one rank up to the order of sums."""
    checkpoint = ref.write_random_checkpoint(tmp_path / "eight", EIGHT, seed=5)
    multiprocessing.spawn(run_rank, args=(3, str(checkpoint), str(tmp_path)), nprocs=3)
    ranks = [torch.load(tmp_path / f"rank{rank}.pt") for rank in range(3)]
    alone = serve(ref.load_model(checkpoint), ref.PagedPool(EIGHT, capacity_tokens=256), PROMPTS, NEW_TOKENS, DRAFTS)
    for rank in ranks:
        assert rank["states"] == ["reclaimed", "reclaimed"]
        for run in range(2):
            assert rank["tokens"][run] == ranks[0]["tokens"][0]
            for mine, first in zip(rank["logits"][run], ranks[0]["logits"][0], strict=True):
                assert torch.equal(mine.view(torch.int32), first.view(torch.int32))
    for request, scores in zip(alone, ranks[0]["logits"][0], strict=True):
        torch.testing.assert_close(request.logits[0], scores[0], atol=0.5, rtol=0)
