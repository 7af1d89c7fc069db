"""A checkpoint as engines see it: a folder of safetensors shards, an index, a ``config.json``.

Reading is by :mod:`memreclaim.shard`, header by header and only of the files that are asked for. Torch is imported
when a tensor is asked for, not before: ``memreclaim survey`` does without it.
"""

from __future__ import annotations

import re
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

from memreclaim.checkpoint_writer import write_checkpoint
from memreclaim.errors import CheckpointError
from memreclaim.shard import CONFIG_NAME, INDEX_NAME, Shard, TensorInfo, read_json

if TYPE_CHECKING:
    import os
    from collections.abc import Callable, Sequence

    import torch

__all__ = ["Checkpoint", "TensorInfo", "dequantize_wo_a", "write_checkpoint"]

SCALE_SUFFIXES = (".scale", ".weight_scale_inv", ".weight_scale")
"""What a weight's block scales are called beside it: V4 and V4.1 as released, and as converters rename them."""

_TORCH_DTYPES = {
    "BOOL": "bool",
    "U8": "uint8",
    "I8": "int8",
    "F8_E4M3": "float8_e4m3fn",
    "F8_E5M2": "float8_e5m2",
    "F8_E8M0": "float8_e8m0fnu",
    "I16": "int16",
    "F16": "float16",
    "BF16": "bfloat16",
    "I32": "int32",
    "F32": "float32",
    "I64": "int64",
    "F64": "float64",
}
_SLAB_ELEMENTS = 128 * 4096
"""Elements dequantised at a time: 2 MiB of fp32 values and 2 MiB of fp32 scales."""


class Checkpoint:
    """A checkpoint, opened for reading; close it, or use it as a context manager. Threads may read it together."""

    def __init__(self, path: str | os.PathLike[str], wanted: Callable[[str], bool] | None = None) -> None:
        """Open a folder (or one ``.safetensors`` file) and read the headers of the shards that hold ``wanted`` tensors.

        With an index only the files that it names for wanted tensors are opened, without one every shard is.
        Raises :class:`CheckpointError`, naming the file, for whatever is missing, truncated, corrupt or contradictory.
        """
        self.path = Path(path)
        self._stack = ExitStack()
        self._shards: dict[Path, Shard] = {}
        self._infos: dict[str, TensorInfo] = {}
        try:
            self.config = self._read_config()
            self._open(wanted)
        except BaseException:
            self.close()
            raise

    @property
    def text_config(self) -> dict[str, Any]:
        """The text model's part of the configuration."""
        nested = self.config.get("text_config", self.config)
        if not isinstance(nested, dict):
            raise CheckpointError(self._folder / CONFIG_NAME, "text_config is not an object")
        return nested

    @property
    def names(self) -> tuple[str, ...]:
        """Names of all tensors, layer 2 before layer 10."""
        return tuple(sorted(self._infos, key=_natural))

    def __contains__(self, name: str) -> bool:
        """Whether there is a tensor of this name."""
        return name in self._infos

    def info(self, name: str) -> TensorInfo:
        """Dtype, shape and place of a tensor; :class:`CheckpointError` when there is none of this name."""
        try:
            return self._infos[name]
        except KeyError:
            raise CheckpointError(self.path, f"no tensor {name}") from None

    def shard(self, info: TensorInfo) -> Shard:
        """The open file that holds a tensor."""
        return self._shards[info.file]

    def scale_name(self, weight_name: str) -> str | None:
        """Name of the block scales that belong to ``….weight``, or None."""
        stem = weight_name.removesuffix(".weight")
        return next((stem + suffix for suffix in SCALE_SUFFIXES if stem + suffix in self._infos), None)

    def tensor(self, name: str) -> torch.Tensor:
        """A tensor in its own dtype, copied to the CPU.

        Raises :class:`CheckpointError` for an unknown name and for dtypes that torch lacks.
        """
        import torch

        info = self.info(name)
        if info.dtype not in _TORCH_DTYPES:
            raise CheckpointError(info.file, f"{name}: torch has no dtype for {info.dtype}")
        out = torch.empty(info.nbytes, dtype=torch.uint8)
        target = out.numpy()
        at = 0
        for chunk in self.shard(info).chunks(info):
            target[at : at + len(chunk)] = chunk
            at += len(chunk)
        dtype: torch.dtype = getattr(torch, _TORCH_DTYPES[info.dtype])
        return out.view(dtype).view(info.shape)

    def close(self) -> None:
        """Close every file."""
        self._stack.close()

    def __enter__(self) -> Self:
        """Use as a context manager."""
        return self

    def __exit__(self, *_exception: object) -> None:
        """Close."""
        self.close()

    @property
    def _folder(self) -> Path:
        return self.path if self.path.is_dir() else self.path.parent

    def _read_config(self) -> dict[str, Any]:
        file = self._folder / CONFIG_NAME
        config = read_json(file) if file.exists() else {}
        if not isinstance(config, dict):
            raise CheckpointError(file, "not a JSON object")
        return config

    def _open(self, wanted: Callable[[str], bool] | None) -> None:
        if not self.path.exists():
            raise CheckpointError(self.path, "no such file or folder")
        index = self._folder / INDEX_NAME
        if self.path.is_file():
            self._open_shards([self.path], wanted)
        elif index.exists():
            self._open_indexed(index, wanted)
        else:
            files = sorted(self.path.glob("*.safetensors"))
            if not files:
                raise CheckpointError(self.path, "holds no .safetensors file")
            self._open_shards(files, wanted)

    def _open_shards(self, files: Sequence[Path], wanted: Callable[[str], bool] | None) -> None:
        for file in files:
            shard = self._shards[file] = self._stack.enter_context(Shard(file, wanted))
            for name, info in shard.tensors.items():
                if name in self._infos:
                    raise CheckpointError(file, f"{name} stands in {self._infos[name].file.name} too")
                self._infos[name] = info

    def _open_indexed(self, index: Path, wanted: Callable[[str], bool] | None) -> None:
        content = read_json(index)
        entries = content.get("weight_map") if isinstance(content, dict) else None
        if not isinstance(entries, dict) or not all(isinstance(file, str) for file in entries.values()):
            raise CheckpointError(index, "has no weight_map of tensor and file names")
        chosen = {name: file for name, file in entries.items() if wanted is None or wanted(name)}
        for file in sorted(set(chosen.values())):
            if Path(file).name != file or not file.endswith(".safetensors") or not file.isprintable():
                raise CheckpointError(index, f"{file!r} is not the name of a safetensors file beside it")
        self._open_shards([index.parent / file for file in sorted(set(chosen.values()))], chosen.__contains__)
        for name, file in chosen.items():
            if name not in self._infos or self._infos[name].file.name != file:
                raise CheckpointError(index, f"says that {name} is in {file}, which does not hold it")


