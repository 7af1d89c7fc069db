"""The decoder: target layers, and draft blocks that propose several tokens in one call."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import nn
from torch.nn import functional

from memreclaim.engines.reference.attention import Attention
from memreclaim.engines.reference.config import TensorParallel
from memreclaim.engines.reference.layers import Linear, Mlp, RMSNorm

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

    from memreclaim.engines.reference.batch import Batch, LatentCache
    from memreclaim.engines.reference.config import ModelConfig


class Block(nn.Module):
    """Attention and MLP, each behind a norm and added to the residual stream."""

    def __init__(
        self, config: ModelConfig, parallel: TensorParallel, device: torch.device, group: ProcessGroup | None
    ) -> None:
        """Allocate one layer."""
        super().__init__()
        self.attn_norm = RMSNorm(config.hidden_size, config.rms_norm_eps, device)
        self.attn = Attention(config, parallel, device, group)
        self.ffn_norm = RMSNorm(config.hidden_size, config.rms_norm_eps, device)
        self.ffn = Mlp(config, device)

    def forward(
        self, x: torch.Tensor, batch: Batch, cache: LatentCache, layer: int, *, store: bool = True
    ) -> torch.Tensor:
        """Shape: bf16 ``[rows, hidden]``, kept; see :meth:`Attention.forward` for ``store``."""
        x = x + self.attn(self.attn_norm(x), batch, cache, layer, store=store)
        y: torch.Tensor = x + self.ffn(self.ffn_norm(x))
        return y


class DraftBlock(Block):
    """A block that reads the target's hidden state beside the tokens' embeddings."""

    def __init__(
        self, config: ModelConfig, parallel: TensorParallel, device: torch.device, group: ProcessGroup | None
    ) -> None:
        """Allocate one draft layer."""
        super().__init__(config, parallel, device, group)
        self.enorm = RMSNorm(config.hidden_size, config.rms_norm_eps, device)
        self.hnorm = RMSNorm(config.hidden_size, config.rms_norm_eps, device)
        self.e_proj = Linear(config.hidden_size, config.hidden_size, device)
        self.h_proj = Linear(config.hidden_size, config.hidden_size, device)

    def mix(self, embedded: torch.Tensor, hidden: torch.Tensor) -> torch.Tensor:
        """Input of the block from embeddings and the target's hidden states, both bf16 ``[rows, hidden]``."""
        y: torch.Tensor = self.e_proj(self.enorm(embedded)) + self.h_proj(self.hnorm(hidden))
        return y

    def remember(self, hidden: torch.Tensor, batch: Batch, cache: LatentCache, layer: int) -> None:
        """Write the draft's latents of tokens whose target hidden states ``[rows, hidden]`` are known."""
        latents = self.attn.latents(self.attn_norm(self.hnorm(hidden)), self.attn.rotary(batch.positions))
        for segment, rows in batch.pieces():
            cache.write(layer, segment.table, segment.start, latents[rows])


class ReferenceModel(nn.Module):
    """Target and draft in one tree, named as in the checkpoint: ``layers.N.attn.wo_a``, ``mtp.N.attn.wo_a``."""

    def __init__(
        self,
        config: ModelConfig,
        *,
        device: torch.device | str = "cpu",
        parallel: TensorParallel | None = None,
        group: ProcessGroup | None = None,
    ) -> None:
        """Allocate one rank's weights, uninitialised.

        Without a ``group`` nothing is summed over ranks: with ``parallel.size > 1`` the outputs are then those of this
        rank's heads alone.
        """
        super().__init__()
        self.config, self.parallel = config, parallel or TensorParallel()
        device = torch.device(device)
        self.embed = Linear(config.hidden_size, config.vocab_size, device)
        share = (config, self.parallel, device, group)
        self.layers = nn.ModuleList(Block(*share) for _ in range(config.num_hidden_layers))
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps, device)
        self.head = Linear(config.hidden_size, config.vocab_size, device)
        self.mtp = nn.ModuleList(DraftBlock(*share) for _ in range(config.num_nextn_predict_layers))

    @property
    def device(self) -> torch.device:
        """Where the weights are."""
        return self.norm.weight.device

    @torch.no_grad()
    def forward(self, batch: Batch, cache: LatentCache) -> torch.Tensor:
        """Run the target: hidden states bf16 ``[rows, hidden]`` before the last norm.

        Side effect: latents of all rows are written to ``cache``, for target and draft layers.
        """
        x = self._embed(batch.tokens)
        for index, layer in enumerate(self.layers):
            x = layer(x, batch, cache, index)
        for index, block in enumerate(self._draft_blocks(), start=len(self.layers)):
            block.remember(x, batch, cache, index)
        return x

    @torch.no_grad()
    def draft(self, batch: Batch, hidden: torch.Tensor, cache: LatentCache) -> torch.Tensor:
        """Run the draft blocks over guessed tokens: logits fp32 ``[rows, vocab]``.

        ``hidden`` bf16 ``[requests, hidden]`` is the target's state of each request's last cached token. Nothing is
        stored.
        """
        rows = torch.tensor([segment.rows for segment in batch.segments], device=hidden.device)
        x = self._embed(batch.tokens)
        spread = hidden.repeat_interleave(rows, dim=0)
        for index, block in enumerate(self._draft_blocks(), start=len(self.layers)):
            x = block(block.mix(x, spread), batch, cache, index, store=False)
        return self.logits(x)

    @torch.no_grad()
    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Scores of the next token: bf16 ``[rows, hidden]`` -> fp32 ``[rows, vocab]``.

        In fp32, since bf16 scores of 512 tokens tie often and a tie would be broken by the library's choice.
        """
        normed: torch.Tensor = self.norm(hidden)
        return functional.linear(normed.float(), self.head.weight.float())

    @torch.no_grad()
    def guess(self, tokens: torch.Tensor, count: int) -> torch.Tensor:
        """A chain of ``count`` tokens from each of ``tokens [requests]``, itself first, by embedding and head alone.

        The draft blocks start from it and refine all of it in one call. Shape: int64 ``[requests, count]``.
        """
        chain = [tokens]
        while len(chain) < count:
            chain.append(self.logits(self._embed(chain[-1])).argmax(dim=-1))
        return torch.stack(chain, dim=1)

    def _embed(self, tokens: torch.Tensor) -> torch.Tensor:
        return functional.embedding(tokens, self.embed.weight)

    def _draft_blocks(self) -> list[DraftBlock]:
        return [block for block in self.mtp if isinstance(block, DraftBlock)]
