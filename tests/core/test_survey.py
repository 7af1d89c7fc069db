"""What a checkpoint would give back, and that it is found out by reading no more than needed."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import TYPE_CHECKING

import ml_dtypes
import numpy as np
import pytest
import torch
from checkpoint_files import SCALE, WEIGHT, Stored, codes, scales, write_folder, write_raw
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from memreclaim import exactness
from memreclaim.checkpoint import Checkpoint
from memreclaim.errors import CheckpointError, ConfigError
from memreclaim.survey import TensorSurvey, groups_per_rank, survey
from memreclaim_kernels import reference

if TYPE_CHECKING:
    from pathlib import Path

    import numpy.typing as npt

pytestmark = pytest.mark.cpu

FILE = "model.safetensors"


def _folder(path: Path, weight: Stored, scale: Stored | None = None) -> Path:
    return write_folder(path / "c", {FILE: {WEIGHT: weight, **({} if scale is None else {SCALE: scale})}})


def _survey_one(path: Path, weight: Stored, scale: Stored | None = None) -> TensorSurvey:
    """Survey a checkpoint of one weight."""
    (tensor,) = survey(_folder(path, weight, scale)).tensors
    return tensor


def _as_bf16(weight: Stored, scale: Stored) -> Stored:
    """The bf16 weight that codes and scale bytes stand for."""
    values = weight[1].view(ml_dtypes.float8_e4m3fn).astype(np.float32)
    factors = scale[1].view(ml_dtypes.float8_e8m0fnu).astype(np.float32)
    block = values.shape[0] // factors.shape[0]
    return "BF16", (values * np.kron(factors, np.ones((block, block), np.float32))).astype(ml_dtypes.bfloat16)


def test_figures_of_one_tensor(tmp_path: Path) -> None:
    """Gross is the bf16 size, the twin costs a byte an element and one a 32x32 block, net is the difference."""
    tensor = _survey_one(tmp_path, codes(128, 128), scales(4, 4))
    assert tensor.to_dict() == {
        "name": WEIGHT,
        "shape": [128, 128],
        "dtype": "F8_E4M3",
        "block": [32, 32],
        "exact": True,
        "mismatched_elements": 0,
        "gross_bytes": 2 * 128 * 128,
        "twin_bytes": 128 * 128 + 16,
        "net_bytes": 128 * 128 - 16,
    }


@pytest.mark.parametrize(
    ("tp", "gross_mb", "twin_mb", "net_mb"),
    [(4, 721.4, 361.1, 360.4), (3, 1442.8, 722.1, 720.7), (8, 360.7, 180.5, 180.2)],
)
def test_published_figures_per_rank(tmp_path: Path, tp: int, gross_mb: float, twin_mb: float, net_mb: float) -> None:
    """43 layers of 8 groups give the published megabytes per rank, TP3 padded to 12 groups included."""
    folder = write_folder(tmp_path / "c", _scaled_down_release())
    gain = survey(folder, tp=tp).per_rank
    # The test's weights have 1/32 of the release's columns, and so 1/32 of its bytes.
    assert (gross_mb, twin_mb, net_mb) == tuple(
        round(32 * size / 1e6, 1) for size in (gain.gross_bytes, gain.twin_bytes, gain.net_bytes)
    )
    assert gain.kv_tokens == int(gain.net_bytes / 1670.75)


def _scaled_down_release() -> dict[str, dict[str, Stored]]:
    """V4.1-Flash's 40 layers and 3 draft layers, 8 groups of 64 rows (the config's o_lora_rank) and 2048 columns.

    8 x 64 x 2048 elements are 1/32 of 8 x 1024 x 4096.
    """
    weight, scale = codes(8 * 64, 2048), scales(16, 64)
    stems = [f"layers.{n}.attn.wo_a" for n in range(40)] + [f"mtp.{n}.attn.wo_a" for n in range(3)]
    return {
        f"model-{i}.safetensors": {f"{stem}.weight": weight, f"{stem}.scale": scale} for i, stem in enumerate(stems)
    }


@pytest.mark.parametrize(
    ("groups", "tp", "local"),
    [(8, 1, 8), (8, 2, 4), (8, 3, 4), (8, 4, 2), (8, 8, 1), (8, 16, 1), (16, 8, 2), (16, 6, 4), (1, 1, 1), (2, 3, 1),
     (6, 1, 6), (6, 2, 3)],
)  # fmt: skip
def test_groups_per_rank(groups: int, tp: int, local: int) -> None:
    """Groups that divide are shared out as they are; where they do not, padding makes up a power of two for each."""
    assert local == groups_per_rank(groups, tp)


@pytest.mark.parametrize("block", [32, 128])
@pytest.mark.parametrize("dtype", ["F8_E8M0", "F32"])
def test_block_sizes_and_scale_dtypes(tmp_path: Path, block: int, dtype: str) -> None:
    """V4.1's 32x32 and V4's 128x128 scales are exact, as exponent bytes and as fp32 powers of two."""
    kind, raw = scales(256 // block, 256 // block)
    stored = (kind, raw) if dtype == "F8_E8M0" else ("F32", raw.view(ml_dtypes.float8_e8m0fnu).astype(np.float32))
    tensor = _survey_one(tmp_path, codes(256, 256), stored)
    assert (tensor.exact, tensor.block, tensor.mismatched_elements) == (True, (block, block), 0)


def test_usual_checkpoints_are_settled_by_the_scan(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No weight is computed when its bytes alone show that it is exact."""
    monkeypatch.setattr(exactness, "count_inexact", None)
    assert _survey_one(tmp_path, codes(), scales(low=10, high=246)).exact


