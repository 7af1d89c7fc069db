"""Checkpoint -> the real engine's models -> its real ``load_model`` -> reclaim -> its real dispatch, bit by bit."""

from __future__ import annotations

import dataclasses
import importlib
import itertools
import urllib.request
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest
import torch
from sglang_engine import DEPTH, GROUPS, RANK, activations, checkpoint, copies, weights

from memreclaim import Reason, State, counters, is_tag
from memreclaim.agree import Agreement
from memreclaim.engines import base, operate
from memreclaim.engines.sglang import dispatch, hooks, rank_service, readers_check, session
from memreclaim.engines.sglang.adapter import SGLangAdapter

if TYPE_CHECKING:
    from collections.abc import Callable

    from sglang_engine import Engine

    from memreclaim.engines.sglang.session import Session

pytestmark = pytest.mark.cpu
FLAGS = (
    {"is_decode": True},
    {"is_decode": False, "is_target_verify": True},
    {"is_decode": False, "is_prefill": True},
    {"is_decode": False, "is_prefill": True, "fast_path": True},
    {"is_decode": True, "fast_path": True, "fuse_mxfp8_quant": True, "fp8_grid": False, "emit_fp8": False},
)


@pytest.mark.parametrize("kind", ["target", "next_n", "draft"])
def test_every_layer_is_reclaimed_after_load_model(
    engine: Engine, start: Callable[..., Session], load: Callable[..., Any], kind: str
) -> None:
    """Target, NextN and DSpark models lose their bf16 weights and keep their bits."""
    here = start()
    model = getattr(engine, kind)()
    before = copies(model)

    load(model, draft=kind != "target")

    (report,) = here.reports.values()
    assert [layer.state for layer in report.layers] == [State.RECLAIMED] * len(before)
    for name, weight in weights(model).items():
        assert is_tag(weight)
        assert torch.equal(weight.clone().view(torch.int16), before[name].view(torch.int16))


def test_weights_are_what_the_engines_own_dequantisation_gives(
    engine: Engine, start: Callable[..., Session], load: Callable[..., Any]
) -> None:
    """The twin stands for codes times scales, as the engine computes them."""
    start()
    model = engine.target(seed=5)
    load(model)

    tensors = dict(checkpoint("layers", 2, 5))
    for layer, weight in enumerate(weights(model).values()):
        name = f"layers.{layer}.attn.wo_a"
        expected = engine.v4._dequant_fp8(tensors[f"{name}.weight"], tensors[f"{name}.scale"])
        assert torch.equal(weight.clone(), expected)


@pytest.mark.parametrize("name", ["v4", "dspark"])
def test_the_real_dispatch_gives_the_stock_bits(
    engine: Engine, start: Callable[..., Session], load: Callable[..., Any], name: str
) -> None:
    """Each row count and set of flags, on a tag and on the bf16 weight, through both names of the function."""
    start()
    model = engine.target()
    before = copies(model)
    load(model)
    layer, weight = next(iter(weights(model).items()))
    shape = (GROUPS, RANK, DEPTH)
    live = getattr(engine, name)._apply_wo_a_bf16_matmul
    differing = []
    for rows, flags, pad in itertools.product((0, 1, 2, 8, 9, 16, 17, 192, 193), FLAGS, (0, 32)):
        o = activations(rows, pad)
        stock = live.__wrapped__(o, before[layer].view(shape), **flags)
        ours = live(o, weight.view(shape), **flags)
        if not torch.equal(ours.view(torch.int16), stock.view(torch.int16)):
            differing.append((rows, flags, pad))

    assert differing == []


def test_twins_go_into_the_weights_region(
    engine: Engine, start: Callable[..., Session], load: Callable[..., Any]
) -> None:
    """A pause must release twins too."""
    start()
    runner = load(engine.target())

    assert runner.memory_saver_adapter.regions == [("weights", False)]


def test_the_engines_book_of_weight_memory_is_corrected(
    engine: Engine, start: Callable[..., Session], monkeypatch: pytest.MonkeyPatch
) -> None:
    """It keeps GiB, and what came back counts up again."""
    here = start()
    runner = engine.runner(engine.target(), monkeypatch, weight_load_mem_usage=2.0)
    adapter = SGLangAdapter(runner, here.line)

    adapter.released(1 << 29)
    assert runner.weight_load_mem_usage == 1.5
    adapter.released(-(1 << 28))
    assert runner.weight_load_mem_usage == 1.75


