"""Many threads: serving, reading and writing while layers are reclaimed and restored, never a wrong bit.

No account lost.
"""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Any

import pytest
from core.models import Stack, activations, exact_weight, reclaimer, same_bits, stack

import memreclaim as mr
from memreclaim import swap

if TYPE_CHECKING:
    from collections.abc import Callable

pytestmark = pytest.mark.cpu


def together(*jobs: Callable[[], object]) -> None:
    """Run jobs in threads that start at the same moment; raise what the first failing one raised."""
    errors: list[BaseException] = []
    barrier = threading.Barrier(len(jobs))

    def run(job: Callable[[], object]) -> None:
        try:
            barrier.wait(timeout=30)
            job()
        except BaseException as error:  # noqa: BLE001  handed on below
            errors.append(error)

    threads = [threading.Thread(target=run, args=(job,)) for job in jobs]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=120)
    assert not any(thread.is_alive() for thread in threads)
    if errors:
        raise errors[0]


def repeated(times: int, job: Callable[[], object]) -> Callable[[], None]:
    """A job done some times."""

    def run() -> None:
        for _ in range(times):
            job()

    return run


def test_serving_reading_and_reclaiming_at_once() -> None:
    """Case 33: projections, the model's own einsum and plain reads give the original bits while layers come and go."""
    model, rec = stack(2), reclaimer()
    o = activations(5)
    weights = [layer.wo_a.weight.detach().clone() for layer in model.layers]
    expected = [layer(o) for layer in model.layers]
    cached = []

    def serve() -> None:
        for layer, out in zip(model.layers, expected, strict=True):
            assert same_bits(layer(o), out)
            assert same_bits(mr.grouped_projection(o, layer.wo_a.weight), out)

    def read() -> None:
        for layer, weight in zip(model.layers, weights, strict=True):
            assert same_bits(layer.wo_a.weight[17].clone(), weight[17])
            assert same_bits(layer.wo_a.weight.float(), weight.float())
            assert same_bits(layer.state_dict()["wo_a.weight"].clone(), weight)
            cached.append((layer.wo_a.weight.view(2, 64, 96), weight))
        if len(cached) > 8:
            cached.clear()

    def cycle() -> None:
        rec.reclaim(model)
        rec.restore(model)

    together(repeated(25, serve), repeated(25, serve), repeated(25, read), repeated(6, cycle), repeated(6, cycle))
    rec.check_integrity()
    for view, weight in cached:
        assert same_bits(view.clone(), weight.view(2, 64, 96))
    cached.clear()
    rec.reclaim(model)
    rec.check_integrity()
    serve()


def test_writers_and_a_reclaimer_at_once() -> None:
    """Cases 19, 28: a value that a thread wrote through the model is there afterwards, reclaimed or not."""
    model, rec = stack(2), reclaimer()
    weights = [layer.wo_a.weight.detach().clone() for layer in model.layers]
    # Each thread owns a row and writes values that e4m3 holds at the block's scale, so that layers can be reclaimed.
    values = [float(weights[0][row].abs().max()) for row in range(3)]

    def write(row: int) -> None:
        for step in range(15):
            value = values[row] * (-1) ** step
            model.layers[0].wo_a.weight[row, :32] = value
            assert bool((model.layers[0].wo_a.weight[row, :32].clone() == value).all())

    together(
        *(lambda row=row: write(row) for row in range(3)),
        repeated(8, lambda: rec.reclaim(model)),
        repeated(8, lambda: rec.restore(model)),
    )
    rec.check_integrity()
    for row in range(3):
        assert bool((model.layers[0].wo_a.weight[row, :32].clone() == values[row]).all())
    assert same_bits(model.layers[0].wo_a.weight[3:].clone(), weights[0][3:])
    assert same_bits(model.layers[1].wo_a.weight.clone(), weights[1])


def test_two_reclaimers_on_one_model() -> None:
    """Case 33: two reclaimers at once drop each weight once; what one claims the other does not."""
    model, one, two = stack(3), reclaimer(), reclaimer()
    expected = [layer.wo_a.weight.detach().clone() for layer in model.layers]
    together(lambda: one.reclaim(model), lambda: two.reclaim(model))
    one.check_integrity()
    two.check_integrity()
    booked = sum(layer.gross_bytes for rec in (one, two) for layer in rec.ledger.layers())
    released = sum(
        weight.nbytes for weight, layer in zip(expected, model.layers, strict=True) if mr.is_tag(layer.wo_a.weight)
    )
    assert booked == released
    for layer, weight in zip(model.layers, expected, strict=True):
        assert same_bits(layer.wo_a.weight.clone(), weight)