def test_bf16_weights_that_fit_are_exact(tmp_path: Path) -> None:
    """A bf16 weight made from codes and scales has an exact twin."""
    tensor = _survey_one(tmp_path, _as_bf16(codes(), scales()))
    assert (tensor.exact, tensor.dtype, tensor.block) == (True, "BF16", None)
    assert tensor.gross_bytes == 2 * 128 * 128


def test_trained_bf16_weights_are_not_exact(tmp_path: Path) -> None:
    """A bf16 weight of arbitrary values cannot be held: it is counted, and promises no byte."""
    values = np.random.default_rng(0).standard_normal((128, 128)).astype(ml_dtypes.bfloat16)
    tensor = _survey_one(tmp_path, ("BF16", values))
    assert not tensor.exact
    assert 0.5 * values.size < tensor.mismatched_elements <= values.size
    assert (tensor.gross_bytes, tensor.twin_bytes, tensor.net_bytes) == (0, 0, 0)


def test_one_element_that_does_not_fit_is_found(tmp_path: Path) -> None:
    """One bit more than e4m3 holds, in the last slab of a weight of several."""
    kind, raw = codes(512, 4096)
    raw[500, 4000] = 0x40
    _, weight = _as_bf16((kind, raw), scales(16, 128))
    weight.view(np.int16)[500, 4000] |= 1
    tensor = _survey_one(tmp_path, ("BF16", weight))
    assert (tensor.exact, tensor.mismatched_elements) == (False, 1)


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_bf16_weights_that_are_not_finite(tmp_path: Path, value: float) -> None:
    """A NaN or an infinity counts as one element that no twin holds, and its neighbours are judged without it."""
    _, weight = _as_bf16(codes(), scales())
    weight[3, 4] = value
    tensor = _survey_one(tmp_path, ("BF16", weight))
    assert (tensor.exact, tensor.mismatched_elements) == (False, 1)


@pytest.mark.parametrize("nan", [0x7F, 0xFF])
@pytest.mark.parametrize("place", [(0, 0), (127, 127)])
def test_nan_codes_are_found_by_the_scan(tmp_path: Path, nan: int, place: tuple[int, int]) -> None:
    """Either NaN byte makes a tensor inexact, wherever it stands."""
    kind, raw = codes()
    raw[place] = nan
    tensor = _survey_one(tmp_path, (kind, raw), scales())
    assert (tensor.exact, tensor.mismatched_elements) == (False, 1)


