"""Random checkpoints of V4.1's layout: sane scores, answers that depend on the prompt, drafts that are often right.

Every ``wo_a`` is made as real ones are: any finite e4m3 codes, exponents 115..126, which is the range of all 1,552
scale tensors of a released V4-Flash. The rest is scaled around it.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import torch

from memreclaim.checkpoint import dequantize_wo_a, write_checkpoint
from memreclaim.engines.reference.weights import expected_shapes

if TYPE_CHECKING:
    import os
    from pathlib import Path

    from memreclaim.engines.reference.config import ModelConfig

_BLOCK = 32
_EXPONENTS = (115, 127)
_E4M3_NAN = 0x7F
_QUERY_GAIN = 2.0
"""Attention scores of about this standard deviation: some tokens matter more than others."""
_ATTENTION_GAIN = 1.2
_MLP_GAIN = 0.8
_DRAFT_GAIN = 0.15
"""Share of a block's output against the embedding's rms of 1, in target layers and in draft blocks."""
_SCORE_GAIN = 12.0


def write_random_checkpoint(
    path: str | os.PathLike[str], config: ModelConfig, *, seed: int = 0, shards: int = 2
) -> Path:
    """Write a random checkpoint; raises :class:`memreclaim.errors.CheckpointError` when ``path`` exists."""
    return write_checkpoint(path, random_checkpoint_tensors(config, seed=seed, shards=shards), config.to_dict())


def random_checkpoint_tensors(config: ModelConfig, *, seed: int = 0, shards: int = 2) -> list[dict[str, torch.Tensor]]:
    """Tensors of a random checkpoint, spread over ``shards``; the same seed gives the same bytes.

    Codes and scales of a ``wo_a`` may come to stand in different shards, as in real checkpoints.
    """
    if shards < 1:
        message = f"a checkpoint has at least one shard, not {shards}"
        raise ValueError(message)
    tensors = _Synthesis(config, seed).tensors()
    names = list(tensors)
    per_shard = -(-len(names) // shards)
    return [{name: tensors[name] for name in names[i : i + per_shard]} for i in range(0, len(names), per_shard)]


class _Synthesis:
    """One pass over the names of a checkpoint with one random generator."""

    def __init__(self, config: ModelConfig, seed: int) -> None:
        self._config = config
        self._random = torch.Generator().manual_seed(seed)
        self._embedding = self._normal((config.vocab_size, config.hidden_size), 1.0)
        self._wo_a_rms = 1.0

    def tensors(self) -> dict[str, torch.Tensor]:
        """Every tensor by name, ``wo_a`` as codes and scales."""
        made: dict[str, torch.Tensor] = {}
        for name, shape in expected_shapes(self._config).items():
            if name.endswith("wo_a.weight"):
                codes, scales = self._quantized(shape)
                self._wo_a_rms = float(dequantize_wo_a(codes, scales).float().square().mean().sqrt())
                made[name], made[name.removesuffix("weight") + "scale"] = codes, scales
            else:
                made[name] = self._plain(name, shape)
        return made

    def _plain(self, name: str, shape: tuple[int, ...]) -> torch.Tensor:
        part = name.split(".")[-2]
        if part.endswith("norm"):
            return torch.ones(shape, dtype=torch.bfloat16)
        if part == "embed":
            return self._embedding
        if part == "head":
            return self._successors()
        fan_in = 1 / math.sqrt(shape[-1])
        gain = _DRAFT_GAIN if name.startswith("mtp.") else 1.0
        if part == "e_proj":
            return (torch.eye(shape[0]) + self._normal(shape, 0.05 * fan_in).float()).bfloat16()
        scales = {
            "wq_b": _QUERY_GAIN * fan_in,
            "h_proj": _DRAFT_GAIN * fan_in,
            "w2": gain * _MLP_GAIN * 2 * fan_in,
            # Attention's average has an rms near 0.5, wo_a multiplies it by its own rms and the root of its depth.
            "wo_b": gain * _ATTENTION_GAIN * fan_in / (0.5 * self._wo_a_rms * math.sqrt(self._config.group_width)),
        }
        return self._normal(shape, scales.get(part, fan_in))

    def _successors(self) -> torch.Tensor:
        """A head in which each token's embedding points to one other token, so that a draft has something to find."""
        successor = torch.randperm(self._config.vocab_size, generator=self._random)
        head = torch.empty_like(self._embedding)
        head[successor] = self._embedding
        return (head.float() * (_SCORE_GAIN / math.sqrt(self._config.hidden_size))).bfloat16()

    def _normal(self, shape: tuple[int, ...], deviation: float) -> torch.Tensor:
        return (torch.randn(shape, generator=self._random) * deviation).bfloat16()

    def _quantized(self, shape: tuple[int, ...]) -> tuple[torch.Tensor, torch.Tensor]:
        """Codes float8_e4m3fn ``[rows, columns]`` and scales float8_e8m0fnu ``[rows/32, columns/32]``."""
        values = torch.randint(0, 2 * _E4M3_NAN, shape, dtype=torch.uint8, generator=self._random)
        # 254 finite codes: 0x00..0x7e and 0x80..0xfe.
        codes = values + (values >= _E4M3_NAN).to(torch.uint8)
        grid = (shape[0] // _BLOCK, shape[1] // _BLOCK)
        scales = torch.randint(*_EXPONENTS, grid, dtype=torch.uint8, generator=self._random)
        return codes.view(torch.float8_e4m3fn), scales.view(torch.float8_e8m0fnu)
