"""Reading one safetensors file, right and wrong ones."""

from __future__ import annotations

import json
import os
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from checkpoint_files import SCALE, WEIGHT, codes, header_of, scales, write_raw, write_shard
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from memreclaim import shard
from memreclaim.errors import CheckpointError

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

pytestmark = pytest.mark.cpu

TENSORS = {WEIGHT: codes(), SCALE: scales()}
HEADER = header_of(TENSORS)
DATA = b"".join(array.tobytes() for _, array in TENSORS.values())


def _set(name: str, key: str, value: object) -> Callable[[dict[str, Any]], object]:
    """A change of one field of one entry."""
    return lambda header: header[name].__setitem__(key, value)


def test_reads_shapes_dtypes_and_bytes(tmp_path: Path) -> None:
    """What was written is what is read."""
    with shard.Shard(write_shard(tmp_path / "a.safetensors", TENSORS)) as opened:
        info = opened.tensors[WEIGHT]
        assert (info.dtype, info.shape, info.nbytes) == ("F8_E4M3", (128, 128), 128 * 128)
        assert opened.read(info) == TENSORS[WEIGHT][1].tobytes()
        assert opened.read(opened.tensors[SCALE]) == TENSORS[SCALE][1].tobytes()


def test_chunks_cover_the_tensor_in_order(tmp_path: Path) -> None:
    """Chunks that do not divide the size still add up to the tensor, the last one shorter."""
    with shard.Shard(write_shard(tmp_path / "a.safetensors", TENSORS)) as opened:
        chunks = [chunk.tobytes() for chunk in opened.chunks(opened.tensors[WEIGHT], 5000)]
    assert [len(chunk) for chunk in chunks] == [5000, 5000, 5000, 1384]
    assert b"".join(chunks) == TENSORS[WEIGHT][1].tobytes()


def test_agrees_with_the_library_reader(tmp_path: Path) -> None:
    """The safetensors library finds the same names, dtypes, shapes and bytes in the file."""
    library = pytest.importorskip("safetensors")
    file = write_shard(tmp_path / "a.safetensors", TENSORS)
    expected = {
        name: (entry["dtype"], tuple(entry["shape"]), bytes(entry["data"]))
        for name, entry in library.deserialize(file.read_bytes())
    }
    with shard.Shard(file) as opened:
        actual = {name: (info.dtype, info.shape, opened.read(info)) for name, info in opened.tensors.items()}
    assert expected == actual


def test_keeps_only_wanted_tensors_but_checks_all(tmp_path: Path) -> None:
    """A filter does not stop the header's other entries from being checked."""
    file = write_shard(tmp_path / "a.safetensors", TENSORS)
    with shard.Shard(file, wanted=lambda name: name == SCALE) as opened:
        assert list(opened.tensors) == [SCALE]
    header = json.loads(json.dumps(HEADER))
    header[WEIGHT]["dtype"] = "F7"
    write_raw(file, json.dumps(header).encode(), DATA)
    with pytest.raises(CheckpointError, match="unknown dtype 'F7'"):
        shard.Shard(file, wanted=lambda name: name == SCALE)


WRONG_ENTRIES = {
    "offsets beyond the file": (_set(SCALE, "data_offsets", [16384 + 16, 16384 + 32]), "leaves 16 bytes"),
    "overlapping offsets": (_set(SCALE, "data_offsets", [16383, 16399]), "overlaps another tensor"),
    "offsets backwards": (_set(SCALE, "data_offsets", [16400, 16384]), "data_offsets span -16"),
    "negative offset": (_set(SCALE, "data_offsets", [-16, 0]), "no lists of counts"),
    "offsets as text": (_set(SCALE, "data_offsets", ["0", "16"]), "no lists of counts"),
    "fractional shape": (_set(SCALE, "shape", [4.0, 4]), "no lists of counts"),
    "boolean shape": (_set(SCALE, "shape", [True, 16]), "no lists of counts"),
    "huge shape": (_set(SCALE, "shape", [2**60, 2**60]), "no lists of counts"),
    "shape of another size": (_set(SCALE, "shape", [4, 5]), "needs 160 bits"),
    "many dimensions": (_set(SCALE, "shape", [1] * 17), "no lists of counts"),
    "dtype of another size": (_set(SCALE, "dtype", "F32"), "needs 512 bits"),
    "unknown dtype": (_set(SCALE, "dtype", "E8M0"), "unknown dtype 'E8M0'"),
    "dtype as a list": (_set(SCALE, "dtype", ["F32"]), "unknown dtype"),
    "entry without dtype": (lambda header: header[SCALE].pop("dtype"), "no dtype, shape and data_offsets"),
    "entry as a number": (lambda header: header.__setitem__(SCALE, 3), "no dtype, shape and data_offsets"),
    "entry missing": (lambda header: header.pop(SCALE), "bytes follow the last tensor"),
}


@pytest.mark.parametrize(("change", "message"), WRONG_ENTRIES.values(), ids=WRONG_ENTRIES)
def test_refuses_wrong_entries(tmp_path: Path, change: Callable[[dict[str, Any]], object], message: str) -> None:
    """An entry that no writer would write is refused, and the message names the file."""
    header = json.loads(json.dumps(HEADER))
    change(header)
    file = write_raw(tmp_path / "wrong.safetensors", json.dumps(header).encode(), DATA)
    with pytest.raises(CheckpointError, match=message) as caught:
        shard.Shard(file)
    assert str(file) == caught.value.path
    assert str(caught.value).startswith(str(file))


