"""The engine's own dispatch and kernels without the engine: its files, run beside stand-ins for what they import.

The dispatch's code is taken from the installed ``deepseek_v4.py`` when a test runs; a folder with only the few files
that are needed will do (``SGLANG_ROOT``), so that a GPU machine needs no SGLang.
"""

from __future__ import annotations

import ast
import importlib
import os
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any, NamedTuple

import torch

from memreclaim.engines.sglang import drift

NAME = "_apply_wo_a_bf16_matmul"
_HELPER = "_wo_a_bf16_bmm_token_major"
_V4 = "sglang.srt.models.deepseek_v4"
_PACKAGES = (
    "sglang",
    "sglang.kernels",
    "sglang.kernels.ops",
    "sglang.kernels.ops.gemm",
    "sglang.kernels.ops.quantization",
)
_KERNELS = ("wo_a_bf16_gemv", "wo_a_bf16_small_batch", "wo_a_bf16_small_batch_mxfp8")


class Mxfp8(NamedTuple):
    """As the engine's ``Mxfp8SwizzledInput``."""

    data: torch.Tensor
    scales: torch.Tensor


def root() -> Path | None:
    """Folder of the engine's package."""
    named = os.environ.get("SGLANG_ROOT")
    return Path(named) if named else drift.package_root()


def dispatch(kernels: Any, *, blackwell: bool = True, cuda: bool = True) -> Any:
    """A module that holds the real dispatch over ``kernels``, on the platform given."""
    folder = root()
    assert folder is not None
    tree = ast.parse((folder / "srt/models/deepseek_v4.py").read_text())
    wanted = [node for name, node in drift.functions(tree) if name in (NAME, _HELPER)]
    module = ModuleType(_V4)
    vars(module).update(
        torch=torch,
        Mxfp8SwizzledInput=Mxfp8,
        Fp8GridActivation=Mxfp8,
        Mxfp8Activation=Mxfp8,
        get_platform=lambda: SimpleNamespace(is_blackwell=blackwell, is_sm90=not blackwell),
        logger=None,
        _is_cuda=cuda,
        _is_hip=False,
        _is_gfx95_supported=False,
        _hip=None,
        _wo_a_aiter_batched_gemm_enabled=False,
        _wo_a_aiter_batched_gemm_disabled=False,
        **{name: getattr(kernels, name) for name in _KERNELS},
    )
    code = compile(
        ast.Module(body=list(wanted), type_ignores=[]),
        str(folder),
        "exec",
        flags=__import__("__future__").annotations.compiler_flag,
    )
    exec(code, vars(module))  # noqa: S102  the engine's own function
    return module


def kernels() -> ModuleType:
    """The real ``dsv4_wo_a`` module, with its parent packages left empty; needs Triton and two files."""
    name = "sglang.kernels.ops.gemm.dsv4_wo_a"
    if name not in sys.modules:
        folder = root()
        assert folder is not None
        for package in _PACKAGES:
            if package not in sys.modules:
                stand_in = ModuleType(package)
                stand_in.__path__ = [str(folder / Path(*package.split(".")[1:]))]
                sys.modules[package] = stand_in
    return importlib.import_module(name)
