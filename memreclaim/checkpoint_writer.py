"""Writes a checkpoint in the layout in which DeepSeek-V4.1 is released."""

from __future__ import annotations

import json
import shutil
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

from memreclaim.errors import CheckpointError
from memreclaim.shard import CONFIG_NAME, INDEX_NAME

if TYPE_CHECKING:
    import os
    from collections.abc import Mapping, Sequence

    import torch


def write_checkpoint(
    path: str | os.PathLike[str],
    shards: Sequence[Mapping[str, torch.Tensor]],
    config: Mapping[str, Any],
    *,
    index: bool = True,
) -> Path:
    """Write a new folder ``path`` with ``config.json``, index and ``shards`` as ``model-0000i-of-0000n.safetensors``.

    Everything is written beside ``path`` under a temporary name and renamed in one step, so that a folder of that
    name is always whole. Raises :class:`CheckpointError` when ``path`` exists or cannot be written.
    """
    from safetensors.torch import save_file

    target = Path(path)
    if target.exists():
        raise CheckpointError(target, "exists already")
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        partial = Path(tempfile.mkdtemp(prefix=f".{target.name}.", dir=target.parent))
    except OSError as error:
        raise CheckpointError(target, error.strerror or str(error)) from error
    try:
        weight_map = {}
        for number, tensors in enumerate(shards, start=1):
            name = f"model-{number:05}-of-{len(shards):05}.safetensors"
            save_file(dict(tensors), partial / name, metadata={"format": "pt"})
            weight_map.update(dict.fromkeys(tensors, name))
        total = sum(tensor.nbytes for tensors in shards for tensor in tensors.values())
        if index:
            content = {"metadata": {"total_size": total}, "weight_map": weight_map}
            (partial / INDEX_NAME).write_text(json.dumps(content, indent=1))
        (partial / CONFIG_NAME).write_text(json.dumps(dict(config), indent=1))
        partial.chmod(0o755)
        partial.rename(target)
    except OSError as error:
        raise CheckpointError(target, error.strerror or str(error)) from error
    finally:
        shutil.rmtree(partial, ignore_errors=True)
    return target