WRONG_FILES = {
    "empty": (b"", "too few for a safetensors file"),
    "only a length": (b"\x10\0\0\0\0\0\0\0", "claims 16 bytes, the file has 8"),
    "length beyond the file": (b"\xff" * 8 + b"{}", "truncated or no safetensors"),
    "another kind of file": (b"PK\x03\x04 this is a zip file", "truncated or no safetensors"),
    "no JSON": (b"\x02\0\0\0\0\0\0\0{[", "not valid JSON"),
    "no UTF-8": (b"\x02\0\0\0\0\0\0\0\xff\xfe", "not valid JSON"),
    "a list": (b"\x02\0\0\0\0\0\0\0[]", "not a JSON object"),
    "nested without end": ((100_000).to_bytes(8, "little") + b"[" * 100_000, "not valid JSON"),
}


@pytest.mark.parametrize(("content", "message"), WRONG_FILES.values(), ids=WRONG_FILES)
def test_refuses_wrong_files(tmp_path: Path, content: bytes, message: str) -> None:
    """A file that is none, or whose header length is absurd, is refused."""
    file = tmp_path / "wrong.safetensors"
    file.write_bytes(content)
    with pytest.raises(CheckpointError, match=message):
        shard.Shard(file)


def test_refuses_a_header_above_the_cap(tmp_path: Path) -> None:
    """A header that is inside a sparse file but absurdly long is not read."""
    file = tmp_path / "sparse.safetensors"
    file.write_bytes((shard.MAX_JSON_BYTES + 1).to_bytes(8, "little"))
    os.truncate(file, shard.MAX_JSON_BYTES + 4096)
    with pytest.raises(CheckpointError, match="more than the 33,554,432 that are read"):
        shard.Shard(file)


@pytest.mark.parametrize("kept", [9, 100, len(json.dumps(HEADER)) + 8, len(json.dumps(HEADER)) + 8 + len(DATA) - 1])
def test_refuses_truncated_files(tmp_path: Path, kept: int) -> None:
    """A shard cut off anywhere is refused."""
    file = write_shard(tmp_path / "cut.safetensors", TENSORS)
    os.truncate(file, kept)
    with pytest.raises(CheckpointError, match="truncated"):
        shard.Shard(file)


def test_refuses_names_that_stand_twice(tmp_path: Path) -> None:
    """JSON lets a name stand twice; readers differ on which one counts, so neither does."""
    entry = json.dumps(HEADER[WEIGHT])
    text = f'{{"{WEIGHT}": {entry}, "{WEIGHT}": {entry}}}'
    file = write_raw(tmp_path / "twice.safetensors", text.encode(), DATA)
    with pytest.raises(CheckpointError, match="twice"):
        shard.Shard(file)


def test_notices_a_file_that_became_shorter(tmp_path: Path) -> None:
    """A file cut off after it was opened raises instead of ending the process."""
    file = write_shard(tmp_path / "cut.safetensors", TENSORS)
    with shard.Shard(file) as opened:
        os.truncate(file, 4096)
        with pytest.raises(CheckpointError, match="became shorter"):
            opened.read(opened.tensors[WEIGHT])


def test_does_not_wait_for_a_pipe(tmp_path: Path) -> None:
    """A named pipe in a checkpoint's place is refused at once."""
    file = tmp_path / "pipe.safetensors"
    os.mkfifo(file)
    with pytest.raises(CheckpointError, match="not a regular file"):
        shard.Shard(file)


def test_metadata_is_no_tensor(tmp_path: Path) -> None:
    """The format's metadata entry is left alone."""
    header = {"__metadata__": {"format": "pt"}, **HEADER}
    with shard.Shard(write_raw(tmp_path / "a.safetensors", json.dumps(header).encode(), DATA)) as opened:
        assert set(TENSORS) == set(opened.tensors)


def test_reads_empty_tensors_and_scalars(tmp_path: Path) -> None:
    """Tensors of no elements and of no dimensions are legal."""
    tensors = {"empty": ("F32", np.zeros((0, 4), np.float32)), "scalar": ("F32", np.array(2.5, np.float32))}
    with shard.Shard(write_shard(tmp_path / "a.safetensors", tensors)) as opened:
        assert opened.read(opened.tensors["empty"]) == b""
        assert opened.read(opened.tensors["scalar"]) == np.float32(2.5).tobytes()


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_damaged_bytes_never_crash(tmp_path: Path, data: st.DataObject) -> None:
    """Any few bytes of length and header changed: the file reads as something, or is refused by name."""
    file = write_shard(tmp_path / "damaged.safetensors", TENSORS)
    content = bytearray(file.read_bytes())
    head = len(content) - len(DATA)
    for _ in range(data.draw(st.integers(1, 4))):
        content[data.draw(st.integers(0, head - 1))] = data.draw(st.integers(0, 255))
    file.write_bytes(content)
    assert _bytes_or_refused_file(file) in {len(DATA), str(file)}


def _bytes_or_refused_file(file: Path) -> int | str:
    """How many bytes a file's tensors hold, or the file that the refusal names."""
    try:
        with shard.Shard(file) as opened:
            return sum(len(opened.read(info)) for info in opened.tensors.values())
    except CheckpointError as error:
        return error.path