def test_twin_mode_serves_and_keeps_the_weight(
    engine: Engine, start: Callable[..., Session], load: Callable[..., Any]
) -> None:
    """``MEMRECLAIM=twin`` frees nothing and changes no bit."""
    here = start(mode="twin")
    model = engine.target()
    before = copies(model)
    load(model)

    assert here.reports["target"].gross_bytes == 0
    name, weight = next(iter(weights(model).items()))
    o, shape = activations(4), (GROUPS, RANK, DEPTH)
    ours = engine.v4._apply_wo_a_bf16_matmul(o, weight.view(shape), is_decode=True)
    assert torch.equal(ours, torch.einsum("tgd,grd->tgr", o, before[name].view(shape)))


def test_a_draft_may_be_left_alone(engine: Engine, start: Callable[..., Session], load: Callable[..., Any]) -> None:
    """``MEMRECLAIM_DRAFT=off`` keeps the draft's weights, by policy."""
    here = start(draft=False)
    model = engine.draft()
    load(model, draft=True)

    assert {layer.reason for layer in here.reports["draft"].layers} == {Reason.POLICY}
    assert not any(map(is_tag, weights(model).values()))


@pytest.mark.parametrize(
    "special",
    [
        {"server_args": SimpleNamespace(weight_cache_mode="client")},
        {"startup_weight_load": object()},
        {"remote_instance_weight_transporter": SimpleNamespace(engine=object(), session_id=None, weight_info=None)},
    ],
    ids=lambda special: next(iter(special)),
)
def test_special_set_ups_keep_bf16(
    engine: Engine,
    start: Callable[..., Session],
    monkeypatch: pytest.MonkeyPatch,
    special: dict[str, Any],
) -> None:
    """Shared, late or fetched weights are never dropped."""
    here = start()
    model = engine.target()
    runner = engine.runner(model, monkeypatch, **special)
    runner.model = model
    if "server_args" in special:
        context = pytest.importorskip("sglang.srt.runtime_context")
        monkeypatch.setattr(context, "get_model", lambda: special["server_args"])

    report = here.reclaim(SGLangAdapter(runner, here.line))

    assert {layer.reason for layer in report.layers} == {Reason.UNKNOWN_READER}
    assert not any(map(is_tag, weights(model).values()))


def test_context_parallel_decode_keeps_bf16(
    engine: Engine, start: Callable[..., Session], monkeypatch: pytest.MonkeyPatch
) -> None:
    """It caches slices of the weight for good."""
    here = start()
    model = engine.target()
    runner = engine.runner(model, monkeypatch)
    runner.model = model
    context = pytest.importorskip("sglang.srt.runtime_context")
    monkeypatch.setattr(context, "get_parallel", lambda: SimpleNamespace(enable_cp_decode_attn_tp=True, attn_cp_size=2))

    adapter = SGLangAdapter(runner, here.line)

    assert "enable_cp_decode_attn_tp" in dict(adapter.model_problems())


def test_mega_attention_is_reclaimed_too(
    engine: Engine, start: Callable[..., Session], monkeypatch: pytest.MonkeyPatch
) -> None:
    """It made its own fp8 copy at load, so nobody reads the bf16 weight any more."""
    here = start()
    model = engine.target()
    for layer in model.model.layers:
        layer.self_attn.use_mega_attention = True
    runner = engine.runner(model, monkeypatch)
    runner.model = model

    report = here.reclaim(SGLangAdapter(runner, here.line))

    assert [layer.state for layer in report.layers] == [State.RECLAIMED] * 2


