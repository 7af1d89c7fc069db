"""The dispatch hook, with stand-ins for the engine's kernels: routes, phases, keywords, and which kernel gets what."""

from __future__ import annotations

import itertools
from types import ModuleType, SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest
import sglang_dispatch
import torch
from sglang_older import EINSUM, KERNEL_MODULE

from memreclaim import Reclaimer, TagAccessError, counters, is_tag
from memreclaim.engines.sglang import dispatch, mxfp8
from memreclaim.engines.sglang.routes import Route, route_of
from memreclaim.states import Phase
from memreclaim_kernels import plan
from memreclaim_kernels.plan import Plan

if TYPE_CHECKING:
    from collections.abc import Iterator

pytestmark = pytest.mark.cpu
needs_source = pytest.mark.skipif(sglang_dispatch.root() is None, reason="needs SGLang's deepseek_v4.py")
GROUPS, RANK, DEPTH = 2, 64, 128
ROUTE_SHAPE = (2, 1024, 4096)


@pytest.fixture(autouse=True)
def _fresh() -> Iterator[None]:
    dispatch.forget()
    mxfp8._halves.cache_clear()
    yield
    mxfp8._halves.cache_clear()


def reclaimed() -> tuple[torch.nn.Parameter, torch.Tensor]:
    """A tag of a small weight, and the weight's values ``[G, R, D]``."""
    model = torch.nn.Module()
    model.n_local_groups = GROUPS
    model.wo_a = torch.nn.Linear(DEPTH, GROUPS * RANK, bias=False, dtype=torch.bfloat16)
    generator = torch.Generator().manual_seed(3)
    codes = torch.randint(-7, 8, (GROUPS * RANK, DEPTH), generator=generator)
    model.wo_a.weight = torch.nn.Parameter(codes.bfloat16() / 64, requires_grad=False)
    values = model.wo_a.weight.detach().clone().view(GROUPS, RANK, DEPTH)
    Reclaimer().reclaim(model)
    assert is_tag(model.wo_a.weight)
    return model.wo_a.weight, values


def activations(rows: int) -> torch.Tensor:
    """bf16 ``[rows, G, D]``."""
    return torch.randn(rows, GROUPS, DEPTH, generator=torch.Generator().manual_seed(rows)).bfloat16()


def fake_kernels(**more: Any) -> SimpleNamespace:
    """Stand-ins that must never be launched."""

    def refuse(*_: object) -> None:
        raise AssertionError

    return SimpleNamespace(
        wo_a_bf16_gemv=refuse, wo_a_bf16_small_batch=refuse, wo_a_bf16_small_batch_mxfp8=refuse, **more
    )


def route(stock: Any, rows: int, shape: tuple[int, int, int] = ROUTE_SHAPE, pad: int = 0, **flags: Any) -> Route:
    """Where the engine's dispatch goes for contiguous activations of ``shape``, or padded ones."""
    groups, _, depth = shape
    o = torch.empty_strided(
        (rows, groups, depth), (groups * depth + pad, depth, 1), dtype=torch.bfloat16, device="meta"
    )
    return route_of(stock, o, torch.empty(shape, dtype=torch.bfloat16, device="meta"), **flags)


DECODE, VERIFY = {"is_decode": True}, {"is_decode": False, "is_target_verify": True}
PREFILL = {"is_decode": False, "is_prefill": True}


@needs_source
@pytest.mark.parametrize(
    ("platform", "rows", "flags", "expected"),
    [
        ("sm90", 1, DECODE, Route.GEMV),
        ("sm90", 2, DECODE, Route.EINSUM),
        ("sm90", 4, VERIFY, Route.EINSUM),
        ("blackwell", 1, DECODE, Route.GEMV),
        ("blackwell", 1, VERIFY, Route.BMM),
        ("blackwell", 2, DECODE, Route.EINSUM),
        ("blackwell", 2, VERIFY, Route.SMALL),
        ("blackwell", 8, VERIFY, Route.SMALL),
        ("blackwell", 8, {**VERIFY, "fuse_mxfp8_quant": True}, Route.SMALL_MXFP8),
        ("blackwell", 9, VERIFY, Route.BMM),
        ("blackwell", 500, VERIFY, Route.BMM),
        ("blackwell", 5, PREFILL, Route.EINSUM),
        ("blackwell", 4096, PREFILL, Route.BMM),
        ("blackwell", 1, {"is_decode": False}, Route.EINSUM),
    ],
)
def test_the_real_dispatch_says_where_it_goes(
    platform: str, rows: int, flags: dict[str, bool], expected: Route
) -> None:
    """Its conditions are read from its own code: a short prefill is the einsum, also at 2..8 rows."""
    module = sglang_dispatch.dispatch(fake_kernels(), blackwell=platform == "blackwell")

    assert route(module._apply_wo_a_bf16_matmul, rows, fast_path=True, **flags) is expected