def test_two_reclaims_of_one_reclaimer() -> None:
    """Case 33: the second waits for the first and finds the work done."""
    model, rec = stack(3), reclaimer()
    together(lambda: rec.reclaim(model), lambda: rec.reclaim(model))
    rec.check_integrity()
    assert [layer.state.value for layer in rec.ledger.layers()] == ["reclaimed"] * 3


def at(monkeypatch: pytest.MonkeyPatch, step: str, action: Callable[[], object]) -> list[Any]:
    """Run ``action`` in another thread when the swap reaches ``step`` for the first time."""
    real, threads = getattr(swap, step), []

    def reached(*args: Any, **kwargs: Any) -> Any:
        if not threads:
            threads.append(threading.Thread(target=action))
            threads[0].start()
            if step != "_rebuilders":
                threads[0].join(timeout=0.2)
        return real(*args, **kwargs)

    monkeypatch.setattr(swap, step, reached)
    return threads


@pytest.mark.parametrize("step", ["_put", "_synchronize", "_wait_for_sole_ownership"])
def test_a_write_by_another_thread_in_the_middle_of_a_swap(monkeypatch: pytest.MonkeyPatch, step: str) -> None:
    """Case 28: a write that meets a half-done swap, through the tag or the weight, wins."""
    model, rec = stack(1), reclaimer()
    threads = at(monkeypatch, step, lambda: model.layers[0].wo_a.weight[5].fill_(1.0))
    rec.reclaim(model)
    threads[0].join(timeout=30)
    assert bool((model.layers[0].wo_a.weight[5].clone() == 1).all())
    rec.check_integrity()


@pytest.mark.parametrize("step", ["_put", "_synchronize", "_wait_for_sole_ownership"])
def test_a_restore_in_the_middle_of_a_reclaim(monkeypatch: pytest.MonkeyPatch, step: str) -> None:
    """Case 33: a restore that meets a reclaim waits for it; ledger and model agree afterwards."""
    model, rec = stack(2), reclaimer()
    expected = [layer.wo_a.weight.detach().clone() for layer in model.layers]
    threads = at(monkeypatch, step, lambda: rec.restore(model))
    rec.reclaim(model)
    threads[0].join(timeout=30)
    rec.check_integrity()
    assert [mr.is_tag(layer.wo_a.weight) for layer in model.layers] == [False, False]
    assert [layer.state.value for layer in rec.ledger.layers()] == ["restored", "restored"]
    for layer, weight in zip(model.layers, expected, strict=True):
        assert same_bits(layer.wo_a.weight, weight)


@pytest.mark.parametrize("step", ["_synchronize", "_wait_for_sole_ownership"])
def test_readers_in_the_middle_of_a_swap(monkeypatch: pytest.MonkeyPatch, step: str) -> None:
    """Case 33: while the tag stands and the bytes are not yet gone, readers get the exact values."""
    model, rec = stack(1), reclaimer()
    weight, o = model.layers[0].wo_a.weight.detach().clone(), activations(3)
    out = model.layers[0](o)
    seen = []
    threads = at(monkeypatch, step, lambda: seen.append((model.layers[0](o), model.layers[0].wo_a.weight.clone())))
    rec.reclaim(model)
    threads[0].join(timeout=30)
    assert (same_bits(seen[0][0], out), same_bits(seen[0][1], weight)) == (True, True)


def test_load_state_dict_while_serving() -> None:
    """Case 27: a reload under load shows old or new elements, never others, and is proven anew."""
    model, rec = Stack(*stack(1).layers), reclaimer()
    o = activations(2)
    old, new = model.layers[0].wo_a.weight.detach().clone(), exact_weight(seed=8)
    before = model.layers[0](o)
    rec.reclaim(model)

    def serve() -> None:
        read = model.layers[0].wo_a.weight.clone()
        # A copy in flight may be seen element by element, as on a plain parameter: each element is old or new.
        assert bool(((read == old) | (read == new)).all())

    together(repeated(40, serve), repeated(40, serve), lambda: model.load_state_dict({"layers.0.wo_a.weight": new}))
    rec.check_integrity()
    assert rec.reclaim(model).count(mr.State.RECLAIMED) == 1
    assert not same_bits(model.layers[0](o), before)
    assert same_bits(model.layers[0].wo_a.weight.clone(), new)