def test_a_missing_hook_keeps_every_layer(
    engine: Engine, start: Callable[..., Session], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Should the engine have swallowed a hook's failure, nothing is dropped."""
    here = start()
    monkeypatch.setattr(engine.v4, "_apply_wo_a_bf16_matmul", engine.v4._apply_wo_a_bf16_matmul.__wrapped__)
    model = engine.target()
    runner = engine.runner(model, monkeypatch)
    runner.model = model

    report = here.reclaim(SGLangAdapter(runner, here.line))

    assert {layer.reason for layer in report.layers} == {Reason.UNKNOWN_READER}


def test_a_replaced_forward_is_an_unknown_reader(
    engine: Engine, start: Callable[..., Session], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whoever replaced a layer's forward may read the weight in any way."""
    here = start()
    model = engine.target()
    model.model.layers[1].self_attn.forward = lambda *_: None
    runner = engine.runner(model, monkeypatch)
    runner.model = model

    report = here.reclaim(SGLangAdapter(runner, here.line))

    assert [layer.reason for layer in report.layers] == [None, Reason.UNKNOWN_READER]


def test_a_reader_whose_bits_differ_keeps_its_layer(
    engine: Engine, start: Callable[..., Session], load: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The self-check compares each reader before the drop, and can fail."""
    here = start()
    live = engine.v4._apply_wo_a_bf16_matmul

    def off_by_one_bit(o: torch.Tensor, wo_a: torch.Tensor, **kwargs: Any) -> torch.Tensor:
        out = live(o, wo_a, **kwargs)
        if session.twins_of(model) or type(wo_a) is not torch.Tensor:
            out.view(torch.int16)[-1, -1, -1] ^= 1
        return out

    off_by_one_bit.__wrapped__ = live
    off_by_one_bit.__closure__  # noqa: B018  it must be a closure, like the registry's wrappers
    monkeypatch.setattr(engine.v4, "_apply_wo_a_bf16_matmul", off_by_one_bit)
    model = engine.target()
    load(model)

    assert {layer.reason for layer in here.reports["target"].layers} == {Reason.UNKNOWN_READER}


def test_after_capture_nothing_is_dropped(
    engine: Engine, start: Callable[..., Session], load: Callable[..., Any]
) -> None:
    """Graphs hold the bf16 addresses by then."""
    here = start()
    here.captured = True
    load(engine.target())

    assert {layer.reason for layer in here.reports["target"].layers} == {Reason.AFTER_CAPTURE}


def test_a_weight_without_a_twin_stays_and_the_engine_starts(
    engine: Engine, start: Callable[..., Session], load: Callable[..., Any]
) -> None:
    """A mismatch is no error of the service."""
    here = start()
    model = engine.target()
    with torch.no_grad():
        next(iter(weights(model).values())).view(-1)[0] = 1.00390625 * 3e-3
    load(model)

    assert [layer.reason for layer in here.reports["target"].layers] == [Reason.MISMATCH, None]


def test_a_failure_of_ours_does_not_stop_the_engine(
    engine: Engine, start: Callable[..., Session], load: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The hook logs and returns; under abort it raises."""
    start()
    monkeypatch.setattr(session.Session, "reclaim", lambda *_args, **_kwargs: 1 / 0)
    model = engine.target()
    load(model)
    assert not any(map(is_tag, weights(model).values()))

    start(on_mismatch="abort")
    with pytest.raises(ZeroDivisionError):
        load(engine.target())


def test_phases_come_from_the_forward_mode(
    engine: Engine, start: Callable[..., Session], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each real forward mode has a phase, by the role of its model."""
    from sglang.srt.model_executor.forward_batch_info import ForwardMode

    here = start()
    adapter = SGLangAdapter(engine.runner(engine.target(), monkeypatch), here.line)
    target = {
        mode: adapter.phase_of(SimpleNamespace(forward_mode=mode), base.Role.TARGET) for mode in _MODES(ForwardMode)
    }
    draft = {
        mode: adapter.phase_of(SimpleNamespace(forward_mode=mode), base.Role.DRAFT) for mode in _MODES(ForwardMode)
    }

    assert [phase.value for phase in target.values()] == ["decode", "verify", "prefill"]
    assert [phase.value for phase in draft.values()] == ["draft", "draft", "prefill"]


def _MODES(mode: Any) -> tuple[Any, ...]:  # noqa: N802
    return mode.DECODE, mode.TARGET_VERIFY, mode.EXTEND


def test_forward_of_the_real_attention_layer_keeps_its_bits(
    engine: Engine, start: Callable[..., Session], load: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """``MQALayer.forward`` itself, with attention replaced, calls the dispatch on the layer's own weight."""
    from sglang.srt.model_executor.forward_batch_info import ForwardMode

    start()
    model = engine.target()
    layer = model.model.layers[0].self_attn
    rows, heads, head_dim = 3, layer.n_local_heads, layer.head_dim
    o = torch.randn(rows, heads, head_dim)
    backend = SimpleNamespace(forward=lambda **_: o.clone())
    monkeypatch.setattr(engine.v4, "get_attn_backend", lambda: backend)
    monkeypatch.setattr(engine.v4, "fused_rope_inplace", lambda *_args, **_kwargs: None)
    monkeypatch.setattr(type(layer), "_forward_prepare", lambda *_args, **_kwargs: (o.clone(), o[:, :1].clone()))
    batch = SimpleNamespace(forward_mode=ForwardMode.DECODE, batch_size=rows)
    hidden = torch.randn(rows, model.config.hidden_size)

    def forward() -> torch.Tensor:
        with torch.no_grad():
            result: torch.Tensor = layer(positions=torch.arange(rows), x=hidden, forward_batch=batch)
        return result if isinstance(result, torch.Tensor) else result[0]

    stock = forward()
    load(model)
    calls = sum(counters.calls.snapshot().values())
    ours = forward()

    assert is_tag(layer.wo_a.weight)
    assert torch.equal(ours.view(torch.int16), stock.view(torch.int16))
    assert sum(counters.calls.snapshot().values()) == calls + 1


@pytest.mark.parametrize("fast", [True, False])
def test_forward_of_the_real_draft_attention_keeps_its_bits(
    engine: Engine, start: Callable[..., Session], load: Callable[..., Any], monkeypatch: pytest.MonkeyPatch, fast: bool
) -> None:
    """``DSparkAttention.forward``: the shared dispatch, or its own einsum in float32 without the fast kernel."""
    start()
    model = engine.draft()
    layer = model.stages[0].self_attn
    layer._use_fast_kernel = fast
    rows = 4
    o = torch.randn(rows, layer.n_local_heads, layer.head_dim)
    backend = SimpleNamespace(forward=lambda **_: o.clone())
    context = importlib.import_module("sglang.srt.model_executor.forward_context")
    monkeypatch.setattr(context, "get_attn_backend", lambda: backend)
    monkeypatch.setattr(engine.dspark, "_resolve_dspark_pool", lambda: SimpleNamespace(uniform_fp8=False))
    monkeypatch.setattr(engine.dspark, "fused_rope_inplace", lambda *_args, **_kwargs: None)
    monkeypatch.setattr(engine.dspark, "apply_rotary_emb", lambda x, *_args, **_kwargs: x)
    monkeypatch.setattr(type(layer), "_store_block_kv", lambda *_args, **_kwargs: None)
    monkeypatch.setattr(type(layer), "_compute_q", lambda *_args, **_kwargs: o.clone())
    monkeypatch.setattr(layer, "freqs_cis", torch.zeros(rows), raising=False)
    forward_mode = importlib.import_module("sglang.srt.model_executor.forward_batch_info").ForwardMode
    batch = SimpleNamespace(forward_mode=forward_mode.TARGET_VERIFY, batch_size=1)
    hidden = torch.randn(rows, model.config.hidden_size)

    def forward() -> torch.Tensor:
        with torch.no_grad():
            result = layer(torch.arange(rows), hidden, batch)
        return result if isinstance(result, torch.Tensor) else result[0]

    stock = forward()
    load(model, draft=True)
    ours = forward()

    assert is_tag(layer.wo_a.weight)
    assert torch.equal(ours.view(torch.int16), stock.view(torch.int16))


@pytest.mark.usefixtures("engine")
def test_ranks_can_agree_over_the_engines_own_group() -> None:
    """The group that the engine made has a store, and its collectives are not touched."""
    context = importlib.import_module("sglang.srt.runtime_context")
    group = context.get_parallel().tp_group.cpu_group
    agreement = Agreement(group, {"sglang": "0.5.23"}, "target", seconds=10)

    assert agreement({"layer": None}) == {}
    assert agreement.decision.go
    assert agreement.share({"rank": 0}, "report") == [{"rank": 0}]


def test_kernels_are_judged_before_ranks_compare_fingerprints(
    engine: Engine, start: Callable[..., Session], load: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Or the verdicts in them would be those of nothing yet."""
    here = start()
    group = importlib.import_module("sglang.srt.runtime_context").get_parallel().tp_group.cpu_group
    monkeypatch.setattr(SGLangAdapter, "group", lambda _self: group)
    told: list[object] = []
    fingerprint = operate.fingerprint
    monkeypatch.setattr(readers_check, "_verify_kernels", lambda shape, _device: told.append(tuple(shape)))
    monkeypatch.setattr(operate, "fingerprint", lambda *args: told.append("fingerprint") or fingerprint(*args))

    load(engine.target())

    assert told[:3] == [(GROUPS, RANK, DEPTH), (GROUPS, RANK, DEPTH), "fingerprint"]
    assert [layer.state for layer in here.reports["target"].layers] == [State.RECLAIMED] * 2


def test_a_rank_serves_its_figures_and_works_while_the_scheduler_idles(
    engine: Engine, start: Callable[..., Session], load: Callable[..., Any]
) -> None:
    """``MEMRECLAIM_HTTP`` starts the rank's service after the first reclaim; the desk is polled by ``on_idle``."""
    here = start(http=("127.0.0.1", 0))
    load(engine.target())
    service = here.service
    assert service is not None
    try:
        with urllib.request.urlopen(f"{service.url}/metrics", timeout=10) as answer:  # noqa: S310  http
            text = answer.read().decode()
        operation = service.desk.submit("audit")
        rank_service.after_idle(None)
        done = service.desk.find(operation.id)
    finally:
        service.close()

    assert "memreclaim" in text
    assert service.probe.stock == "sglang"
    assert done is not None
    assert done.status.value == "done", done.to_dict()


def test_operations_over_http_reclaim_as_the_start_does(
    engine: Engine, start: Callable[..., Session], load: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each runner's book is right, a draft's twins are known as such, and a reader that differs keeps its layer."""
    here = start(http=("127.0.0.1", 0))
    runners = [load(engine.target())]
    runners.append(load(engine.draft(), draft=True))
    service = here.service
    assert service is not None

    def books() -> list[float]:
        return [runner.weight_load_mem_usage for runner in runners]

    def ask(operation: str) -> None:
        waiting = service.desk.submit(operation)
        rank_service.after_idle(None)
        done = service.desk.find(waiting.id)
        assert done is not None
        assert done.status.value == "done", done.to_dict()

    try:
        loaded = books()
        nets = [here.reports[name].net_bytes / (1 << 30) for name in ("target", "draft")]
        stock = [book + net for book, net in zip(loaded, nets, strict=True)]
        assert min(nets) > 0
        ask("restore")
        assert books() == stock
        dispatch.draft_twins.clear()
        ask("reclaim")
        assert books() == loaded
        assert dispatch.draft_twins == set(map(id, session.twins_of(runners[1].model).values()))
        ask("restore")
        monkeypatch.setattr(readers_check, "check_for", lambda _model: lambda *_: Reason.UNKNOWN_READER)
        ask("reclaim")
        assert {layer.reason for report in here.reports.values() for layer in report.layers} == {Reason.UNKNOWN_READER}
        assert books() == stock
    finally:
        service.close()


@pytest.mark.parametrize(("line", "starts"), [("released", True), ("einsum", False)])
def test_the_audits_clock_starts_with_the_first_reclaim(
    start: Callable[..., Session],
    engine: Engine,
    monkeypatch: pytest.MonkeyPatch,
    line: str,
    starts: bool,
) -> None:
    """Without it no audit ever runs; where the capture of graphs is not hooked none may."""
    here = start(http=("127.0.0.1", 0))
    runner = engine.runner(engine.target(), monkeypatch)
    runner.load_model()
    service = here.service
    assert service is not None
    try:
        before = service.rank.audit.last_timestamp
        here.line = dataclasses.replace(here.line, name=line)
        service.rank.audit = dataclasses.replace(service.rank.audit, last_timestamp=0.0)
        here.proven(session.twins_of(runner.model).values())

        assert before > 0
        assert (service.rank.audit.last_timestamp > 0) is starts
    finally:
        service.close()


def test_the_hooks_of_readers_are_named() -> None:
    """A new reader's hook must be marked as one."""
    assert {hook.target for hook in hooks.HOOKS if hook.reads} == {hooks.DISPATCH, hooks.FUSED}
