"""Tiny models of the real SGLang on a CPU, and the real ``ModelRunner.load_model`` around them.

What is replaced is only what needs a GPU or a checkpoint on disk: the loader that makes the model, rope, and kernel
warm-up. The engine must be imported after torchvision's operators are declared, which its CUDA build would bring.
"""

from __future__ import annotations

import importlib
import socket
from dataclasses import dataclass
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from collections.abc import Iterator

RANK, GROUPS, DEPTH = 64, 2, 128
"""Shape of wo_a in the tiny models: [G * R, D] = [128, 128]."""
_SIZES: dict[str, Any] = {
    "hidden_size": 64,
    "intermediate_size": 64,
    "moe_intermediate_size": 32,
    "n_routed_experts": 4,
    "n_shared_experts": 1,
    "num_experts_per_tok": 2,
    "n_group": 1,
    "topk_group": 1,
    "num_attention_heads": 4,
    "head_dim": 64,
    "qk_nope_head_dim": 32,
    "qk_rope_head_dim": 32,
    "v_head_dim": 64,
    "kv_lora_rank": 64,
    "q_lora_rank": 32,
    "o_lora_rank": RANK,
    "o_groups": GROUPS,
    "num_hidden_layers": 2,
    "vocab_size": 128,
    "max_position_embeddings": 128,
    "window_size": 16,
    "compress_ratios": [0, 0],
    "kv_source_layer_ids": [],
    "index_source_layer_ids": [],
    "engram_layer_ids": [],
    "engram_num_embeddings": [],
    "n_hash_layers": 0,
    "index_n_heads": 4,
    "index_head_dim": 32,
    "rope_scaling": None,
    "quantization_config": None,
    "num_nextn_predict_layers": 1,
}
_DSPARK = {
    "dspark_block_size": 4,
    "dspark_markov_rank": 8,
    "dspark_noise_token_id": 1,
    "dspark_target_layer_ids": [0, 1],
    "num_nextn_predict_layers": 2,
    "n_mtp_layers": 2,
}


def declare_torchvision_operators() -> None:
    """Needed in every process before the engine is imported."""
    if not hasattr(torch.ops.torchvision, "nms"):
        for operator in ("nms", "qnms"):
            torch.library.define(
                f"torchvision::{operator}", "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor"
            )


def free_port() -> int:
    """A port that was free a moment ago."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port: int = listener.getsockname()[1]
        return port


@dataclass(frozen=True)
class Engine:
    """The engine's modules, configured for one CPU rank."""

    v4: Any
    dspark: Any
    nextn: Any
    model_runner: Any
    registry: Any

    def config(self, **changes: Any) -> Any:
        """A config of V4's class with tiny sizes."""
        module = importlib.import_module("sglang.srt.configs.deepseek_v4")
        return module.DeepSeekV4Config(**{"architectures": ["DeepseekV4ForCausalLM"], **_SIZES, **changes})

    def target(self, seed: int = 0, **changes: Any) -> torch.nn.Module:
        """``DeepseekV4ForCausalLM`` (V4.1 by default) with a checkpoint loaded by its own ``load_weights``."""
        config = self.config(**{"model_type": "deepseek_v41", **changes})
        return self._loaded(self.v4.DeepseekV4ForCausalLM(config, quant_config=None), "layers", 2, seed)

    def draft(self, seed: int = 1) -> torch.nn.Module:
        """``DeepseekV4ForCausalLMDSpark``, loaded."""
        model = self.dspark.DeepseekV4ForCausalLMDSpark(self.config(**_DSPARK), quant_config=None)
        return self._loaded(model, "mtp", 2, seed)

    def next_n(self, seed: int = 2) -> torch.nn.Module:
        """``DeepseekV4ForCausalLMNextN``, loaded."""
        config = self.config(compress_ratios=[0, 0, 0])
        return self._loaded(self.nextn.DeepseekV4ForCausalLMNextN(config, quant_config=None), "mtp", 1, seed)

    @staticmethod
    def _loaded(model: torch.nn.Module, prefix: str, layers: int, seed: int) -> torch.nn.Module:
        for parameter in model.parameters():
            if parameter.is_floating_point() and parameter.element_size() > 1:
                torch.nn.init.normal_(parameter, std=0.02, generator=torch.Generator().manual_seed(seed))
        model._mhc_prewarmed_at_load = True  # the only CUDA call of loading
        model.load_weights(list(checkpoint(prefix, layers, seed)))
        return model

    def runner(self, model: torch.nn.Module, monkeypatch: Any, *, draft: bool = False, **attributes: Any) -> Any:
        """A real ``ModelRunner`` that has yet to run its real ``load_model``, which will find ``model``."""
        runner = object.__new__(self.model_runner.ModelRunner)
        loaded = SimpleNamespace(loader=None, model=model, startup_weight_load=None, remote_instance_weight_info=None)
        hf_config = model.config
        settings = {
            "device": "cpu",
            "gpu_id": 0,
            "is_draft_worker": draft,
            "draft_load_format": None,
            "draft_model_idx": None,
            "load_group": None,
            "server_args": None,
            "spec_algorithm": None,
            "capture_tail_hooks": [],
            "memory_saver_adapter": Saver(),
            "remote_instance_weight_transporter": SimpleNamespace(engine=None, session_id=None, weight_info=None),
            "model_config": SimpleNamespace(
                hf_config=hf_config, dtype=torch.bfloat16, get_quantization_config_log_str=lambda: "", context_len=128
            ),
            **attributes,
        }
        for name, value in settings.items():
            setattr(runner, name, value)
        module = self.model_runner
        monkeypatch.setattr(module, "load_model_with_memory_saver", lambda **_: loaded)
        monkeypatch.setattr(module, "build_load_config", lambda **_: SimpleNamespace())
        monkeypatch.setattr(module, "adjust_config_with_unaligned_cpu_tp", lambda config, *_: config)
        for name in _NEEDS_MORE:
            monkeypatch.setattr(module, name, lambda *_args, **_kwargs: None)
        return runner


