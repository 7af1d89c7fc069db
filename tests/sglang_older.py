"""Two older lines of SGLang as small packages, written from what is known of them.

They have no plug-in framework. ``write`` lays a package out on disk, with metadata, so that it is found as SGLang is.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from pathlib import Path

KERNEL_MODULE: Final = """
import torch
from torch import nn
from sglang.kernels.ops.attention.dsv4.wo_a_bf16 import (
    wo_a_bf16_gemv, wo_a_bf16_small_batch, wo_a_bf16_small_batch_mxfp8,
)
_is_cuda = False


def _apply_wo_a_bf16_matmul(o, wo_a, is_decode, is_target_verify=False, fuse_mxfp8_quant=False, *, newer_keyword=None):
    if (
        _is_cuda
        and (is_decode or is_target_verify)
        and o.shape[1:] == (2, 4096)
        and wo_a.shape == (2, 1024, 4096)
        and wo_a.is_contiguous()
    ):
        if is_decode and o.shape[0] == 1:
            return wo_a_bf16_gemv(o, wo_a)
        if 2 <= o.shape[0] <= 8:
            if fuse_mxfp8_quant:
                return wo_a_bf16_small_batch_mxfp8(o, wo_a)
            return wo_a_bf16_small_batch(o, wo_a)
        return torch.bmm(o.transpose(0, 1), wo_a.transpose(1, 2)).transpose(0, 1).contiguous()
    return torch.einsum("tgd,grd->tgr", o, wo_a)


class MQALayer(nn.Module):
    def __init__(self, groups=2, rank=64, depth=128):
        super().__init__()
        self.n_local_groups, self.o_lora_rank = groups, rank
        self.wo_a = nn.Linear(depth, groups * rank, bias=False, dtype=torch.bfloat16)

    def forward(self, o, mode="decode"):
        wo_a = self.wo_a.weight.view(self.n_local_groups, self.o_lora_rank, -1)
        return _apply_wo_a_bf16_matmul(o, wo_a, is_decode=mode == "decode", is_target_verify=mode == "verify")
"""
EINSUM: Final = """
import torch
from torch import nn


def _apply_wo_a_bf16_matmul(o, wo_a, is_decode=False):
    return torch.einsum("tgd,grd->tgr", o, wo_a)


class MQALayer(nn.Module):
    def __init__(self, groups=2, rank=64, depth=128):
        super().__init__()
        self.n_local_groups, self.o_lora_rank = groups, rank
        self.wo_a = nn.Linear(depth, groups * rank, bias=False, dtype=torch.bfloat16)

    def forward(self, o, mode="decode"):
        wo_a = self.wo_a.weight.view(self.n_local_groups, self.o_lora_rank, -1)
        return _apply_wo_a_bf16_matmul(o, wo_a, mode == "decode")
"""
DRAFT_EINSUM: Final = """
import torch
from sglang.srt.models.deepseek_v4 import MQALayer


class DSparkAttention(MQALayer):
    def forward(self, o, mode="draft"):
        weight = self.wo_a.weight.view(self.n_local_groups, self.o_lora_rank, -1)
        return torch.einsum("bgd,grd->bgr", o, weight)
"""
_KERNELS: Final = """
def wo_a_bf16_gemv(x, weight):
    raise AssertionError("no kernel on a CPU")


wo_a_bf16_small_batch = wo_a_bf16_small_batch_mxfp8 = wo_a_bf16_gemv
"""
_RUNNER: Final = """
import torch
from torch import nn


class ModelRunner:
    is_draft_worker = False

    def load_model(self):
        from sglang.srt.models.deepseek_v4 import MQALayer
        from sglang.srt.models.deepseek_v4_dspark import DSparkAttention
        torch.manual_seed(0)
        self.model = nn.ModuleDict({"target": MQALayer(), "draft": DSparkAttention()})
        for layer in self.model.values():
            codes = torch.randint(-7, 8, layer.wo_a.weight.shape).to(torch.bfloat16)
            layer.wo_a.weight = nn.Parameter(codes / 64, requires_grad=False)
"""
_SERVER: Final = """
import multiprocessing


def worker():
    import torch
    from sglang.srt.model_executor.model_runner import ModelRunner
    runner = ModelRunner()
    runner.load_model()
    o = torch.randn(3, 2, 128).bfloat16()
    for name, layer in runner.model.items():
        weight = layer.wo_a.weight
        with torch.no_grad():
            exact = torch.einsum("tgd,grd->tgr", o, weight.clone().view(2, 64, 128))
            print(name, type(weight).__name__, torch.equal(layer(o), exact), flush=True)


if __name__ == "__main__":
    process = multiprocessing.get_context("spawn").Process(target=worker)
    process.start()
    process.join()
    raise SystemExit(process.exitcode)
"""
_PACKAGES: Final = (
    "",
    "srt",
    "srt/models",
    "srt/model_executor",
    "kernels",
    "kernels/ops",
    "kernels/ops/attention",
    "kernels/ops/attention/dsv4",
)


def write(site: Path, version: str, v4: str, draft: str = DRAFT_EINSUM) -> Path:
    """Lay the package out under ``site`` and return its folder."""
    root = site / "sglang"
    files = {
        "srt/models/deepseek_v4.py": v4,
        "srt/models/deepseek_v4_dspark.py": draft,
        "srt/model_executor/model_runner.py": _RUNNER,
        "kernels/ops/attention/dsv4/wo_a_bf16.py": _KERNELS,
        "launch_server.py": _SERVER,
        **{f"{package}/__init__.py".lstrip("/"): "" for package in _PACKAGES},
    }
    for name, text in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    info = site / f"sglang-{version}.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: sglang\nVersion: {version}\n")
    return root
