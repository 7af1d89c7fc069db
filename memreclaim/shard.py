"""One safetensors file: its header, checked before it is believed, and its bytes, memory-mapped.

The format (safetensors, "Format"): 8 bytes little-endian header length, a JSON object ``name -> {dtype, shape,
data_offsets}``, then the data. This reader is the project's own because the library's loads no bytes without copying
them and has no upper bound on memory that a caller can state. It needs numpy only: surveying a checkpoint of hundreds
of GB then takes 40 MB of memory, where importing torch alone takes 217 MB (torch 2.13.0, CPU build).
"""

from __future__ import annotations

import json
import math
import mmap
import stat
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Self

import numpy as np

from memreclaim.errors import CheckpointError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

INDEX_NAME = "model.safetensors.index.json"
CONFIG_NAME = "config.json"
MAX_JSON_BYTES = 32 << 20
"""Largest header, index or config that is read. The longest real ones are below 20 MB, for 140,000 tensors."""

BITS_OF_DTYPE = {
    "BOOL": 8,
    "U8": 8,
    "I8": 8,
    "F8_E4M3": 8,
    "F8_E5M2": 8,
    "F8_E8M0": 8,
    "I16": 16,
    "U16": 16,
    "F16": 16,
    "BF16": 16,
    "I32": 32,
    "U32": 32,
    "F32": 32,
    "I64": 64,
    "U64": 64,
    "F64": 64,
    "C64": 64,
    "F4": 4,
    "F6_E2M3": 6,
    "F6_E3M2": 6,
}
"""Bits per element of every dtype that the format knows."""

_LENGTH_BYTES = 8
_MAX_COUNT = 1 << 48
_MAX_DIMENSIONS = 16
_TAKEN = object()
_CHUNK_BYTES = 2 << 20
"""How much is mapped in at a time. On 2 EPYC cores a scan takes 0.15 s per GiB at 2 MiB, 0.18 at 0.5 and at 8 MiB."""


@dataclass(frozen=True, slots=True)
class TensorInfo:
    """Where a tensor's bytes are, as its file's header says."""

    name: str
    dtype: str
    """The format's own word: ``F8_E4M3``, ``F8_E8M0``, ``BF16``, ``F32`` and so on."""
    shape: tuple[int, ...]
    file: Path
    offset: int
    """Of the first byte, from the start of the file."""
    nbytes: int


class Shard:
    """One safetensors file, opened; close it, or use it as a context manager."""

    def __init__(self, file: Path, wanted: Callable[[str], bool] | None = None) -> None:
        """Read and check the whole header; keep the tensors whose name is ``wanted`` (all when left out).

        Raises :class:`CheckpointError` when the file cannot be read or its header is not one that a writer would write.
        """
        self.file = file
        self._map = _map(file)
        try:
            self.tensors = _parse_header(file, self._map, wanted)
            self._drop_pages(0, len(self._map))  # a fault may have mapped 2 MiB around the header, once per shard
        except BaseException:
            self.close()
            raise

    def chunks(
        self, info: TensorInfo, chunk_bytes: int = _CHUNK_BYTES
    ) -> Iterator[np.ndarray[tuple[int], np.dtype[np.uint8]]]:
        """The tensor's bytes in order, uint8, ``chunk_bytes`` at a time and fewer at the end.

        Each chunk is read-only and valid until the next one is asked for: its pages leave memory then, so that a
        tensor of any size takes two chunks of it.
        """
        if _size(self.file) < info.offset + info.nbytes:  # touching a page beyond the end would kill the process
            raise CheckpointError(self.file, f"{info.name}: the file became shorter while it was read")
        for start in range(0, info.nbytes, chunk_bytes):
            length = min(chunk_bytes, info.nbytes - start)
            yield np.frombuffer(self._map, np.uint8, length, info.offset + start)
            self._drop_pages(info.offset + start, length)

    def read(self, info: TensorInfo) -> bytes:
        """All bytes of a small tensor."""
        return b"".join(chunk.tobytes() for chunk in self.chunks(info))

    def close(self) -> None:
        """Give the mapping back. A chunk that is still held keeps it until it goes."""
        with suppress(BufferError):
            self._map.close()

    def __enter__(self) -> Self:
        """Use as a context manager."""
        return self

    def __exit__(self, *_exception: object) -> None:
        """Close."""
        self.close()

    def _drop_pages(self, offset: int, length: int) -> None:
        if hasattr(mmap, "MADV_DONTNEED"):
            first = offset - offset % mmap.PAGESIZE
            self._map.madvise(mmap.MADV_DONTNEED, first, offset + length - first)


def read_json(file: Path) -> Any:  # noqa: ANN401 - it is what a JSON file holds
    """Content of a small JSON file; :class:`CheckpointError` names it when it is missing, too large or malformed."""
    size = _size(file)
    if size > MAX_JSON_BYTES:
        raise CheckpointError(file, f"{size:,} bytes are more than the {MAX_JSON_BYTES:,} that are read")
    try:
        text = file.read_bytes()
    except OSError as error:
        raise CheckpointError(file, error.strerror or str(error)) from error
    return parse_json(file, text, what="content")


