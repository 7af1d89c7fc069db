"""Continuous batching: admission, order, safe points, threads, and what happens when something goes wrong."""

from __future__ import annotations

import itertools
import threading
import time

import pytest
import torch
from engine_runs import WAIT, serve, tokens

from memreclaim.engines import reference as ref
from memreclaim.engines.reference.gate import Gate
from memreclaim.errors import ConfigError, EngineError, PoolError
from memreclaim.states import Phase

pytestmark = pytest.mark.cpu

CONFIG = ref.ModelConfig.tiny()
PROMPTS = ref.burst(CONFIG, 6, seed=1, length=8)


def small_pool(tokens: int) -> ref.PagedPool:
    """Pages of 16 tokens."""
    return ref.PagedPool(CONFIG, capacity_tokens=tokens)


def test_requests_wait_for_pages_and_a_grown_pool_serves_more(model: ref.ReferenceModel) -> None:
    """Two requests of 32 tokens fit into 64; four more wait, and are in flight as soon as the pool has grown."""
    pool = small_pool(64)
    server = ref.Server(model, pool)
    requests = [server.submit(prompt, 24) for prompt in PROMPTS]
    server.step()
    assert (server.running, server.waiting) == (2, 4)
    assert pool.grow(int(128 * pool.bytes_per_token)) == 128
    server.step()
    assert (server.running, server.waiting) == (6, 0)
    server.run()
    assert [len(request.result(0)) for request in requests] == [24] * 6
    assert pool.used_tokens == 0
    pool.check_integrity()


def test_waiting_requests_come_in_order(model: ref.ReferenceModel) -> None:
    """A small request does not overtake a larger one that waits in front of it."""
    server = ref.Server(model, small_pool(64))
    first, large, small = server.submit(PROMPTS[0], 24), server.submit(PROMPTS[1], 50), server.submit(PROMPTS[2], 2)
    server.step()
    assert (server.running, server.waiting) == (1, 2)
    while not first.done:
        assert not small.tokens
        server.step()
    server.run()
    assert (len(large.tokens), len(small.tokens)) == (50, 2)


def test_answers_do_not_depend_on_waiting(model: ref.ReferenceModel, pool: ref.PagedPool) -> None:
    """Requests served two at a time give the tokens that they give alone."""
    alone = [serve(model, pool, [prompt], 6)[0] for prompt in PROMPTS]
    server = ref.Server(model, pool, max_running=2)
    queued = [server.submit(prompt, 6) for prompt in PROMPTS]
    server.run()
    assert tokens(alone) == tokens(queued)
    assert set(server.rows[Phase.DECODE]) == {2}


def test_long_prompts_are_read_in_pieces_of_a_batch(model: ref.ReferenceModel, pool: ref.PagedPool) -> None:
    """Prompts share a prefill step up to 512 rows; a longer one goes alone."""
    server = ref.Server(model, pool)
    for length in (200, 200, 200, 1):
        server.submit([1] * length, 1)
    server.run()
    assert server.rows[Phase.PREFILL] == {400: 1, 201: 1}
    server.submit([1] * 600, 1)
    server.run()
    assert server.rows[Phase.PREFILL][600] == 1


def test_last_round_of_drafts_is_cut(model: ref.ReferenceModel, pool: ref.PagedPool) -> None:
    """A request never gets more tokens than it asked for, and its pages have room for rejected drafts."""
    (request,) = serve(model, pool, [[1] * 7], 2, drafts=7)
    assert len(request.tokens) == len(request.logits) == 2


@pytest.mark.parametrize(("prompt", "count"), [([], 1), ([1], 0), ([128], 1), ([-1], 1)])
def test_senseless_requests_are_refused(
    model: ref.ReferenceModel, pool: ref.PagedPool, prompt: list[int], count: int
) -> None:
    """An empty prompt, no new tokens, and tokens that are not in the vocabulary."""
    with pytest.raises(ValueError, match=r"0\.\.127"):
        ref.Server(model, pool).submit(prompt, count)


def test_request_larger_than_the_pool_is_refused(model: ref.ReferenceModel) -> None:
    """It would wait for ever."""
    with pytest.raises(PoolError, match="65 tokens never fits into 64"):
        ref.Server(model, small_pool(64)).submit([1] * 8, 57)