@pytest.mark.parametrize("exponent", [0, 1, 2, 3, 9, 10, 246, 247, 254])
def test_edge_scales_are_computed(tmp_path: Path, exponent: int) -> None:
    """At the ends of the range the verdict is that of an independent decoder: overflow to infinity is not exact."""
    weight = ("F8_E4M3", (np.arange(128 * 128) % 127).astype(np.uint8).reshape(128, 128))
    scale = ("F8_E8M0", np.full((4, 4), exponent, np.uint8))
    with np.errstate(over="ignore"):
        infinite = int(np.isinf(_as_bf16(weight, scale)[1].astype(np.float32)).sum())
    tensor = _survey_one(tmp_path, weight, scale)
    assert (infinite == 0, infinite) == (tensor.exact, tensor.mismatched_elements)


def test_scan_and_computation_agree(tmp_path: Path) -> None:
    """What the byte scan calls exact is exact when computed too, at every scale that the scan accepts."""
    raw = np.arange(10, 247, dtype=np.uint8)
    scale = ("F8_E8M0", np.resize(raw, (16, 16)))
    folder = _folder(tmp_path, codes(512, 512), scale)
    with Checkpoint(folder) as checkpoint:
        assert exactness.inexact_elements(checkpoint, WEIGHT) == ((32, 32), 0)
        factors = exactness._read_scales(checkpoint, checkpoint.info(SCALE))[1]
        computed = exactness._Scales(None, factors, (32, 32))
        assert exactness._count(checkpoint, checkpoint.info(WEIGHT), computed) == 0


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(raw=st.binary(min_size=0, max_size=300), at=st.integers(0, 700))
def test_scan_finds_exactly_the_nans(raw: bytes, at: int) -> None:
    """The two reductions of the scan see a NaN if and only if one is there."""
    data = np.zeros(1024, np.uint8)
    data[at : at + len(raw)] = np.frombuffer(raw, np.uint8)
    assert bool(((data & 0x7F) == 0x7F).any()) == exactness._has_nan(data)


def test_fp32_scales_that_are_no_powers_of_two(tmp_path: Path) -> None:
    """Such scales are computed: exact only when the products happen to fit."""
    factors = np.full((4, 4), 2.0**-5, np.float32)
    factors[2, 1] = 0.3
    tensor = _survey_one(tmp_path, codes(), ("F32", factors))
    assert not tensor.exact
    assert 0 < tensor.mismatched_elements <= 32 * 32


WRONG = {
    "no scale": (codes(), None, "holds no scale for it"),
    "NaN scale byte": (codes(), scales(high=255, low=255), r"holds NaN \(byte 255\)"),
    "NaN fp32 scale": (codes(), ("F32", np.full((4, 4), np.nan, np.float32)), "holds NaN or infinity"),
    "infinite fp32 scale": (codes(), ("F32", np.full((4, 4), np.inf, np.float32)), "holds NaN or infinity"),
    "scale dtype": (codes(), ("BF16", np.ones((4, 4), ml_dtypes.bfloat16)), "has dtype BF16, neither F8_E8M0 nor F32"),
    "scale shape": (codes(), scales(3, 4), r"\[3, 4\] do not divide a weight of shape \[128, 128\]"),
    "flat scale": (codes(), ("F8_E8M0", np.full(4, 120, np.uint8)), "do not divide"),
    "empty scale": (codes(), ("F8_E8M0", np.zeros((0, 4), np.uint8)), "do not divide"),
    "a scale an element": (codes(), ("F8_E8M0", np.full((128, 128), 120, np.uint8)), "a scale for every 1x1 elements"),
    "weight dtype": (("F16", np.ones((128, 128), np.float16)), scales(), "has dtype F16, neither F8_E4M3 nor BF16"),
    "weight shape": (("F8_E4M3", np.zeros(128, np.uint8)), scales(), "not rows and columns"),
    "empty weight": (("BF16", np.zeros((0, 128), ml_dtypes.bfloat16)), None, "not rows and columns"),
}


