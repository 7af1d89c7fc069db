"""Small checkpoints for tests, written byte by byte so that wrong ones can be made too."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    import numpy.typing as npt

WEIGHT = "layers.0.attn.wo_a.weight"
SCALE = "layers.0.attn.wo_a.scale"
CONFIG = {"model_type": "deepseek_v41", "o_groups": 2, "o_lora_rank": 64}

Stored = tuple[str, "npt.NDArray[Any]"]
"""A dtype by the format's own word, and the array whose bytes and shape are stored."""


def header_of(tensors: Mapping[str, Stored]) -> dict[str, Any]:
    """The header that a correct writer would write."""
    header: dict[str, Any] = {}
    at = 0
    for name, (dtype, array) in tensors.items():
        header[name] = {"dtype": dtype, "shape": list(array.shape), "data_offsets": [at, at + array.nbytes]}
        at += array.nbytes
    return header


def write_raw(file: Path, header: bytes, data: bytes = b"", length: int | None = None) -> Path:
    """Write a header and data as they are, with a header length of one's own."""
    file.write_bytes((len(header) if length is None else length).to_bytes(8, "little") + header + data)
    return file


def write_shard(file: Path, tensors: Mapping[str, Stored]) -> Path:
    """Write a correct safetensors file."""
    data = b"".join(array.tobytes() for _, array in tensors.values())
    return write_raw(file, json.dumps(header_of(tensors)).encode(), data)


def write_folder(folder: Path, shards: Mapping[str, Mapping[str, Stored]], *, index: bool = True) -> Path:
    """Write shards, a config and, unless told otherwise, an index."""
    folder.mkdir(exist_ok=True)
    for name, tensors in shards.items():
        write_shard(folder / name, tensors)
    (folder / "config.json").write_text(json.dumps(CONFIG))
    if index:
        weight_map = {tensor: name for name, tensors in shards.items() for tensor in tensors}
        (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    return folder


def codes(rows: int = 128, columns: int = 128, seed: int = 0) -> Stored:
    """Random e4m3 bytes without NaN."""
    drawn = np.random.default_rng(seed).integers(0, 256, (rows, columns), dtype=np.uint8)
    drawn[(drawn & 0x7F) == 0x7F] = 0
    return "F8_E4M3", drawn


def scales(rows: int = 4, columns: int = 4, low: int = 115, high: int = 126, seed: int = 1) -> Stored:
    """Random scale bytes from ``low`` to ``high``, both included; real shards hold 115 to 126."""
    return "F8_E8M0", np.random.default_rng(seed).integers(low, high + 1, (rows, columns), dtype=np.uint8)
