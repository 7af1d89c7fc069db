"""Opening checkpoints as engines do, and writing them."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import ml_dtypes
import numpy as np
import pytest
import torch
from checkpoint_files import CONFIG, SCALE, WEIGHT, codes, scales, write_folder, write_shard

from memreclaim.checkpoint import Checkpoint, dequantize_wo_a, write_checkpoint
from memreclaim.errors import CheckpointError

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = pytest.mark.cpu

FIRST, SECOND = "model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"
TWO_SHARDS = {FIRST: {WEIGHT: codes()}, SECOND: {SCALE: scales()}}
INDEX = "model.safetensors.index.json"


@pytest.mark.parametrize("index", [True, False])
def test_finds_weight_and_scale_in_different_shards(tmp_path: Path, index: bool) -> None:
    """Weight and scale are found wherever they are, with an index and without."""
    with Checkpoint(write_folder(tmp_path / "c", TWO_SHARDS, index=index)) as checkpoint:
        assert checkpoint.names == (SCALE, WEIGHT)
        assert checkpoint.scale_name(WEIGHT) == SCALE
        assert checkpoint.info(WEIGHT).file.name == FIRST
        assert checkpoint.info(SCALE).file.name == SECOND
        assert checkpoint.config == CONFIG


def test_opens_one_file(tmp_path: Path) -> None:
    """A single safetensors file is a checkpoint too."""
    file = write_shard(tmp_path / "only.safetensors", {WEIGHT: codes()})
    with Checkpoint(file) as checkpoint:
        assert WEIGHT in checkpoint
        assert checkpoint.config == {}


def test_tensors_are_copies_of_the_stored_bytes(tmp_path: Path) -> None:
    """Every dtype comes back with its bits, and writing to the copy leaves the file alone."""
    bf16 = np.random.default_rng(0).standard_normal((32, 32)).astype(ml_dtypes.bfloat16)
    stored = {WEIGHT: codes(), SCALE: scales(), "norm.weight": ("BF16", bf16), "step": ("I64", np.array(7))}
    file = write_shard(tmp_path / "a.safetensors", stored)
    with Checkpoint(file) as checkpoint:
        for name, (_, array) in stored.items():
            tensor = checkpoint.tensor(name)
            assert tuple(tensor.shape) == array.shape
            assert tensor.contiguous().view(-1).view(torch.uint8).numpy().tobytes() == array.tobytes()
        checkpoint.tensor(WEIGHT).view(torch.uint8).zero_()
        assert checkpoint.tensor(WEIGHT).dtype == torch.float8_e4m3fn
        assert checkpoint.tensor(SCALE).dtype == torch.float8_e8m0fnu
        assert checkpoint.tensor(WEIGHT).view(torch.uint8).numpy().tobytes() == stored[WEIGHT][1].tobytes()


@pytest.mark.parametrize("suffix", ["scale", "weight_scale_inv", "weight_scale"])
def test_knows_the_names_that_scales_have(tmp_path: Path, suffix: str) -> None:
    """Released and converted checkpoints name block scales differently."""
    name = f"model.layers.7.attn.wo_a.{suffix}"
    file = write_shard(tmp_path / "a.safetensors", {"model.layers.7.attn.wo_a.weight": codes(), name: scales()})
    with Checkpoint(file) as checkpoint:
        assert checkpoint.scale_name("model.layers.7.attn.wo_a.weight") == name


def test_names_are_in_layer_order(tmp_path: Path) -> None:
    """Layer 2 comes before layer 10, and odd names do not matter."""
    sorted_names = ["layers.2.a", "layers.10.a", "layers.².a", "mtp.0.a"]
    names = ["layers.10.a", "layers.2.a", "mtp.0.a", "layers.².a", "layers." + "9" * 5000]
    file = write_shard(tmp_path / "a.safetensors", {name: ("U8", np.zeros(1, np.uint8)) for name in names})
    with Checkpoint(file) as checkpoint:
        assert [name for name in checkpoint.names if len(name) < 20] == sorted_names


def test_text_config_may_be_nested(tmp_path: Path) -> None:
    """Multimodal configurations hold the text model's part inside."""
    folder = write_folder(tmp_path / "c", TWO_SHARDS)
    (folder / "config.json").write_text(json.dumps({"model_type": "x", "text_config": {"o_lora_rank": 64}}))
    with Checkpoint(folder) as checkpoint:
        assert checkpoint.text_config == {"o_lora_rank": 64}