@pytest.mark.parametrize(("weight", "scale", "message"), WRONG.values(), ids=WRONG)
def test_refuses_what_no_engine_could_load(tmp_path: Path, weight: Stored, scale: Stored | None, message: str) -> None:
    """The error names the file and the tensor."""
    with pytest.raises(CheckpointError, match=message) as caught:
        survey(_folder(tmp_path, weight, scale))
    assert caught.value.path == str(tmp_path / "c" / FILE)
    assert "wo_a." in str(caught.value)


def test_refuses_a_scale_without_its_weight(tmp_path: Path) -> None:
    """A scale whose weight is missing means that a shard is missing."""
    shards = {FILE: {WEIGHT: codes(), SCALE: scales(), "layers.1.attn.wo_a.scale": scales()}}
    with pytest.raises(CheckpointError, match=r"layers\.1\.attn\.wo_a\.scale has no weight beside it"):
        survey(write_folder(tmp_path / "c", shards))


def test_refuses_a_checkpoint_without_wo_a(tmp_path: Path) -> None:
    """Another model's checkpoint is said to hold no wo_a."""
    folder = write_folder(tmp_path / "c", {FILE: {"layers.0.attn.wo_b.weight": codes()}})
    with pytest.raises(CheckpointError, match="holds no wo_a weight"):
        survey(folder)


@pytest.mark.parametrize("rank", [0, -1, "1024", 1.5, None])
def test_refuses_a_wrong_rank_in_the_config(tmp_path: Path, rank: object) -> None:
    """An o_lora_rank that is no number of rows is refused."""
    folder = _folder(tmp_path, codes(), scales())
    (folder / "config.json").write_text(json.dumps({"o_lora_rank": rank}))
    with pytest.raises(CheckpointError, match="o_lora_rank"):
        survey(folder)


def test_refuses_no_ranks(tmp_path: Path) -> None:
    """A tensor-parallel size below 1 is a wrong setting."""
    with pytest.raises(ConfigError, match="tp: 0"):
        survey(_folder(tmp_path, codes(), scales()), tp=0)


def test_a_weight_that_is_not_made_of_blocks_is_not_exact(tmp_path: Path) -> None:
    """Rows or columns that are no multiple of 32 cannot be held; nothing is promised for them."""
    tensor = _survey_one(tmp_path, codes(112, 112), scales(7, 7))
    assert (tensor.exact, tensor.mismatched_elements, tensor.gross_bytes) == (False, 0, 0)


def test_progress_covers_all_bytes(tmp_path: Path) -> None:
    """Progress is told after each tensor and ends at the total."""
    shards = {
        FILE: {WEIGHT: codes(), SCALE: scales(), "mtp.0.attn.wo_a.weight": codes(), "mtp.0.attn.wo_a.scale": scales()}
    }
    told: list[tuple[str, int, int]] = []
    survey(write_folder(tmp_path / "c", shards), progress=lambda *step: told.append(step))
    size = 128 * 128
    assert told == [(WEIGHT, size, 2 * size), ("mtp.0.attn.wo_a.weight", 2 * size, 2 * size)]


def test_draft_and_prefixed_names_are_found(tmp_path: Path) -> None:
    """Draft layers, a model. prefix and the converters' scale name all count; wo_b and look-alikes do not."""
    shards = {
        FILE: {
            "model.layers.0.attn.wo_a.weight": codes(),
            "model.layers.0.attn.wo_a.weight_scale_inv": scales(),
            "mtp.0.attn.wo_a.weight": codes(),
            "mtp.0.attn.wo_a.scale": scales(),
            "layers.0.attn.wo_b.weight": codes(),
            "layers.0.attn.two_a.weight": codes(),
        }
    }
    found = [tensor.name for tensor in survey(write_folder(tmp_path / "c", shards)).tensors]
    assert found == ["model.layers.0.attn.wo_a.weight", "mtp.0.attn.wo_a.weight"]


