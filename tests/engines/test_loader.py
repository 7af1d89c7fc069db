"""Loading: the checkpoint's own bytes, each rank's share of them, and errors that name the tensor."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

import ml_dtypes
import numpy as np
import pytest
import torch
from engine_runs import bits, serve

from memreclaim.checkpoint import Checkpoint, write_checkpoint
from memreclaim.engines import reference as ref
from memreclaim.errors import CheckpointError, ConfigError
from memreclaim.states import Phase

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

pytestmark = pytest.mark.cpu

EIGHT = replace(ref.ModelConfig.tiny(), num_attention_heads=16, o_groups=8, num_hidden_layers=1)
"""Eight groups of two heads, as many groups as V4.1 has."""
Tensors = dict[str, torch.Tensor]
WO_A, SCALE = "layers.0.attn.wo_a.weight", "layers.0.attn.wo_a.scale"


@pytest.fixture(scope="module")
def eight(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Checkpoint with eight output groups."""
    return ref.write_random_checkpoint(tmp_path_factory.mktemp("engine") / "eight", EIGHT, seed=5)


def bits16(tensor: torch.Tensor) -> torch.Tensor:
    """16-bit patterns."""
    return tensor.detach().view(torch.int16)


def decoded(codes: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """What an engine makes of fp8 codes and 32x32 scales, by another library."""
    values = codes.view(torch.uint8).numpy().view(ml_dtypes.float8_e4m3fn).astype(np.float32)
    factors = scales.view(torch.uint8).numpy().view(ml_dtypes.float8_e8m0fnu).astype(np.float32)
    product = (values * factors.repeat(32, 0).repeat(32, 1)).astype(ml_dtypes.bfloat16)
    return torch.from_numpy(product.view(np.int16)).view(torch.bfloat16)


def test_weights_are_the_checkpoints_bytes(model: ref.ReferenceModel, checkpoint: Path) -> None:
    """``wo_a`` is bf16(float(code) * float(scale)), everything else is copied, and nothing is left out."""
    parameters = dict(model.named_parameters())
    with Checkpoint(checkpoint) as opened:
        assert set(parameters) == {name for name in opened.names if not name.endswith(".scale")}
        for name, parameter in parameters.items():
            tensor = opened.tensor(name)
            if name.endswith("wo_a.weight"):
                assert tensor.dtype == torch.float8_e4m3fn
                tensor = decoded(tensor, opened.tensor(name.replace("weight", "scale")))
            assert torch.equal(bits16(tensor), bits16(parameter)), name


def test_parameters_are_as_engines_have_them(model: ref.ReferenceModel) -> None:
    """bf16, no gradient, with the engine's loader as an attribute."""
    for name, parameter in model.named_parameters():
        assert parameter.dtype == torch.bfloat16, name
        assert not parameter.requires_grad, name
        assert callable(parameter.weight_loader), name


def test_layout_is_that_of_a_real_checkpoint(checkpoint: Path) -> None:
    """Codes and scales have the names, dtypes and shapes of released ones, in two shards with an index."""
    with Checkpoint(checkpoint) as opened:
        weight, scale = opened.info(WO_A), opened.info(SCALE)
        assert (weight.dtype, tuple(weight.shape)) == ("F8_E4M3", (128, 128))
        assert (scale.dtype, tuple(scale.shape)) == ("F8_E8M0", (4, 4))
        assert opened.config["model_type"] == "deepseek_v41"
        assert opened.config["quantization_config"]["weight_block_size"] == [32, 32]
        assert len({opened.info(name).file for name in opened.names}) == 2
    assert (checkpoint / "model.safetensors.index.json").exists()


def test_progress_names_every_tensor(checkpoint: Path) -> None:
    """The caller sees each tensor once with its bf16 bytes."""
    seen: list[tuple[str, int]] = []
    model = ref.load_model(checkpoint, progress=lambda name, n_bytes: seen.append((name, n_bytes)))
    assert dict(seen) == {name: parameter.nbytes for name, parameter in model.named_parameters()}
    assert len(seen) == len(dict(seen))


def test_shards_may_split_weight_and_scale(tmp_path: Path, config: ref.ModelConfig, model: ref.ReferenceModel) -> None:
    """One tensor per shard, without an index: the same model."""
    (tensors,) = ref.random_checkpoint_tensors(config, seed=0, shards=1)
    shards = [{name: tensor} for name, tensor in tensors.items()]
    split = ref.load_model(write_checkpoint(tmp_path / "split", shards, config.to_dict(), index=False))
    for (name, one), (other_name, other) in zip(model.named_parameters(), split.named_parameters(), strict=True):
        assert name == other_name
        assert torch.equal(bits16(one), bits16(other)), name


def test_text_part_may_be_nested(tmp_path: Path, config: ref.ModelConfig) -> None:
    """A multimodal ``config.json`` keeps the decoder's keys under ``text_config``."""
    nested = {"model_type": "outer", "text_config": config.to_dict()}
    path = write_checkpoint(tmp_path / "c", ref.random_checkpoint_tensors(config), nested)
    assert ref.load_model(path).config == config


def test_bf16_wo_a_is_copied(tmp_path: Path, config: ref.ModelConfig) -> None:
    """Builds that ship ``wo_a`` in bf16, without scales, load as they are."""
    (tensors,) = ref.random_checkpoint_tensors(config, shards=1)
    tensors[WO_A] = torch.randn(128, 128).bfloat16()
    del tensors[SCALE]
    model = ref.load_model(write_checkpoint(tmp_path / "c", [tensors], config.to_dict()))
    assert torch.equal(bits16(tensors[WO_A]), bits16(model.layers[0].attn.wo_a.weight))


def _without(name: str) -> Callable[[Tensors], None]:
    return lambda tensors: tensors.__delitem__(name)


def _with(name: str, tensor: torch.Tensor) -> Callable[[Tensors], None]:
    return lambda tensors: tensors.update({name: tensor})


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (_without(WO_A), r"layers\.0\.attn\.wo_a\.weight is missing"),
        (_without("norm.weight"), r"norm\.weight is missing"),
        (_without(SCALE), r"layers\.0\.attn\.wo_a\.weight has no scales"),
        (_with("layers.7.attn.wo_a.weight", torch.zeros(1)), r"no weight layers\.7\.attn\.wo_a"),
        (_with("norm.weight", torch.zeros(65).bfloat16()), r"norm\.weight has shape \[65\].*\[64\]"),
        (_with("norm.weight", torch.zeros(64)), r"norm\.weight is torch\.float32"),
        (_with(SCALE, torch.ones(3, 4)), r"layers\.0\.attn\.wo_a\.weight"),
    ],
)
def test_bad_tensors_are_named(
    tmp_path: Path, config: ref.ModelConfig, change: Callable[[Tensors], None], message: str
) -> None:
    """A tensor that is missing, unknown, of another shape or dtype, or without fitting scales is named."""
    (tensors,) = ref.random_checkpoint_tensors(config, shards=1)
    change(tensors)
    with pytest.raises(CheckpointError, match=message):
        ref.load_model(write_checkpoint(tmp_path / "c", [tensors], config.to_dict()))