_NEEDS_MORE = (
    "set_cuda_arch",
    "maybe_enable_ipc_weight_cache",
    "maybe_trigger_remote_instance_nccl_send_group",
    "maybe_precompile_model_kernels_after_loading",
    "install_monokernel_forward",
    "load_kv_cache_scales",
    "resolve_sliding_window_size",
    "report_online_quantization",
    "maybe_register_debug_tensor_dump_hook",
    "reserve_rope_cache_for_long_sequences",
)
"""Steps of ``load_model`` that ask for parts of a server; none of them touches wo_a."""


class Saver:
    """A memory saver that notes which regions were entered."""

    def __init__(self) -> None:
        """Put it together."""
        self.regions: list[tuple[str, bool]] = []

    def region(self, tag: str, enable_cpu_backup: bool = False) -> Any:  # noqa: FBT002  as the engine calls it
        """As the engine's."""
        self.regions.append((tag, enable_cpu_backup))
        return _Nothing()


class _Nothing:
    def __enter__(self) -> None: ...
    def __exit__(self, *_: object) -> None: ...


def weights(model: torch.nn.Module) -> dict[str, torch.nn.Parameter]:
    """Every wo_a weight by the name of its layer."""
    named = model.named_parameters()
    return {name.removesuffix(".weight"): parameter for name, parameter in named if name.endswith("wo_a.weight")}


def copies(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    """Plain copies of every wo_a weight."""
    return {name: weight.detach().clone() for name, weight in weights(model).items()}


def activations(rows: int, pad: int = 0) -> torch.Tensor:
    """bf16 ``[rows, G, D]`` with ``pad`` unused elements behind each row."""
    width = GROUPS * DEPTH
    generator = torch.Generator().manual_seed(rows)
    wide = torch.randn(rows, width + pad, generator=generator, dtype=torch.float32).bfloat16()
    return wide.as_strided((rows, GROUPS, DEPTH), (width + pad, DEPTH, 1))


def checkpoint(prefix: str, layers: int, seed: int) -> Iterator[tuple[str, torch.Tensor]]:
    """wo_a tensors as checkpoints hold them: e4m3 codes and one e8m0 scale per 32x32 block."""
    generator = torch.Generator().manual_seed(seed)
    for layer in range(layers):
        codes = torch.randint(0, 256, (GROUPS * RANK, DEPTH), dtype=torch.uint8, generator=generator)
        codes[(codes & 0x7F) == 0x7F] = 0
        blocks = (GROUPS * RANK // 32, DEPTH // 32)
        scales = torch.randint(115, 127, blocks, dtype=torch.uint8, generator=generator)
        yield f"{prefix}.{layer}.attn.wo_a.weight", codes.view(torch.float8_e4m3fn)
        yield f"{prefix}.{layer}.attn.wo_a.scale", scales.view(torch.float8_e8m0fnu)


def start() -> Engine:
    """Configure one CPU rank and import the models."""
    declare_torchvision_operators()
    arguments = importlib.import_module("sglang.srt.server_args")
    context = importlib.import_module("sglang.srt.runtime_context")
    settings = arguments.ServerArgs(model_path="dummy", device="cpu", attention_backend="torch_native")
    settings.resolve_once()
    ranks = context.SpawnRanks(world_rank=0, dp_rank=0, gpu_id=0)
    context.publish(settings, role="scheduler", ranks=ranks)
    distributed = importlib.import_module("sglang.srt.distributed")
    distributed.init_distributed_environment(
        world_size=1,
        rank=0,
        local_rank=0,
        distributed_init_method=f"tcp://127.0.0.1:{free_port()}",
        backend="gloo",
    )
    distributed.initialize_model_parallel()
    importlib.import_module("sglang.srt.layers.dp_attention").initialize_dp_attention(settings)
    importlib.import_module("sglang.srt.layers.moe").initialize_moe_config()
    torch.set_default_dtype(torch.bfloat16)
    models = "sglang.srt.models.deepseek_v4"
    v4 = importlib.import_module(models)
    v4.get_rope_wrapper = lambda *_args, **_kwargs: None
    return Engine(
        v4,
        importlib.import_module(f"{models}_dspark"),
        importlib.import_module(f"{models}_nextn"),
        importlib.import_module("sglang.srt.model_executor.model_runner"),
        importlib.import_module("sglang.srt.plugins.hook_registry"),
    )


def stop() -> None:
    """Take the process groups down again."""
    torch.set_default_dtype(torch.float32)
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()
