"""Exact weights from the checkpoint that an engine loaded, for twins that were damaged in memory.

The checkpoint gives codes and scales of all ranks; the parameter's own ``weight_loader`` takes this rank's share, as
it did at start.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from memreclaim.checkpoint import Checkpoint, dequantize_wo_a
from memreclaim.errors import CheckpointError

if TYPE_CHECKING:
    import os
    from collections.abc import Callable

    from memreclaim.ledger import Entry
    from memreclaim.tag import Tag


def checkpoint_source(
    path: str | os.PathLike[str], names: Callable[[str], str] | None = None
) -> Callable[[Entry], torch.Tensor]:
    """Source for :class:`memreclaim.audit.Auditor` that reads ``path`` when it is needed.

    ``names`` maps a layer to its module's name in the checkpoint; left out, they are the same. Raises
    :class:`CheckpointError` when the weight cannot be read, or the parameter has no ``weight_loader`` and another
    shape.
    """

    def source(entry: Entry) -> torch.Tensor:
        name = (names(entry.name) if names else entry.name) + ".weight"
        tag = entry.tags()[0]
        with Checkpoint(path) as checkpoint:
            loaded = _bf16(checkpoint, name)
        weight = torch.nn.Parameter(torch.empty(tag.shape, dtype=tag.dtype, device=tag.device), requires_grad=False)
        _load(tag, weight, loaded, str(path))
        return weight.detach()

    return source


def _bf16(checkpoint: Checkpoint, name: str) -> torch.Tensor:
    if name not in checkpoint:
        raise CheckpointError(checkpoint.path, f"holds no {name}")
    codes, scale = checkpoint.tensor(name), checkpoint.scale_name(name)
    return codes if scale is None else dequantize_wo_a(codes, checkpoint.tensor(scale))


def _load(tag: Tag, weight: torch.nn.Parameter, loaded: torch.Tensor, path: str) -> None:
    loader = getattr(tag, "weight_loader", None)
    if loader is not None:
        loader(weight, loaded)
    elif loaded.shape == weight.shape:
        weight.data.copy_(loaded)
    else:
        raise CheckpointError(
            path, f"{tuple(loaded.shape)} does not fit {tuple(weight.shape)}, and there is no weight_loader"
        )