def test_request_that_no_longer_fits_a_shrunk_pool_fails(model: ref.ReferenceModel) -> None:
    """A request that waits while the pool shrinks below it is told so, and the next one is served."""
    pool = small_pool(64)
    pool.grow(int(64 * pool.bytes_per_token))
    server = ref.Server(model, pool)
    large, small = server.submit([1] * 8, 100), server.submit([2] * 8, 2)
    pool.shrink(int(64 * pool.bytes_per_token))
    server.run()
    with pytest.raises(EngineError, match="shrank"):
        large.result(0)
    assert len(small.result(0)) == 2


@pytest.mark.parametrize("bad", [{"draft_tokens": -1}, {"max_running": 0}])
def test_senseless_servers_are_refused(model: ref.ReferenceModel, pool: ref.PagedPool, bad: dict[str, int]) -> None:
    """Counts below their least value name the setting."""
    with pytest.raises(ConfigError, match=next(iter(bad))):
        ref.Server(model, pool, **bad)


def test_pages_that_another_server_holds_are_named_as_the_cause(model: ref.ReferenceModel) -> None:
    """Two servers on one pool: the one that cannot go on says why and does not hang."""
    pool = small_pool(64)
    holder, other = ref.Server(model, pool), ref.Server(model, pool)
    holder.submit([1] * 8, 50)
    holder.step()
    request = other.submit([1] * 8, 50)
    with pytest.raises(PoolError, match="another server"):
        other.run()
    holder.cancel_all()
    other.run()
    assert len(request.result(0)) == 50


def test_cancelling_gives_pages_back(model: ref.ReferenceModel, pool: ref.PagedPool) -> None:
    """Requests in flight and waiting end with an error, and their pages are free."""
    server = ref.Server(model, pool, max_running=2)
    requests = [server.submit(prompt, 24) for prompt in PROMPTS]
    server.step()
    server.cancel_all()
    for request in requests:
        with pytest.raises(EngineError, match="cancelled"):
            request.result(0)
    assert (server.running, server.waiting, pool.used_tokens) == (0, 0, 0)
    assert not server.step()


def test_result_times_out(model: ref.ReferenceModel, pool: ref.PagedPool) -> None:
    """Waiting for a request that nobody serves ends with the count of its tokens."""
    request = ref.Server(model, pool).submit([1], 2)
    with pytest.raises(TimeoutError, match="0 of 2 tokens"):
        request.result(timeout=0.01)


