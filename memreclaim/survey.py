"""What a checkpoint's ``wo_a`` tensors would give back, found out without loading anything else of it."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from fractions import Fraction
from typing import TYPE_CHECKING, Any

from memreclaim.checkpoint import SCALE_SUFFIXES, Checkpoint
from memreclaim.errors import CheckpointError, ConfigError
from memreclaim.exactness import BLOCK, has_blocks, inexact_elements

if TYPE_CHECKING:
    import os
    from collections.abc import Callable

SCHEMA_VERSION = 1
KV_BYTES_PER_TOKEN = Fraction("1670.75")
"""Per token and rank; published for V4.1-Flash in SGLang."""
DEFAULT_RANK = 1024
"""Rows of a group when the configuration has no ``o_lora_rank``."""

_SUFFIX = re.compile(r"(?:^|\.)wo_a(?:\.weight|" + "|".join(re.escape(suffix) for suffix in SCALE_SUFFIXES) + ")$")


@dataclass(frozen=True)
class TensorSurvey:
    """One ``wo_a`` weight, whole (all groups)."""

    name: str
    shape: tuple[int, ...]
    dtype: str
    block: tuple[int, int] | None
    """Rows and columns that share a scale in the checkpoint; None for bf16."""
    exact: bool
    mismatched_elements: int
    """Elements that no twin holds: they would decode to other bits, or are not finite."""

    @property
    def gross_bytes(self) -> int:
        """bf16 bytes that dropping it gives back; 0 when it is not exact, since it is then kept."""
        return 2 * math.prod(self.shape) if self.exact else 0

    @property
    def twin_bytes(self) -> int:
        """What its twin costs: a byte an element and one a 32x32 block; 0 when it is not exact."""
        elements = math.prod(self.shape)
        return elements + elements // BLOCK**2 if self.exact else 0

    @property
    def net_bytes(self) -> int:
        """Gross minus twin."""
        return self.gross_bytes - self.twin_bytes

    def to_dict(self) -> dict[str, Any]:
        """JSON form."""
        return {
            "name": self.name,
            "shape": list(self.shape),
            "dtype": self.dtype,
            "block": None if self.block is None else list(self.block),
            "exact": self.exact,
            "mismatched_elements": self.mismatched_elements,
            "gross_bytes": self.gross_bytes,
            "twin_bytes": self.twin_bytes,
            "net_bytes": self.net_bytes,
        }


@dataclass(frozen=True)
class RankGain:
    """What one rank gains."""

    tp: int
    gross_bytes: int
    twin_bytes: int

    @property
    def net_bytes(self) -> int:
        """Gross minus twin."""
        return self.gross_bytes - self.twin_bytes

    @property
    def kv_tokens(self) -> int:
        """Whole tokens of KV cache that the net bytes hold, at the published bytes per token."""
        return self.net_bytes * KV_BYTES_PER_TOKEN.denominator // KV_BYTES_PER_TOKEN.numerator


@dataclass(frozen=True)
class Survey:
    """All of a checkpoint's ``wo_a`` weights and what one rank of ``tp`` gains."""

    checkpoint: str
    tensors: tuple[TensorSurvey, ...]
    per_rank: RankGain

    @property
    def exact(self) -> bool:
        """Every weight has an exact twin."""
        return all(tensor.exact for tensor in self.tensors)

    def to_dict(self) -> dict[str, Any]:
        """JSON form, the keys a contract."""
        gain = self.per_rank
        return {
            "schema_version": SCHEMA_VERSION,
            "checkpoint": self.checkpoint,
            "tensors": [tensor.to_dict() for tensor in self.tensors],
            "per_rank": {
                "tp": gain.tp,
                "gross_bytes": gain.gross_bytes,
                "twin_bytes": gain.twin_bytes,
                "net_bytes": gain.net_bytes,
                "kv_tokens": gain.kv_tokens,
            },
        }


def groups_per_rank(groups: int, tp: int) -> int:
    """Local groups of one rank, padding included.

    Groups that do not divide are padded until each rank has the same power of two of them: 8 groups at TP3 become 12,
    4 each.
    """
    return groups // tp if groups % tp == 0 else 1 << (-(-groups // tp) - 1).bit_length()


def survey(
    path: str | os.PathLike[str], *, tp: int = 1, progress: Callable[[str, int, int], None] | None = None
) -> Survey:
    """Read the ``wo_a`` tensors of a checkpoint and nothing else of its data.

    ``progress`` is called with a tensor's name, bytes done and bytes in all. Memory: the index, a 2 MiB window of the
    file, and 12 MiB more for tensors that a scan of bytes cannot settle.
    Raises :class:`CheckpointError` for files that cannot be believed, :class:`ConfigError` for a ``tp`` below 1.
    """
    if tp < 1:
        raise ConfigError("tp", f"{tp} is not a number of ranks")
    with Checkpoint(path, wanted=lambda name: _SUFFIX.search(name) is not None) as checkpoint:
        names = [name for name in checkpoint.names if name.endswith(".weight")]
        if not names:
            raise CheckpointError(checkpoint.path, "holds no wo_a weight")
        _refuse_orphans(checkpoint, names)
        rank = _group_rows(checkpoint)
        total, done = sum(checkpoint.info(name).nbytes for name in names), 0
        tensors = []
        for name in names:
            tensors.append(_survey_tensor(checkpoint, name))
            done += checkpoint.info(name).nbytes
            if progress is not None:
                progress(name, done, total)
    return Survey(str(path), tuple(tensors), _rank_gain(tensors, rank, tp))


def _rank_gain(tensors: list[TensorSurvey], rank: int, tp: int) -> RankGain:
    gross = twin = 0
    for tensor in tensors:
        groups = max(1, tensor.shape[0] // rank)
        local = groups_per_rank(groups, tp)
        gross += tensor.gross_bytes // groups * local
        twin += tensor.twin_bytes // groups * local
    return RankGain(tp, gross, twin)


def _group_rows(checkpoint: Checkpoint) -> int:
    rank = checkpoint.text_config.get("o_lora_rank", DEFAULT_RANK)
    if type(rank) is not int or rank < 1:
        raise CheckpointError(checkpoint.path, f"config.json has o_lora_rank {rank!r}, which is no number of rows")
    return rank


def _refuse_orphans(checkpoint: Checkpoint, weights: list[str]) -> None:
    stems = {name.removesuffix(".weight") for name in weights}
    for name in checkpoint.names:
        if not name.endswith("wo_a.weight") and not any(
            name == stem + suffix for stem in stems for suffix in SCALE_SUFFIXES
        ):
            raise CheckpointError(checkpoint.info(name).file, f"{name} has no weight beside it in the checkpoint")


def _survey_tensor(checkpoint: Checkpoint, name: str) -> TensorSurvey:
    info = checkpoint.info(name)
    block, mismatched = inexact_elements(checkpoint, name)
    exact = mismatched == 0 and has_blocks(info)
    return TensorSurvey(name, info.shape, info.dtype, block, exact, mismatched)