def dequantize_wo_a(codes: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """The bf16 weight that an engine makes of a checkpoint's bytes: ``bf16(float(code) * float(scale))``.

    Shapes: ``codes`` float8_e4m3fn ``[R, D]``; ``scales`` float8_e8m0fnu or float32 ``[R/b, D/c]``, the block sizes b
    and c from the two shapes -> bf16 ``[R, D]`` on the codes' device. At most 4 MiB beside the result.
    Raises ``ValueError`` for other dtypes and for shapes that do not divide.
    Source of the formula: the loaders of SGLang and vLLM for ``wo_a`` (block dequantisation in fp32, one rounding).
    """
    import torch

    if codes.dtype != torch.float8_e4m3fn or scales.dtype not in {torch.float8_e8m0fnu, torch.float32}:
        message = (
            f"codes and scales are {codes.dtype} and {scales.dtype}, not float8_e4m3fn and float8_e8m0fnu or float32"
        )
        raise ValueError(message)
    block_rows, block_columns = block_of(tuple(codes.shape), tuple(scales.shape))
    rows, columns = codes.shape
    out = torch.empty((rows, columns), dtype=torch.bfloat16, device=codes.device)
    factors = scales.float()
    step = max(1, _SLAB_ELEMENTS // columns)
    for start in range(0, rows, step):
        slab = codes[start : start + step].float().view(-1, columns // block_columns, block_columns)
        scale_rows = torch.arange(start, start + len(slab), device=codes.device) // block_rows
        slab.mul_(factors[scale_rows].unsqueeze(-1))
        out[start : start + step] = slab.view(-1, columns)
    return out


def block_of(weight: tuple[int, ...], scales: tuple[int, ...]) -> tuple[int, int]:
    """Rows and columns that share one scale, from the two shapes; ``ValueError`` when they do not divide."""
    both_matrices = len(weight) == len(scales) == 2  # noqa: PLR2004
    if both_matrices and min(*weight, *scales) > 0 and weight[0] % scales[0] == weight[1] % scales[1] == 0:
        return weight[0] // scales[0], weight[1] // scales[1]
    message = f"scales of shape {list(scales)} do not divide a weight of shape {list(weight)}"
    raise ValueError(message)


def _natural(name: str) -> list[tuple[int, str]]:
    """Sort key that puts longer numbers after shorter ones."""
    return [(len(part) if part.isdecimal() else 0, part) for part in re.split(r"(\d+)", name)]