def test_step_that_fails_can_be_tried_again(
    model: ref.ReferenceModel, pool: ref.PagedPool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A forward that raises once, in each phase, loses no request and changes no token."""
    expected = tokens(serve(model, pool, PROMPTS, 6, drafts=4))
    real, failed = ref.ReferenceModel.forward, set()

    def forward(self: ref.ReferenceModel, batch: ref.Batch, cache: ref.PagedPool) -> torch.Tensor:
        hidden = real(self, batch, cache)
        if batch.phase not in failed:
            failed.add(batch.phase)
            raise torch.OutOfMemoryError
        return hidden

    monkeypatch.setattr(ref.ReferenceModel, "forward", forward)
    server = ref.Server(model, pool, draft_tokens=4, max_running=len(PROMPTS))
    requests = [server.submit(prompt, 6) for prompt in PROMPTS]
    for _ in range(2):
        with pytest.raises(torch.OutOfMemoryError):
            server.run()
    server.run()
    assert failed == {Phase.PREFILL, Phase.VERIFY}
    assert tokens(requests) == expected


def test_thread_serves_what_many_threads_submit(model: ref.ReferenceModel, pool: ref.PagedPool) -> None:
    """Six threads submit to a server with a thread of its own; each gets its own answer."""
    expected = [serve(model, pool, [prompt], 6)[0].tokens for prompt in PROMPTS]
    answers: dict[int, tuple[int, ...]] = {}
    server = ref.Server(model, pool)

    def ask(index: int) -> None:
        answers[index] = server.submit(PROMPTS[index], 6).result(WAIT)

    with server:
        threads = [threading.Thread(target=ask, args=(index,)) for index in range(len(PROMPTS))]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(WAIT)
    assert [list(answers[index]) for index in range(len(PROMPTS))] == expected
    assert pool.used_tokens == 0


def test_idle_thread_wakes_when_the_pool_grows(model: ref.ReferenceModel) -> None:
    """A request that waits for pages is served once the pool has grown, although nobody steps or submits."""
    pool = small_pool(32)
    held = pool.allocate(32)
    assert held is not None
    with ref.Server(model, pool) as server:
        request = server.submit([1] * 8, 4)
        while not pool.changed._waiters:
            time.sleep(0.001)
        pool.grow(int(32 * pool.bytes_per_token))
        assert len(request.result(WAIT)) == 4


def test_closing_ends_requests_that_wait(model: ref.ReferenceModel) -> None:
    """Requests in flight are finished, those that wait for pages get an error."""
    pool = small_pool(32)
    held = pool.allocate(32)
    assert held is not None
    with ref.Server(model, pool) as server:
        request = server.submit([1] * 8, 4)
    with pytest.raises(EngineError, match="closed"):
        request.result(0)


def test_second_thread_is_refused(model: ref.ReferenceModel, pool: ref.PagedPool) -> None:
    """A server has at most one thread of its own, and may start another after the first ended."""
    server = ref.Server(model, pool)
    with server, pytest.raises(EngineError, match="thread already"):
        server.__enter__()
    with server:
        assert len(server.submit([1], 2).result(WAIT)) == 2


def test_failing_thread_fails_its_requests(
    model: ref.ReferenceModel, pool: ref.PagedPool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """When a step raises in the server's thread, whoever waits gets the cause instead of waiting for ever."""

    def broken(*_: object) -> torch.Tensor:
        message = "the device fell off the bus"
        raise RuntimeError(message)

    monkeypatch.setattr(ref.ReferenceModel, "forward", broken)
    with ref.Server(model, pool) as server:
        request = server.submit([1], 2)
        with pytest.raises(EngineError, match="fell off the bus"):
            request.result(WAIT)
    assert pool.used_tokens == 0


def test_safe_point_excludes_steps(model: ref.ReferenceModel, pool: ref.PagedPool) -> None:
    """While a safe point is held no step runs; requests in flight stay in flight and go on afterwards."""
    with ref.Server(model, pool) as server:
        requests = [server.submit(prompt, 40) for prompt in PROMPTS]
        for _ in range(5):
            with server.safe_point():
                seen = [len(request.tokens) for request in requests]
                time.sleep(0.005)
                assert [len(request.tokens) for request in requests] == seen
        assert [len(request.result(WAIT)) for request in requests] == [40] * 6


def test_safe_point_inside_itself_is_refused(model: ref.ReferenceModel, pool: ref.PagedPool) -> None:
    """A thread that is inside would wait for itself, so it gets an error; the server still works."""
    server = ref.Server(model, pool)
    request = server.submit([1], 2)
    with server.safe_point():
        with pytest.raises(EngineError, match="inside"), server.safe_point():
            pass
        with pytest.raises(EngineError, match="inside"):
            server.step()
    server.run()
    assert len(request.result(0)) == 2


def test_turns_come_in_order_of_arrival() -> None:
    """Neither of two threads that come back without a pause keeps the other out: they alternate."""
    gate, start, order = Gate(), threading.Barrier(2), []

    def come_back(name: str) -> None:
        start.wait(WAIT)
        for _ in range(50):
            with gate.turn():
                order.append(name)
                # Both are in the queue before the first turn ends, from then on each waits behind the other.
                while len(order) == 1 and len(gate._queue) < 2:
                    time.sleep(0.001)

    threads = [threading.Thread(target=come_back, args=(name,)) for name in "ab"]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(WAIT)
        assert not thread.is_alive()
    assert sorted(order) == ["a"] * 50 + ["b"] * 50
    longest = max(len(list(turns)) for _, turns in itertools.groupby(order[:50]))
    assert longest < 10


def test_interrupted_wait_leaves_the_queue() -> None:
    """An exception while a thread waits for its turn does not block those behind it."""
    gate = Gate()
    with gate.turn():
        thread = threading.Thread(target=interrupted, args=(gate,))
        thread.start()
        thread.join(WAIT)
    with gate.turn():
        assert len(gate._queue) == 1


def interrupted(gate: Gate) -> None:
    """Wait for a turn and be interrupted as by Ctrl-C."""

    def wait_for(_predicate: object) -> None:
        raise KeyboardInterrupt

    gate._changed.wait_for = wait_for  # type: ignore[method-assign]
    with pytest.raises(KeyboardInterrupt), gate.turn():
        pass
    del gate._changed.wait_for