def test_only_the_files_of_wanted_tensors_are_opened(tmp_path: Path) -> None:
    """With an index, a shard that holds nothing wanted may be broken or missing."""
    shards = {**TWO_SHARDS, "other.safetensors": {"embed.weight": ("U8", np.zeros(4, np.uint8))}}
    folder = write_folder(tmp_path / "c", shards)
    (folder / "other.safetensors").unlink()
    with Checkpoint(folder, wanted=lambda name: "wo_a" in name) as checkpoint:
        assert checkpoint.names == (SCALE, WEIGHT)
    with pytest.raises(CheckpointError, match=r"other\.safetensors: No such file"):
        Checkpoint(folder)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("{", "not valid JSON"),
        ("[]", "no weight_map"),
        ('{"weight_map": {"a": ".."}}', "not the name of a safetensors file"),
        ('{"weight_map": {"a": "\\u0000.safetensors"}}', "not the name of a safetensors file"),
        ('{"weight_map": {"a": 1}}', "no weight_map"),
        ('{"weight_map": {"a": "../a.safetensors"}}', "not the name of a safetensors file"),
        ('{"weight_map": {"a": ""}}', "not the name of a safetensors file"),
        ('{"weight_map": {"layers.9.attn.wo_a.weight": "%s"}}' % FIRST, "does not hold it"),  # noqa: UP031
    ],
)
def test_refuses_a_wrong_index(tmp_path: Path, content: str, message: str) -> None:
    """An index that contradicts the files, or is none, is refused by name."""
    folder = write_folder(tmp_path / "c", TWO_SHARDS)
    (folder / INDEX).write_text(content)
    with pytest.raises(CheckpointError, match=message) as caught:
        Checkpoint(folder)
    assert caught.value.path == str(folder / INDEX)


@pytest.mark.parametrize("content", ["{", "[]", '{"a": NaN', "\x00"])
def test_refuses_a_wrong_config(tmp_path: Path, content: str) -> None:
    """A config.json that is no JSON object is refused by name."""
    folder = write_folder(tmp_path / "c", TWO_SHARDS)
    (folder / "config.json").write_text(content)
    with pytest.raises(CheckpointError) as caught:
        Checkpoint(folder)
    assert caught.value.path == str(folder / "config.json")


def test_refuses_what_is_no_checkpoint(tmp_path: Path) -> None:
    """A missing folder, an empty one, an unknown tensor and a tensor in two shards are said plainly."""
    with pytest.raises(CheckpointError, match="no such file or folder"):
        Checkpoint(tmp_path / "missing")
    with pytest.raises(CheckpointError, match=r"holds no \.safetensors file"):
        Checkpoint(tmp_path)
    twice = write_folder(tmp_path / "c", {FIRST: {WEIGHT: codes()}, SECOND: {WEIGHT: codes()}}, index=False)
    with pytest.raises(CheckpointError, match=f"stands in {FIRST} too"):
        Checkpoint(twice)
    with (
        Checkpoint(write_shard(tmp_path / "a.safetensors", {WEIGHT: codes()})) as checkpoint,
        pytest.raises(CheckpointError, match="no tensor nothing"),
    ):
        checkpoint.tensor("nothing")