def parse_json(
    file: Path, text: bytes, *, what: str, pairs: Callable[[list[tuple[str, Any]]], Any] | None = None
) -> Any:  # noqa: ANN401 - as above
    """Parse ``text``; :class:`CheckpointError` says that ``what`` of ``file`` is not JSON."""
    try:
        return json.loads(text.decode(), object_pairs_hook=pairs)
    except CheckpointError:
        raise
    except (ValueError, RecursionError) as error:
        raise CheckpointError(file, f"{what} is not valid JSON: {error}") from error


def _map(file: Path) -> mmap.mmap:
    size = _size(file)
    if size < _LENGTH_BYTES:
        raise CheckpointError(file, f"{size} bytes are too few for a safetensors file")
    try:
        with file.open("rb") as stream:
            return mmap.mmap(stream.fileno(), 0, access=mmap.ACCESS_READ)
    except (OSError, ValueError) as error:
        raise CheckpointError(file, getattr(error, "strerror", None) or str(error)) from error


def _size(file: Path) -> int:
    """Bytes of a regular file; asked before it is opened, since opening a pipe would wait for its writer."""
    try:
        status = file.stat()
    except (OSError, ValueError) as error:  # ValueError: a name with a zero byte
        raise CheckpointError(file, getattr(error, "strerror", None) or str(error)) from error
    if not stat.S_ISREG(status.st_mode):
        raise CheckpointError(file, "not a regular file")
    return status.st_size


def _parse_header(file: Path, data: mmap.mmap, wanted: Callable[[str], bool] | None) -> dict[str, TensorInfo]:
    size = len(data)
    length = int.from_bytes(data[:_LENGTH_BYTES], "little")
    start = _LENGTH_BYTES + length
    if start > size:
        raise CheckpointError(
            file, f"the header claims {length:,} bytes, the file has {size:,}: truncated or no safetensors"
        )
    if length > MAX_JSON_BYTES:
        raise CheckpointError(
            file, f"the header claims {length:,} bytes, more than the {MAX_JSON_BYTES:,} that are read"
        )
    header = parse_json(file, data[_LENGTH_BYTES:start], what="the header", pairs=lambda pairs: _unique(file, pairs))
    if not isinstance(header, dict):
        raise CheckpointError(file, "the header is not a JSON object")
    header.pop("__metadata__", None)
    tensors = {}
    spans = []
    for name, entry in header.items():
        info = _check_entry(file, name, entry, start)
        spans.append((info.offset, info.offset + info.nbytes, name))
        if wanted is None or wanted(name):
            tensors[name] = info
    _check_spans(file, spans, start, size)
    return tensors


def _unique(file: Path, pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """A JSON object as a dict, unless it says the same thing twice: readers would differ on which one counts."""
    found = dict(pairs)
    if len(found) != len(pairs):
        for name, _ in pairs:
            if found.pop(name, _TAKEN) is _TAKEN:
                raise CheckpointError(file, f"the header holds {name!r} twice")
    return found


def _check_entry(file: Path, name: str, entry: object, data_start: int) -> TensorInfo:
    if not isinstance(entry, dict) or not entry.keys() >= {"dtype", "shape", "data_offsets"}:
        raise CheckpointError(file, f"the header's entry {name!r} has no dtype, shape and data_offsets")
    dtype, shape, offsets = entry["dtype"], entry["shape"], entry["data_offsets"]
    if not isinstance(dtype, str) or dtype not in BITS_OF_DTYPE:
        raise CheckpointError(file, f"{name}: unknown dtype {dtype!r}")
    if not _is_counts(shape) or not _is_counts(offsets) or len(offsets) != 2:  # noqa: PLR2004
        raise CheckpointError(file, f"{name}: shape {shape!r} or data_offsets {offsets!r} are no lists of counts")
    begin, end = offsets
    bits = math.prod(shape) * BITS_OF_DTYPE[dtype]
    if (end - begin) * 8 != bits:
        raise CheckpointError(file, f"{name}: {dtype} {shape} needs {bits:,} bits, data_offsets span {end - begin:,}")
    return TensorInfo(name, dtype, tuple(shape), file, data_start + begin, end - begin)


def _is_counts(value: object) -> bool:
    if not isinstance(value, list) or len(value) > _MAX_DIMENSIONS:
        return False
    return all(type(item) is int and 0 <= item < _MAX_COUNT for item in value)


def _check_spans(file: Path, spans: list[tuple[int, int, str]], start: int, size: int) -> None:
    """Tensors must follow each other without a hole or overlap and end where the file ends, as the format demands."""
    at = start
    for begin, end, name in sorted(spans):
        if begin != at:
            what = "overlaps another tensor" if begin < at else f"leaves {begin - at:,} bytes before it unused"
            raise CheckpointError(file, f"{name}: its data {what}")
        at = end
    if at != size:
        what = "truncated" if at > size else "bytes follow the last tensor"
        raise CheckpointError(file, f"the header describes {at:,} bytes, the file has {size:,}: {what}")
