"""On a GPU: SGLang's real kernels and dispatch against ours through the hook, bit by bit, eagerly and in CUDA graphs.

Needs the engine's files, installed or in ``SGLANG_ROOT`` (``srt/models/deepseek_v4.py``,
``kernels/ops/gemm/dsv4_wo_a.py``, ``kernels/ops/quantization/mxfp8_epilogue.py``), and nothing else of it.
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

import pytest
import sglang_dispatch
import torch

from memreclaim import Reclaimer, counters, is_tag
from memreclaim.engines.sglang import dispatch, mxfp8, readers_check

if TYPE_CHECKING:
    from collections.abc import Iterator

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(sglang_dispatch.root() is None, reason="needs SGLang's files: install it or set SGLANG_ROOT"),
]
RANK, DEPTH = 1024, 4096
DECODE, VERIFY = {"is_decode": True}, {"is_decode": False, "is_target_verify": True}
PREFILL = {"is_decode": False, "is_prefill": True}
CALLS = (
    [(1, DECODE)]
    + [(rows, VERIFY) for rows in (1, 2, 3, 4, 5, 6, 7, 8, 9, 16, 17, 32, 33, 64, 96, 128, 129, 192, 193, 384)]
    + [(rows, DECODE) for rows in (2, 8, 16, 64)]
    + [(rows, PREFILL) for rows in (2, 8, 9, 100, 1024, 4096)]
)


class Case:
    """The real dispatch on one platform's conditions, and a reclaimed weight beside its bf16 values."""

    def __init__(self, groups: int, *, blackwell: bool) -> None:
        """Put it together."""
        self.module = sglang_dispatch.dispatch(sglang_dispatch.kernels(), blackwell=blackwell)
        self.stock = self.module._apply_wo_a_bf16_matmul
        self.groups = groups
        model = torch.nn.Module()
        model.n_local_groups = groups
        model.wo_a = torch.nn.Linear(DEPTH, groups * RANK, bias=False, dtype=torch.bfloat16, device="cuda")
        generator = torch.Generator(device="cuda").manual_seed(groups)
        codes = torch.randint(0, 256, model.wo_a.weight.shape, dtype=torch.uint8, device="cuda", generator=generator)
        codes[(codes & 0x7F) == 0x7F] = 0
        blocks = (groups * RANK // 32, DEPTH // 32)
        scales = torch.randint(115, 127, blocks, dtype=torch.uint8, device="cuda", generator=generator)
        scale = (scales.int() << 23).view(torch.float32).repeat_interleave(32, 0).repeat_interleave(32, 1)
        values = (codes.view(torch.float8_e4m3fn).float() * scale).bfloat16()
        model.wo_a.weight = torch.nn.Parameter(values, requires_grad=False)
        self.values = values.clone().view(groups, RANK, DEPTH)
        del values
        Reclaimer().reclaim(model)
        assert is_tag(model.wo_a.weight)
        self.tag = model.wo_a.weight.view(groups, RANK, -1)
        readers_check._verify_kernels.cache_clear()
        readers_check._verify_kernels(self.tag.memreclaim_backing.twin.shape, self.tag.device)

    def activations(self, rows: int, pad: int = 0) -> torch.Tensor:
        """bf16 ``[rows, G, D]`` with ``pad`` unused elements behind each row."""
        width = self.groups * DEPTH
        wide = torch.randn(rows, width + pad, device="cuda", generator=torch.Generator("cuda").manual_seed(rows))
        return wide.bfloat16().as_strided((rows, self.groups, DEPTH), (width + pad, DEPTH, 1))

    def ours(self, o: torch.Tensor, **flags: Any) -> Any:
        """Through the hook."""
        return dispatch.apply_wo_a(self.stock, o, self.tag, fast_path=True, **flags)


@pytest.fixture(scope="module", params=[(2, True), (2, False), (4, True), (1, True)], ids=str)
def case(request: pytest.FixtureRequest) -> Iterator[Case]:
    """Groups of TP4, padded TP3 and TP8; conditions of Blackwell and of sm90."""
    groups, blackwell = request.param
    dispatch.forget()
    mxfp8._halves.cache_clear()
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(sys.modules, readers_check._V4, sglang_dispatch.dispatch(sglang_dispatch.kernels()))
        yield Case(groups, blackwell=blackwell)
    mxfp8._halves.cache_clear()


def differing(stock: torch.Tensor, ours: torch.Tensor) -> int:
    """How many outputs have other bits."""
    return int((stock.contiguous().view(torch.int16) != ours.contiguous().view(torch.int16)).sum())


@pytest.mark.parametrize("pad", [0, 128])
def test_every_call_has_the_bits_of_the_real_kernel(case: Case, pad: int) -> None:
    """Decode, verify and prefill at every kind of row count, contiguous and strided."""
    wrong = {}
    for rows, flags in CALLS:
        o = case.activations(rows, pad)
        if pad and rows == 1 and flags is DECODE and case.groups == 2:
            o = o.contiguous()  # the engine's gemv asserts it
        count = differing(case.stock(o, case.values, fast_path=True, **flags), case.ours(o, **flags))
        if count:
            wrong[rows, str(flags)] = count

    assert wrong == {}


@pytest.mark.parametrize("rows", range(2, 9))
def test_the_quantised_result_is_the_real_one(case: Case, rows: int) -> None:
    """``Mxfp8SwizzledInput``: codes and scales byte by byte, padding rows included."""
    o = case.activations(rows)
    stock = case.stock(o, case.values, fast_path=True, fuse_mxfp8_quant=True, **VERIFY)
    ours = case.ours(o, fuse_mxfp8_quant=True, **VERIFY)

    assert type(ours) is type(stock)
    for mine, theirs in zip(*((one if isinstance(one, tuple) else (one,)) for one in (ours, stock)), strict=True):
        assert torch.equal(mine.view(torch.uint8), theirs.view(torch.uint8))


@pytest.mark.parametrize(
    ("rows", "flags"), [(1, DECODE), (4, VERIFY), (8, VERIFY), (16, VERIFY), (64, VERIFY), (193, VERIFY)]
)
def test_a_captured_graph_replays_the_stock_bits(case: Case, rows: int, flags: dict[str, bool]) -> None:
    """New activations in the captured buffer, replayed three times; no Python runs in between."""
    buffer = case.activations(rows).contiguous()
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        case.ours(buffer, **flags)
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = case.ours(buffer, **flags)
    calls = counters.calls.snapshot()
    for seed in range(3):
        buffer.copy_(case.activations(rows + 1000 * seed)[:rows])
        graph.replay()
        assert differing(case.stock(buffer, case.values, fast_path=True, **flags), out) == 0

    assert counters.calls.snapshot() == calls


def test_decode_and_verify_do_not_dequantise_for_two_groups() -> None:
    """Where kernels were verified, the counter of dequantisation stands still: 16 rows included."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(sys.modules, readers_check._V4, sglang_dispatch.dispatch(sglang_dispatch.kernels()))
        dispatch.forget()
        case = Case(2, blackwell=True)
        before = counters.calls.snapshot()
        for rows, flags in ((1, DECODE), (2, VERIFY), (8, VERIFY), (16, VERIFY), (192, VERIFY)):
            case.ours(case.activations(rows), **flags)
    moved = {path for (path, _), n in counters.calls.snapshot().items() if n != before.get((path, _), 0)}

    assert "dequant" not in moved