@pytest.mark.parametrize(
    ("change", "key"),
    [
        ({"model_type": "llama"}, "model_type"),
        ({"hidden_size": None}, "hidden_size"),
        ({"hidden_size": 0}, "hidden_size"),
        ({"hidden_size": True}, "hidden_size"),
        ({"vocab_size": 12.5}, "vocab_size"),
        ({"rms_norm_eps": 0.0}, "rms_norm_eps"),
        ({"num_nextn_predict_layers": -1}, "num_nextn_predict_layers"),
        ({"o_groups": 3}, "o_groups"),
        ({"o_lora_rank": 48}, "o_lora_rank"),
        ({"qk_rope_head_dim": 65}, "qk_rope_head_dim"),
    ],
)
def test_bad_configurations_name_the_key(config: ref.ModelConfig, change: dict[str, Any], key: str) -> None:
    """Another model, and sizes that cannot be built."""
    with pytest.raises(ConfigError, match=key):
        ref.ModelConfig.from_dict(config.to_dict() | change)


def test_missing_key_is_named(config: ref.ModelConfig) -> None:
    """A size that is not in ``config.json`` is not guessed."""
    partial = config.to_dict()
    del partial["o_groups"]
    with pytest.raises(ConfigError, match="o_groups: is missing"):
        ref.ModelConfig.from_dict(partial)


def test_configuration_survives_json(config: ref.ModelConfig) -> None:
    """Written and read back it is the same."""
    assert ref.ModelConfig.from_dict(config.to_dict()) == config


@pytest.mark.parametrize(("size", "local"), [(1, 8), (2, 4), (4, 2), (8, 1)])
def test_ranks_take_consecutive_groups(eight: Path, size: int, local: int) -> None:
    """Rows of ``wo_a`` and of the queries, and columns of ``wo_b``, are those of the rank's own groups."""
    whole = ref.load_model(eight).layers[0].attn
    for rank in range(size):
        part = ref.load_model(eight, parallel=ref.TensorParallel(rank, size)).layers[0].attn
        assert part.n_local_groups == local
        own = slice(rank * local, (rank + 1) * local)
        assert torch.equal(whole.wo_a.weight.view(8, 64, 128)[own].flatten(0, 1), part.wo_a.weight)
        assert torch.equal(whole.wq_b.weight.view(8, 128, 16)[own].flatten(0, 1), part.wq_b.weight)
        assert torch.equal(whole.wo_b.weight.view(64, 8, 64)[:, own].flatten(1), part.wo_b.weight)