@needs_source
@pytest.mark.parametrize("rows", [1, 2, 8])
def test_the_literal_guards_do_not_hold_for_four_groups(rows: int) -> None:
    """TP3's padded shape never takes the small kernels, whatever the flags."""
    module = sglang_dispatch.dispatch(fake_kernels())

    for flags in (DECODE, VERIFY, PREFILL):
        found = route(module._apply_wo_a_bf16_matmul, rows, (4, 1024, 4096), fast_path=True, **flags)
        assert found in (Route.EINSUM, Route.BMM)
        assert found.stock == "bmm"


def older(source: str, *, cuda: bool = False) -> Any:
    """An older line's dispatch."""
    namespace: dict[str, Any] = vars(fake_kernels()).copy()
    text = source.replace("from sglang.kernels.ops.attention.dsv4.wo_a_bf16 import (", "_ = (")
    exec(text, namespace)  # noqa: S102  a fake of this repository
    namespace["_is_cuda"] = cuda
    return namespace


@pytest.mark.parametrize(
    ("rows", "flags", "expected"),
    [
        (1, DECODE, Route.GEMV),
        (2, DECODE, Route.SMALL),
        (8, VERIFY, Route.SMALL),
        (4, {**VERIFY, "fuse_mxfp8_quant": True}, Route.SMALL_MXFP8),
        (9, VERIFY, Route.OTHER),
        (4, {"is_decode": False}, Route.EINSUM),
    ],
)
def test_the_kernel_module_line_says_where_it_goes(rows: int, flags: dict[str, bool], expected: Route) -> None:
    """Its inline bmm is a kernel that we have no name for: the exact weight is made for it."""
    namespace = older(KERNEL_MODULE, cuda=True)

    assert route(namespace["_apply_wo_a_bf16_matmul"], rows, **flags) is expected


@pytest.mark.parametrize("source", [KERNEL_MODULE, EINSUM])
@pytest.mark.parametrize("rows", [0, 1, 2, 8, 9, 16, 192, 193])
def test_older_lines_keep_their_bits(source: str, rows: int) -> None:
    """Dispatch hooked, weight dropped."""
    stock = older(source)["_apply_wo_a_bf16_matmul"]
    tag, values = reclaimed()
    o = activations(rows)

    for is_decode in (True, False):
        ours = dispatch.apply_wo_a(stock, o, tag.view(GROUPS, RANK, -1), is_decode)
        assert torch.equal(ours, stock(o, values, is_decode))


def test_a_plain_weight_goes_to_the_engine_untouched() -> None:
    """Same objects, same keywords, nothing counted."""
    seen: list[Any] = []
    o, weight = activations(2), torch.zeros(GROUPS, RANK, DEPTH, dtype=torch.bfloat16)
    before = counters.calls.snapshot()

    result = dispatch.apply_wo_a(
        lambda *args, **kwargs: seen.append((args, kwargs)) or "result", o, weight, True, x=[1]
    )

    assert result == "result"
    assert seen[0][0][0] is o
    assert seen[0][0][1] is weight
    assert seen[0][1] == {"x": [1]}
    assert counters.calls.snapshot() == before


