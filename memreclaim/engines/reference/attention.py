"""Attention as in DeepSeek-V4.1: low-rank queries, one latent head shared by all, grouped output projection."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import torch
from torch import nn

from memreclaim import serve
from memreclaim.engines.reference.layers import Linear, RMSNorm, Rotary, unit_rms

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

    from memreclaim.engines.reference.batch import Batch, LatentCache
    from memreclaim.engines.reference.config import ModelConfig, TensorParallel
    from memreclaim.states import Phase


class Attention(nn.Module):
    """One rank's heads of one layer; names of children are those of the checkpoint."""

    def __init__(
        self, config: ModelConfig, parallel: TensorParallel, device: torch.device, group: ProcessGroup | None = None
    ) -> None:
        """Allocate the weights of this rank's ``n_local_groups`` output groups."""
        super().__init__()
        self.head_dim = config.head_dim
        self.rope_width, self.rope_theta = config.qk_rope_head_dim, config.rope_theta
        self.eps = config.rms_norm_eps
        self.o_lora_rank = config.o_lora_rank
        self.n_local_groups = parallel.local_groups(config.o_groups)
        self.n_local_heads = self.n_local_groups * config.heads_per_group
        self.group = group
        self.wq_a = Linear(config.hidden_size, config.q_lora_rank, device)
        self.q_norm = RMSNorm(config.q_lora_rank, config.rms_norm_eps, device)
        self.wq_b = Linear(config.q_lora_rank, self.n_local_heads * config.head_dim, device)
        self.wkv = Linear(config.hidden_size, config.head_dim, device)
        self.kv_norm = RMSNorm(config.head_dim, config.rms_norm_eps, device)
        self.wo_a = Linear(config.group_width, self.n_local_groups * config.o_lora_rank, device)
        self.wo_b = Linear(self.n_local_groups * config.o_lora_rank, config.hidden_size, device)

    def forward(
        self, x: torch.Tensor, batch: Batch, cache: LatentCache, layer: int, *, store: bool = True
    ) -> torch.Tensor:
        """Attend to each request's own tokens, those in ``cache`` and those of the batch before a row.

        Shape: bf16 ``[rows, hidden]``, kept. Side effect: with ``store`` the rows' latents are written to ``cache``.
        """
        rotary = self.rotary(batch.positions)
        queries: torch.Tensor = self.wq_b(self.q_norm(self.wq_a(x)))
        heads = queries.view(-1, self.n_local_heads, self.head_dim)
        heads = rotary(unit_rms(heads.float(), self.eps).to(x.dtype))
        latents = self.latents(x, rotary)
        out = torch.empty_like(heads)
        for segment, rows in batch.pieces():
            seen = torch.cat((cache.read(layer, segment.table, segment.start), latents[rows]))
            out[rows] = attend(heads[rows], seen)
            if store:
                cache.write(layer, segment.table, segment.start, latents[rows])
        out = rotary(out, inverse=True)
        return self.combine(self.project(out.view(x.shape[0], self.n_local_groups, -1), batch.phase))

    def rotary(self, positions: torch.Tensor) -> Rotary:
        """Rotation at int64 ``positions [rows]``."""
        return Rotary(self.rope_width, self.rope_theta, positions)

    def latents(self, x: torch.Tensor, rotary: Rotary) -> torch.Tensor:
        """Key and value of each row in one: bf16 ``[rows, hidden]`` -> ``[rows, head_dim]``."""
        return rotary(self.kv_norm(self.wkv(x)))

    def project(self, o: torch.Tensor, phase: Phase) -> torch.Tensor:
        """The one place in this engine that reads ``wo_a``.

        Shape: bf16 ``[rows, G, group_width]`` -> ``[rows, G, o_lora_rank]``.
        """
        return serve.grouped_projection(o, self.wo_a.weight, phase=phase)

    def combine(self, low: torch.Tensor) -> torch.Tensor:
        """``wo_b`` over all groups, summed over ranks in fp32.

        Shape: bf16 ``[rows, G, o_lora_rank]`` -> ``[rows, hidden]``.
        """
        part: torch.Tensor = self.wo_b(low.flatten(1))
        if self.group is None:
            return part
        total = part.float()
        torch.distributed.all_reduce(total, group=self.group)
        return total.to(part.dtype)


def attend(queries: torch.Tensor, latents: torch.Tensor) -> torch.Tensor:
    """Causal attention of the last rows of one request, the latent being key and value.

    In fp32: in bf16, on a CPU without bf16 arithmetic, the demo's workload took 7.7 s of one core instead of 5.8 s,
    most of the difference in the products of its 200-row prompt.

    Shapes: bf16 ``[rows, heads, dim]`` of the last tokens, ``[tokens, dim]`` -> ``[rows, heads, dim]``.
    """
    rows, heads, dim = queries.shape
    tokens = latents.shape[0]
    wide = latents.float()
    scores = (queries.float().view(rows * heads, dim) @ wide.T).view(rows, heads, tokens) / math.sqrt(dim)
    hidden = torch.ones((rows, tokens), dtype=torch.bool, device=queries.device).triu(tokens - rows + 1)
    weights = scores.masked_fill(hidden.unsqueeze(1), -math.inf).softmax(dim=-1)
    return (weights.view(rows * heads, tokens) @ wide).view(rows, heads, dim).to(latents.dtype)