@pytest.mark.parametrize("block", [32, 64, 128])
def test_dequantises_as_engines_do(block: int) -> None:
    """The result is bf16(float(code) * float(scale)), checked against ml_dtypes element by element."""
    raw_codes, raw_scales = codes(256, 256)[1], scales(256 // block, 256 // block)[1]
    values = raw_codes.view(ml_dtypes.float8_e4m3fn).astype(np.float32)
    factors = raw_scales.view(ml_dtypes.float8_e8m0fnu).astype(np.float32)
    expected = (values * np.kron(factors, np.ones((block, block), np.float32))).astype(ml_dtypes.bfloat16)
    actual = dequantize_wo_a(
        torch.from_numpy(raw_codes).view(torch.float8_e4m3fn), torch.from_numpy(raw_scales).view(torch.float8_e8m0fnu)
    )
    assert expected.view(np.int16).tobytes() == actual.view(torch.int16).numpy().tobytes()


@pytest.mark.parametrize("exponent", [0, 1, 2, 9, 10, 127, 246, 247, 254])
def test_dequantises_every_code_at_edge_scales(exponent: int) -> None:
    """All 256 codes at scales near both ends: subnormal, overflowing and NaN results included."""
    raw_codes = np.arange(256, dtype=np.uint8).repeat(4).reshape(32, 32)
    raw_scale = np.full((1, 1), exponent, np.uint8)
    with np.errstate(over="ignore"):
        product = raw_codes.view(ml_dtypes.float8_e4m3fn).astype(np.float32) * np.float32(2.0) ** np.float32(
            exponent - 127
        )
        expected = product.astype(ml_dtypes.bfloat16)
    actual = dequantize_wo_a(
        torch.from_numpy(raw_codes).view(torch.float8_e4m3fn), torch.from_numpy(raw_scale).view(torch.float8_e8m0fnu)
    )
    is_nan = np.isnan(expected.astype(np.float32))
    assert (is_nan == actual.isnan().numpy()).all()
    assert (expected.view(np.int16)[~is_nan] == actual.view(torch.int16).numpy()[~is_nan]).all()


def test_dequantising_in_slabs_changes_nothing() -> None:
    """A weight of several slabs, with one fp32 scale for all rows, equals the plain product."""
    raw = torch.from_numpy(codes(640, 2048)[1]).view(torch.float8_e4m3fn)
    factors = torch.rand(1, 16) + 0.5
    expected = (raw.float() * factors.repeat_interleave(128, 1)).bfloat16()
    assert torch.equal(expected.view(torch.int16), dequantize_wo_a(raw, factors).view(torch.int16))


def test_dequantise_refuses_other_dtypes_and_shapes() -> None:
    """Wrong arguments raise and say what they were."""
    raw, factors = torch.zeros(64, 64).to(torch.float8_e4m3fn), torch.ones(2, 2)
    with pytest.raises(ValueError, match=r"torch\.uint8"):
        dequantize_wo_a(raw.view(torch.uint8), factors)
    with pytest.raises(ValueError, match="float16"):
        dequantize_wo_a(raw, factors.half())
    with pytest.raises(ValueError, match=r"\[3, 2\] do not divide"):
        dequantize_wo_a(raw, torch.ones(3, 2))
    with pytest.raises(ValueError, match=r"\[2\] do not divide"):
        dequantize_wo_a(raw, torch.ones(2))


@pytest.mark.parametrize("index", [True, False])
def test_writes_what_it_reads(tmp_path: Path, index: bool) -> None:
    """A written checkpoint has the release's layout and comes back bit by bit."""
    shards = [
        {WEIGHT: torch.from_numpy(codes()[1]).view(torch.float8_e4m3fn), "head.weight": torch.randn(4, 8).bfloat16()},
        {SCALE: torch.from_numpy(scales()[1]).view(torch.float8_e8m0fnu)},
    ]
    folder = write_checkpoint(tmp_path / "deep" / "c", shards, CONFIG, index=index)
    names = {FIRST, SECOND, "config.json"} | ({INDEX} if index else set())
    assert names == {file.name for file in folder.iterdir()}
    assert [folder.name] == [file.name for file in folder.parent.iterdir()]
    with Checkpoint(folder) as checkpoint:
        assert checkpoint.config == CONFIG
        for tensors in shards:
            for name, tensor in tensors.items():
                actual = checkpoint.tensor(name)
                assert (tensor.dtype, tensor.shape) == (actual.dtype, actual.shape)
                assert torch.equal(tensor.view(torch.uint8), actual.view(torch.uint8))


def test_never_writes_into_an_existing_folder(tmp_path: Path) -> None:
    """A name that is taken is refused, and what stands there is left alone."""
    (tmp_path / "c").mkdir()
    with pytest.raises(CheckpointError, match="exists already"):
        write_checkpoint(tmp_path / "c", [], {})
    assert list((tmp_path / "c").iterdir()) == []


def test_a_failed_write_leaves_nothing(tmp_path: Path) -> None:
    """A write that fails half-way leaves neither a folder of the final name nor its temporary one."""
    with pytest.raises(TypeError):
        write_checkpoint(tmp_path / "c", [{"a": torch.zeros(2)}], {"not": object()})
    assert list(tmp_path.iterdir()) == []