def test_unknown_keywords_pass_through_with_the_exact_weight() -> None:
    """Engines add keywords, some of which cannot be hashed: the engine's own function then gets bf16."""
    seen: list[Any] = []

    def newer(o: torch.Tensor, wo_a: torch.Tensor, is_decode: bool, layout: list[int]) -> torch.Tensor:
        assert is_decode
        if wo_a.device.type == "cpu":  # it is also asked where it would go, with a weight without values
            seen.append((type(wo_a), layout))
        return torch.einsum("tgd,grd->tgr", o, wo_a)

    tag, values = reclaimed()
    o = activations(3)

    ours = dispatch.apply_wo_a(newer, o, tag.view(GROUPS, RANK, -1), is_decode=True, layout=[1, 2])

    assert torch.equal(ours, torch.einsum("tgd,grd->tgr", o, values))
    assert seen == [(torch.Tensor, [1, 2])]


def test_a_keyword_that_the_engine_does_not_take_raises_as_in_the_engine() -> None:
    """The error is the engine's own."""
    stock = older(EINSUM)["_apply_wo_a_bf16_matmul"]
    tag, _ = reclaimed()

    with pytest.raises(TypeError, match="unknown_keyword"):
        dispatch.apply_wo_a(stock, activations(1), tag.view(GROUPS, RANK, -1), unknown_keyword=1)


class Recorder:
    """Stands for a verified kernel: notes what it was asked for and computes the product."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, order: str = "chain") -> None:
        """Put it together."""
        self.asked: list[tuple[str, str]] = []
        self._order = order
        monkeypatch.setattr(dispatch.ops, "plan_for", self._plan)
        monkeypatch.setattr(dispatch.ops, "project", self._project)

    def _plan(self, _o: torch.Tensor, _codes: torch.Tensor, *, phase: str, numerics: str, stock: str) -> Plan:
        assert numerics == "identical"
        self.asked.append((phase, stock))
        return Plan("small", "cuda", self._order)  # type: ignore[arg-type]

    def _project(self, o: torch.Tensor, codes: torch.Tensor, exponents: torch.Tensor, _plan: Plan) -> torch.Tensor:
        weight = torch.ops.memreclaim.dequantize(codes, exponents)
        return torch.einsum("tgd,grd->tgr", o, weight)


def routed(found: Route) -> Any:
    """A dispatch that would go one way on a GPU, and computes the product here."""
    names: dict[str, Any] = vars(fake_kernels(_wo_a_bf16_bmm_token_major=lambda *_: 1 / 0)).copy()
    launch = found.value or "something_else"
    body = 'torch.einsum("tgd,grd->tgr", o, w)' if found is Route.EINSUM else f"{launch}(o, w)"
    exec(  # noqa: S102  a fake of this test
        f"import torch\ndef stock(o, w, is_decode, is_target_verify=False, is_prefill=False):\n    return {body}", names
    )
    return names["stock"]


@pytest.mark.parametrize(
    ("found", "flags", "expected"),
    [
        (Route.GEMV, DECODE, ("decode", "sglang")),
        (Route.SMALL, VERIFY, ("verify", "sglang")),
        (Route.BMM, VERIFY, ("verify", "bmm")),
        (Route.EINSUM, DECODE, ("decode", "bmm")),
        (Route.EINSUM, PREFILL, ("prefill", "bmm")),
        (Route.EINSUM, {"is_decode": False}, ("prefill", "bmm")),
    ],
)
def test_kernels_are_asked_for_the_bits_of_the_stock_kernel(
    monkeypatch: pytest.MonkeyPatch, found: Route, flags: dict[str, bool], expected: tuple[str, str]
) -> None:
    """Phase from the engine's flags, order of sums from the kernel that the engine would launch."""
    tag, values = reclaimed()
    recorder = Recorder(monkeypatch)
    o = activations(2)

    for _ in range(2):
        ours = dispatch.apply_wo_a(routed(found), o, tag.view(GROUPS, RANK, -1), **flags)
        assert torch.equal(ours, torch.einsum("tgd,grd->tgr", o, values))

    assert recorder.asked == [expected]  # the second call is remembered


def test_a_verdict_on_kernels_makes_calls_be_asked_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    """A kernel that was disabled meanwhile must not go on serving."""
    tag, _ = reclaimed()
    recorder = Recorder(monkeypatch)
    for _ in range(2):
        dispatch.apply_wo_a(routed(Route.EINSUM), activations(2), tag.view(GROUPS, RANK, -1), **DECODE)
        plan.disable("triton", "for this test")
    plan.forget()

    assert len(recorder.asked) == 2