def _by_encoding(weight: npt.NDArray[np.uint16]) -> int:
    """Elements of finite bf16 values ``[n, D]`` that differ after the kernels' reference encoded and decoded them."""
    grouped = torch.from_numpy(weight.view(np.int16)).view(torch.bfloat16).unsqueeze(0)
    return int(reference.prove(*reference.encode(grouped), grouped)[0])


@settings(max_examples=60, deadline=None)
@given(
    seed=st.integers(0, 2**32 - 1),
    low=st.integers(0, 254),
    spread=st.integers(0, 20),
    kept_bits=st.integers(1, 8),
    zeros=st.floats(0, 1),
)
def test_counting_agrees_with_encoding(seed: int, low: int, spread: int, kept_bits: int, zeros: float) -> None:
    """The verdict on bits is the one that encoding and comparing gives, for values of any size, width and spread."""
    random = np.random.default_rng(seed)
    field = random.integers(low, min(low + spread, 254) + 1, (64, 64)).astype(np.uint16)
    fraction = random.integers(0, 128, (64, 64)).astype(np.uint16) >> (8 - kept_bits) << (8 - kept_bits)
    sign = random.integers(0, 2, (64, 64)).astype(np.uint16)
    weight = (sign << 15) | (field << 7) | (fraction & 0x7F)
    weight[random.random((64, 64)) < zeros] &= 0x8000
    assert _by_encoding(weight) == exactness.count_inexact(weight)


def test_counting_agrees_on_every_pattern() -> None:
    """Every sign and mantissa at exponents of each kind, alone in its block, is judged as encoding judges it."""
    fields = [0, 1, 2, 3, 7, 8, 9, 127, 246, 247, 253, 254]
    finite = np.array([bits for bits in range(0x10000) if bits >> 7 & 0xFF in fields], np.uint16)
    blocks = np.zeros((len(finite), 32, 32), np.uint16)
    blocks[:, 17, 5] = finite
    weight = np.ascontiguousarray(blocks.reshape(32, -1, 32, 32).transpose(0, 2, 1, 3)).reshape(32 * 32, -1)
    assert _by_encoding(weight) == exactness.count_inexact(weight)
    assert exactness.count_inexact(weight) == int((finite & 0xF != 0).sum()) - _narrow_subnormals(finite)


def _narrow_subnormals(finite: npt.NDArray[np.uint16]) -> int:
    """Subnormals with set bits below the fourth mantissa bit that still have at most 4 significant ones."""
    fractions = [int(bits) & 0x7F for bits in finite if bits & 0x7F80 == 0 and bits & 0xF]
    return sum(len(f"{fraction:b}".rstrip("0")) <= 4 for fraction in fractions)


def test_memory_does_not_grow_with_the_checkpoint(tmp_path: Path) -> None:
    """A survey of 1 GiB of codes, in a sparse file, leaves the process far below the promised 300 MiB."""
    rows, columns = 1 << 16, 1 << 14
    entries = {WEIGHT: ("F8_E4M3", rows * columns, [rows, columns]), SCALE: ("F8_E8M0", 1 << 20, [2048, 512])}
    header, at = {}, 0
    for name, (dtype, size, shape) in entries.items():
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [at, at + size]}
        at += size
    file = write_raw(tmp_path / FILE, json.dumps(header).encode())
    start = file.stat().st_size
    with file.open("r+b") as stream:
        stream.truncate(start + at)
        stream.seek(start + rows * columns)
        stream.write(b"\x78" * (1 << 20))
    program = (
        "import re, sys; from memreclaim.survey import survey; assert survey(sys.argv[1]).exact; "
        "print(re.search(r'VmHWM:\\s+(\\d+)', open('/proc/self/status').read())[1])"
    )
    done = subprocess.run([sys.executable, "-c", program, str(file)], capture_output=True, text=True, check=True)
    assert int(done.stdout) < 100 * 1024