@pytest.mark.parametrize("padding", ["zeros", "repeat"])
def test_three_ranks_pad_eight_groups_to_twelve(eight: Path, padding: str) -> None:
    """Four groups on each rank; the last rank's are all padding: zeros, or the last group again."""
    whole = ref.load_model(eight).layers[0].attn.wo_a.weight.view(8, 64, 128)
    for rank in range(3):
        part = ref.load_model(eight, parallel=ref.TensorParallel(rank, 3, padding)).layers[0].attn
        groups = part.wo_a.weight.view(4, 64, 128)
        for local in range(4):
            number = rank * 4 + local
            padded = torch.zeros(64, 128) if padding == "zeros" else whole[7]
            assert torch.equal(whole[number] if number < 8 else padded.bfloat16(), groups[local])
        assert part.wo_b.weight.any() == (rank < 2)


def test_padding_changes_no_output(eight: Path) -> None:
    """What stands in padded groups is multiplied by zero: both kinds of padding give the same bits on every rank."""
    prompt = [[1, 2, 3, 4, 5]]
    for rank in range(3):
        runs = []
        for padding in ("zeros", "repeat"):
            model = ref.load_model(eight, parallel=ref.TensorParallel(rank, 3, padding))
            runs.append(bits(serve(model, ref.PagedPool(EIGHT, capacity_tokens=64), prompt, 3)))
        assert runs[0] == runs[1]


@pytest.mark.parametrize("size", [2, 3, 4, 8])
def test_ranks_sum_to_the_whole(eight: Path, size: int) -> None:
    """The attention outputs of all ranks add up to that of one rank with all groups."""
    pool = ref.PagedPool(EIGHT, capacity_tokens=4096)
    x = torch.randn(5, 64, generator=torch.Generator().manual_seed(0)).bfloat16()

    def output(parallel: ref.TensorParallel) -> torch.Tensor:
        table = pool.allocate(5)
        assert table is not None
        batch = ref.Batch(Phase.PREFILL, torch.zeros(5, dtype=torch.long), (ref.Segment(table, 0, 5),))
        result: torch.Tensor = ref.load_model(eight, parallel=parallel).layers[0].attn(x, batch, pool, 0)
        return result.float()

    parts = sum(output(ref.TensorParallel(rank, size)) for rank in range(size))
    torch.testing.assert_close(parts, output(ref.TensorParallel()), atol=0.05, rtol=0.05)


@pytest.mark.parametrize(
    ("arguments", "name"), [((2, 2), "tp_rank"), ((0, 0), "tp_rank"), ((-1, 2), "tp_rank"), ((0, 3, "ones"), "padding")]
)
def test_senseless_ranks_are_refused(arguments: tuple[Any, ...], name: str) -> None:
    """A rank that does not exist, and a padding that nobody uses."""
    with pytest.raises(ConfigError, match=name):
        ref.TensorParallel(*arguments)


def test_loader_refuses_another_shape(model: ref.ReferenceModel) -> None:
    """An update of the wrong size raises before a byte is written."""
    before = model.norm.weight.clone()
    with pytest.raises(ValueError, match=r"\(3,\).*\(64,\)"):
        ref.load_weights(model, [("norm.weight", torch.zeros(3))])
    assert torch.equal(before, model.norm.weight)


def test_same_seed_makes_the_same_checkpoint(config: ref.ModelConfig) -> None:
    """Bytes depend on the seed and on nothing else."""
    first, again, other = (ref.random_checkpoint_tensors(config, seed=seed, shards=1)[0] for seed in (1, 1, 2))
    assert list(first) == list(again)
    for name in first:
        assert torch.equal(first[name].view(torch.uint8), again[name].view(torch.uint8)), name
    assert not torch.equal(first[WO_A].view(torch.uint8), other[WO_A].view(torch.uint8))


def test_random_wo_a_is_like_real_ones(config: ref.ModelConfig) -> None:
    """All finite codes occur, no NaN does, and exponents are those of released shards."""
    (tensors,) = ref.random_checkpoint_tensors(config, shards=1)
    codes = torch.cat([tensors[name].view(torch.uint8).flatten() for name in tensors if name.endswith("wo_a.weight")])
    scales = torch.cat([tensors[name].view(torch.uint8).flatten() for name in tensors if name.endswith("wo_a.scale")])
    assert set(codes.tolist()) == set(range(256)) - {0x7F, 0xFF}
    assert set(scales.tolist()) == set(range(115, 127))


def test_demo_sizes_are_those_of_a_tp4_rank() -> None:
    """16 MiB of bf16 per layer."""
    demo = ref.ModelConfig.demo()
    assert (demo.o_groups * demo.o_lora_rank, demo.group_width) == (2048, 4096)
    assert demo.cache_layers == 5