def test_calls_of_a_draft_count_as_draft(monkeypatch: pytest.MonkeyPatch) -> None:
    """DSpark runs its block as target verify; its weights tell."""
    tag, _ = reclaimed()
    dispatch.draft_twins.add(id(tag.memreclaim_backing.twin))
    recorder = Recorder(monkeypatch)
    for flags in (DECODE, VERIFY, PREFILL):
        dispatch.apply_wo_a(routed(Route.EINSUM), activations(4), tag.view(GROUPS, RANK, -1), **flags)

    assert [phase for phase, _ in recorder.asked] == ["draft", "draft", "prefill"]


def test_no_kernel_means_the_engines_own_function_on_the_exact_weight() -> None:
    """And a counter that says so."""
    tag, values = reclaimed()
    seen: list[torch.Tensor] = []

    def stock(_o: torch.Tensor, wo_a: torch.Tensor, is_decode: bool) -> torch.Tensor:  # noqa: ARG001
        if wo_a.device.type == "cpu":
            seen.append(wo_a)
        return wo_a

    before = counters.calls.snapshot().get(("dequant", Phase.DECODE), 0)
    dispatch.apply_wo_a(stock, activations(2), tag.view(GROUPS, RANK, -1), is_decode=True)

    (weight,) = seen
    assert type(weight) is torch.Tensor
    assert torch.equal(weight, values)
    assert counters.calls.snapshot()[("dequant", Phase.DECODE)] == before + 1


def test_partial_sums_add_up_in_any_order_to_the_same_bits() -> None:
    """Signs of zero included, which quantisation keeps."""
    y = torch.tensor([0.0, -0.0, 1.5, -3.0e-39, 448.0, float("inf")]).bfloat16().view(1, 1, -1)
    partials = mxfp8.as_partials(y)

    assert partials.shape == (8, 1, 1, 6)
    for order in itertools.islice(itertools.permutations(range(8)), 0, 40320, 997):
        total = partials[order[0]]
        for index in order[1:]:
            total = total + partials[index]
        assert torch.equal(total.bfloat16().view(torch.int16), y.view(torch.int16))


def test_a_quantised_result_is_the_engines_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """Our product goes through the engine's quantiser, and comes out as its class."""
    tag, values = reclaimed()
    Recorder(monkeypatch, order="splits8")
    monkeypatch.setattr(mxfp8.ops, "project", dispatch.ops.project)
    kernels = ModuleType("fake_kernels")
    kernels._quantize_partial = lambda partial: (partial.sum(0).bfloat16(), torch.ones(3))  # type: ignore[attr-defined]
    launched = SimpleNamespace(__module__="fake_kernels")
    model = SimpleNamespace(wo_a_bf16_small_batch_mxfp8=launched, Mxfp8SwizzledInput=sglang_dispatch.Mxfp8)
    monkeypatch.setitem(mxfp8.sys.modules, "fake_kernels", kernels)
    monkeypatch.setitem(mxfp8.sys.modules, mxfp8._V4, model)
    o = activations(4)

    ours = dispatch.apply_wo_a(routed(Route.SMALL_MXFP8), o, tag.view(GROUPS, RANK, -1), **VERIFY)

    assert isinstance(ours, sglang_dispatch.Mxfp8)
    assert torch.equal(ours.data, torch.einsum("tgd,grd->tgr", o, values))


def test_fused_rope_gets_the_exact_weight() -> None:
    """It reads by pointer; with a plain weight it is untouched."""
    tag, values = reclaimed()
    seen: list[torch.Tensor] = []
    for weight in (tag.view(GROUPS, RANK, -1), values):
        dispatch.fused_rope_wo_a(lambda _x, w, *_args, **_kwargs: seen.append(w), None, weight, 1, out_mxfp8=False)  # type: ignore[arg-type]

    assert torch.equal(seen[0], values)
    assert type(seen[0]) is torch.Tensor
    assert seen[1] is values


def test_a_pointer_on_the_way_is_refused_by_the_tag() -> None:
    """A reader that nobody hooked cannot get at the NaN."""
    tag, _ = reclaimed()

    with pytest.raises(TagAccessError, match="data_ptr"):
        tag.view(GROUPS, RANK, -1).data_ptr()
