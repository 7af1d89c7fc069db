"""Shapes of the embedded decoder, in the words of a DeepSeek-V4.1 ``config.json``."""

from __future__ import annotations

from dataclasses import asdict, dataclass, fields
from typing import TYPE_CHECKING, Any, Self

from memreclaim.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Mapping

MODEL_TYPE = "deepseek_v41"
_BLOCK = 32


@dataclass(frozen=True)
class ModelConfig:
    """Sizes of one model, over all ranks; field names are the keys of ``config.json``.

    Raises :class:`ConfigError` naming the key when a size makes no sense.
    """

    vocab_size: int
    hidden_size: int
    num_hidden_layers: int
    num_nextn_predict_layers: int
    num_attention_heads: int
    head_dim: int
    qk_rope_head_dim: int
    q_lora_rank: int
    o_groups: int
    o_lora_rank: int
    intermediate_size: int
    rms_norm_eps: float = 1e-6
    rope_theta: float = 10000.0

    def __post_init__(self) -> None:
        """Refuse sizes that cannot be built."""
        for field in fields(self):
            value = getattr(self, field.name)
            least = 0 if field.name == "num_nextn_predict_layers" else 1
            kind = float if field.type == "float" else int
            if isinstance(value, bool) or not isinstance(value, (int, kind)):
                raise ConfigError(field.name, f"{value!r} is not a number of type {kind.__name__}")
            if not (value > 0 if kind is float else value >= least):
                raise ConfigError(field.name, f"{value} is too small")
        if self.num_attention_heads % self.o_groups:
            raise ConfigError("o_groups", f"{self.num_attention_heads} heads do not divide into {self.o_groups} groups")
        if self.o_lora_rank % _BLOCK or self.group_width % _BLOCK:
            shape = f"{self.o_lora_rank} x {self.group_width}"
            raise ConfigError("o_lora_rank", f"wo_a of {shape} is not made of 32x32 blocks")
        if self.qk_rope_head_dim % 2 or self.qk_rope_head_dim > self.head_dim:
            raise ConfigError("qk_rope_head_dim", f"{self.qk_rope_head_dim} is odd or wider than a head")

    @property
    def heads_per_group(self) -> int:
        """Attention heads whose outputs one group of ``wo_a`` takes."""
        return self.num_attention_heads // self.o_groups

    @property
    def group_width(self) -> int:
        """Columns of ``wo_a``: 4096 in V4.1, 8 heads of 512."""
        return self.heads_per_group * self.head_dim

    @property
    def cache_layers(self) -> int:
        """Layers that keep a latent per token: the target's and the draft's."""
        return self.num_hidden_layers + self.num_nextn_predict_layers

    @classmethod
    def demo(cls) -> Self:
        """Four layers and a draft block whose ``wo_a`` is that of a TP4 rank: ``[2048, 4096]``, 16 MiB in bf16."""
        return cls(
            vocab_size=512,
            hidden_size=256,
            num_hidden_layers=4,
            num_nextn_predict_layers=1,
            num_attention_heads=16,
            head_dim=512,
            qk_rope_head_dim=64,
            q_lora_rank=32,
            o_groups=2,
            o_lora_rank=1024,
            intermediate_size=256,
        )

    @classmethod
    def tiny(cls) -> Self:
        """Two layers and a draft block for tests: ``wo_a`` is ``[128, 128]``."""
        return cls(
            vocab_size=128,
            hidden_size=64,
            num_hidden_layers=2,
            num_nextn_predict_layers=1,
            num_attention_heads=4,
            head_dim=64,
            qk_rope_head_dim=16,
            q_lora_rank=16,
            o_groups=2,
            o_lora_rank=64,
            intermediate_size=64,
        )

    @classmethod
    def from_dict(cls, config: Mapping[str, Any]) -> Self:
        """Read a ``config.json``, whose text part may be nested under ``text_config``; other keys are ignored.

        Raises :class:`ConfigError` for another ``model_type`` and for a key that is missing or bad.
        """
        text = config.get("text_config", config)
        model_type = text.get("model_type", config.get("model_type"))
        if model_type != MODEL_TYPE:
            raise ConfigError("model_type", f"the embedded engine runs {MODEL_TYPE}, not {model_type!r}")
        optional = {"rms_norm_eps", "rope_theta"}
        missing = [field.name for field in fields(cls) if field.name not in text and field.name not in optional]
        if missing:
            raise ConfigError(missing[0], "is missing from config.json")
        return cls(**{field.name: text[field.name] for field in fields(cls) if field.name in text})

    def to_dict(self) -> dict[str, Any]:
        """The ``config.json`` of a checkpoint of these sizes."""
        quantization = {
            "quant_method": "fp8",
            "fmt": "e4m3",
            "scale_fmt": "ue8m0",
            "weight_block_size": [_BLOCK, _BLOCK],
        }
        head = {"architectures": ["DeepseekV41ForCausalLM"], "model_type": MODEL_TYPE, "torch_dtype": "bfloat16"}
        return head | asdict(self) | {"quantization_config": quantization}


@dataclass(frozen=True)
class TensorParallel:
    """Which share of the output groups a rank has.

    A share that does not come out even is padded to a power of two, as the published three-rank set-up does: 8 groups
    to 12, so that the third rank's are all padding. Sources differ on what stands in a padded group of ``wo_a``: zeros,
    or the last group again.
    """

    rank: int = 0
    size: int = 1
    padding: str = "zeros"

    def __post_init__(self) -> None:
        """Refuse a rank that does not exist and a padding that is not known."""
        if self.size < 1 or not 0 <= self.rank < self.size:
            raise ConfigError("tp_rank", f"there is no rank {self.rank} of {self.size}")
        if self.padding not in ("zeros", "repeat"):
            raise ConfigError("padding", f"{self.padding!r} is none of zeros, repeat")

    def local_groups(self, groups: int) -> int:
        """Groups on each rank: 2 of 8 on four ranks, 4 of 8 (padded to 12) on three."""
        if groups % self.size == 0:
            return groups // self.size
        return 1 << (groups // self.size).bit_length()
