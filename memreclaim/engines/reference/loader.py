"""Loading a real-layout checkpoint the way engines do: ``wo_a`` is dequantised to bf16, everything else is copied."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from memreclaim.checkpoint import Checkpoint, dequantize_wo_a
from memreclaim.engines.reference.config import ModelConfig
from memreclaim.engines.reference.model import ReferenceModel
from memreclaim.engines.reference.weights import attach_loaders, expected_shapes
from memreclaim.errors import CheckpointError

if TYPE_CHECKING:
    import os
    from collections.abc import Callable, Iterable, Iterator

    from torch.distributed import ProcessGroup

    from memreclaim.engines.reference.config import TensorParallel

_SCALED = ".attn.wo_a.weight"


def load_model(
    path: str | os.PathLike[str],
    *,
    device: torch.device | str = "cpu",
    parallel: TensorParallel | None = None,
    group: ProcessGroup | None = None,
    progress: Callable[[str, int], None] | None = None,
) -> ReferenceModel:
    """Build one rank's model and fill it from the checkpoint at ``path``.

    Peak memory beside the model: one ``wo_a`` of all ranks with its codes. ``progress`` gets name and bytes of each
    tensor. Raises :class:`CheckpointError` for files and tensors, :class:`ConfigError` for ``config.json``.
    """
    with Checkpoint(path) as checkpoint:
        config = ModelConfig.from_dict(checkpoint.config)
        check_tensors(checkpoint, config)
        model = ReferenceModel(config, device=device, parallel=parallel, group=group)
        attach_loaders(model)
        for name, tensor in weights(checkpoint):
            load_weight(model, name, tensor)
            if progress is not None:
                progress(name, tensor.nbytes)
    return model


def load_weights(model: ReferenceModel, named: Iterable[tuple[str, torch.Tensor]]) -> None:
    """Overwrite weights of a model that may be serving; hold the engine at a safe point meanwhile.

    Raises ``AttributeError`` for an unknown name and ``ValueError`` for a shape that does not fit; what came before it
    is then loaded.
    """
    for name, tensor in named:
        load_weight(model, name, tensor)


@torch.no_grad()
def load_weight(model: ReferenceModel, name: str, tensor: torch.Tensor) -> None:
    """Hand one tensor of all ranks to its parameter's own ``weight_loader``."""
    parameter = model.get_parameter(name)
    parameter.weight_loader(parameter, tensor)  # type: ignore[attr-defined]


def weights(checkpoint: Checkpoint) -> Iterator[tuple[str, torch.Tensor]]:
    """Name and bf16 tensor of every weight, one at a time; fp8 ``wo_a`` dequantised, shards in any order."""
    scales = {checkpoint.scale_name(name) for name in checkpoint.names if name.endswith(_SCALED)}
    for name in checkpoint.names:
        if name in scales:
            continue
        tensor = checkpoint.tensor(name)
        if tensor.dtype != torch.bfloat16:
            tensor = _dequantized(checkpoint, name, tensor)
        yield name, tensor


def check_tensors(checkpoint: Checkpoint, config: ModelConfig) -> None:
    """Compare names and shapes with the configuration, before anything is allocated.

    Raises :class:`CheckpointError` naming the first tensor that is missing, unknown or of another shape.
    """
    expected = expected_shapes(config)
    for name, shape in expected.items():
        if name not in checkpoint:
            raise CheckpointError(checkpoint.path, f"{name} is missing")
        found = tuple(checkpoint.info(name).shape)
        if found != shape:
            message = f"{name} has shape {list(found)}, config.json asks for {list(shape)}"
            raise CheckpointError(checkpoint.path, message)
    scales = {checkpoint.scale_name(name) for name in expected if name.endswith(_SCALED)}
    for name in checkpoint.names:
        if name not in expected and name not in scales:
            raise CheckpointError(checkpoint.path, f"the embedded engine has no weight {name}")


def _dequantized(checkpoint: Checkpoint, name: str, codes: torch.Tensor) -> torch.Tensor:
    if codes.dtype != torch.float8_e4m3fn or not name.endswith(_SCALED):
        raise CheckpointError(checkpoint.path, f"{name} is {codes.dtype}; only wo_a may be anything but bfloat16")
    scale = checkpoint.scale_name(name)
    if scale is None:
        raise CheckpointError(checkpoint.path, f"{name} has no scales beside it")
    try:
        return dequantize_wo_a(codes, checkpoint.tensor(scale))
    except ValueError as error:
        raise CheckpointError(checkpoint.path, f"{name}: {error}") from error
