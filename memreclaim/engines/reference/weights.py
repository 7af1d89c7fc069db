"""Which tensors a checkpoint of the embedded decoder has, and how a rank takes its share of them."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch

from memreclaim.engines.reference.config import TensorParallel

if TYPE_CHECKING:
    from memreclaim.engines.reference.config import ModelConfig
    from memreclaim.engines.reference.model import ReferenceModel


@dataclass(frozen=True)
class WeightLoader:
    """Copies a tensor of the checkpoint into a parameter; engines keep one as ``parameter.weight_loader``.

    With an ``axis`` the tensor is made of ``groups`` equal pieces along it and the rank takes its own, padded groups
    included: those hold zeros, or in ``wo_a`` the last group again when the engine pads so.
    """

    groups: int = 1
    axis: int | None = None
    parallel: TensorParallel = field(default_factory=TensorParallel)

    def __call__(self, parameter: torch.Tensor, loaded: torch.Tensor) -> None:
        """Fill ``parameter`` in place. Raises ``ValueError`` when the shapes do not fit."""
        share = loaded if self.axis is None else self._narrow(loaded, self.axis)
        if share.shape != parameter.shape:
            message = f"a tensor of shape {tuple(share.shape)} does not fit a parameter of {tuple(parameter.shape)}"
            raise ValueError(message)
        parameter.data.copy_(share)

    def _narrow(self, loaded: torch.Tensor, axis: int) -> torch.Tensor:
        local = self.parallel.local_groups(self.groups)
        first = self.parallel.rank * local
        pieces = loaded.reshape(*loaded.shape[:axis], self.groups, -1, *loaded.shape[axis + 1 :])
        own = pieces.narrow(axis, min(first, self.groups), max(0, min(local, self.groups - first)))
        missing = local - own.shape[axis]
        if missing:
            last = pieces.narrow(axis, self.groups - 1, 1)
            padding = last if self.parallel.padding == "repeat" else torch.zeros_like(last)
            own = torch.cat([own, *[padding] * missing], dim=axis)
        return own.flatten(axis, axis + 1)


def expected_shapes(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Name and shape of every weight in a checkpoint, in order; each ``wo_a`` has scales beside it."""
    hidden, heads = config.hidden_size, config.num_attention_heads * config.head_dim
    block = {
        "attn_norm.weight": (hidden,),
        "attn.wq_a.weight": (config.q_lora_rank, hidden),
        "attn.q_norm.weight": (config.q_lora_rank,),
        "attn.wq_b.weight": (heads, config.q_lora_rank),
        "attn.wkv.weight": (config.head_dim, hidden),
        "attn.kv_norm.weight": (config.head_dim,),
        "attn.wo_a.weight": (config.o_groups * config.o_lora_rank, config.group_width),
        "attn.wo_b.weight": (hidden, config.o_groups * config.o_lora_rank),
        "ffn_norm.weight": (hidden,),
        "ffn.w1.weight": (config.intermediate_size, hidden),
        "ffn.w2.weight": (hidden, config.intermediate_size),
        "ffn.w3.weight": (config.intermediate_size, hidden),
    }
    mixing = {
        "enorm.weight": (hidden,),
        "hnorm.weight": (hidden,),
        "e_proj.weight": (hidden, hidden),
        "h_proj.weight": (hidden, hidden),
    }
    shapes: dict[str, tuple[int, ...]] = {"embed.weight": (config.vocab_size, hidden)}
    for layer in range(config.num_hidden_layers):
        shapes |= {f"layers.{layer}.{name}": shape for name, shape in block.items()}
    for layer in range(config.num_nextn_predict_layers):
        shapes |= {f"mtp.{layer}.{name}": shape for name, shape in (mixing | block).items()}
    return shapes | {"norm.weight": (hidden,), "head.weight": (config.vocab_size, hidden)}


def attach_loaders(model: ReferenceModel) -> None:
    """Give every parameter of ``model`` its ``weight_loader``."""
    groups, parallel = model.config.o_groups, model.parallel
    zeros = TensorParallel(parallel.rank, parallel.size)
    narrowed = {
        "wq_b": WeightLoader(groups, 0, zeros),
        "wo_a": WeightLoader(groups, 0, parallel),
        # Zero columns here make a padded group's output vanish, whatever stands in its wo_a.
        "wo_b": WeightLoader(groups, 1, zeros),
    }
    for name, parameter in model.named_parameters():
        loader = narrowed.get(name.split(".")[-2], WeightLoader())
        parameter.weight_loader = loader  # type: ignore[attr-defined]
