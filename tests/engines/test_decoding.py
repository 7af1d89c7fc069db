"""The decoder: causal attention, paged cache, speculation, and the same bits for the same requests."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
import torch
from engine_runs import bits, serve, tokens

from memreclaim.engines import reference as ref
from memreclaim.engines.reference.attention import attend
from memreclaim.engines.reference.layers import Rotary
from memreclaim.engines.reference.speculation import accepted
from memreclaim.states import Phase

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = pytest.mark.cpu

PROMPTS = ref.burst(ref.ModelConfig.tiny(), 6, seed=3, length=9)
NEW_TOKENS = 24
TIE = 0.05
"""Two scores closer than this may change places when a row is computed in another batch; they spread over about 12."""


class ContiguousCache:
    """Every request's latents in one tensor: what a paged cache must equal."""

    def __init__(self) -> None:
        """Start empty."""
        self.rows: dict[tuple[int, int], torch.Tensor] = {}

    def read(self, layer: int, table: ref.PageTable, n_tokens: int) -> torch.Tensor:
        """First ``n_tokens`` rows."""
        return self.rows.get((layer, id(table)), torch.empty((0, 64), dtype=torch.bfloat16))[:n_tokens]

    def write(self, layer: int, table: ref.PageTable, start: int, latents: torch.Tensor) -> None:
        """Cut at ``start`` and append."""
        self.rows[layer, id(table)] = torch.cat((self.read(layer, table, start), latents))


def table(pool: ref.PagedPool, n_tokens: int) -> ref.PageTable:
    """Pages that must be there."""
    found = pool.allocate(n_tokens)
    assert found is not None
    return found


def ids(*values: int) -> torch.Tensor:
    """Token ids."""
    return torch.tensor(values)


def test_attention_equals_a_plain_loop() -> None:
    """Each row attends to the tokens up to its own position, the latent being key and value."""
    random = torch.Generator().manual_seed(0)
    queries = torch.randn(3, 2, 64, generator=random).bfloat16()
    latents = torch.randn(7, 64, generator=random).bfloat16()
    expected = torch.empty(3, 2, 64)
    for row in range(3):
        seen = latents[: 5 + row].float()
        for head in range(2):
            expected[row, head] = (seen @ queries[row, head].float() / 8).softmax(0) @ seen
    torch.testing.assert_close(attend(queries, latents).float(), expected, atol=0.03, rtol=0.03)


def test_rotation_depends_on_distance_only() -> None:
    """Scores of a rotated query and key stay when both move on, and the inverse takes the rotation off."""
    random = torch.Generator().manual_seed(0)
    query, key = torch.randn(2, 1, 64, generator=random)

    def score(position: int) -> torch.Tensor:
        return (Rotary(16, 10000.0, ids(position + 5))(query) * Rotary(16, 10000.0, ids(position))(key)).sum()

    torch.testing.assert_close(score(0), score(1000), atol=1e-3, rtol=1e-3)
    assert abs(score(0) - (query * key).sum()) > 0.1
    rotary = Rotary(16, 10000.0, ids(77))
    torch.testing.assert_close(rotary(rotary(query), inverse=True), query, atol=1e-5, rtol=1e-5)


def test_paged_cache_equals_contiguous_cache(model: ref.ReferenceModel, pool: ref.PagedPool) -> None:
    """Prefill, decode and verify give the same bits from scattered pages and from one tensor per request."""
    holes = [table(pool, 16) for _ in range(12)]
    for hole in holes[::2]:
        pool.free(hole)
    first, second = table(pool, 150), table(pool, 150)
    assert len(first.runs) > 1
    calls = [
        (Phase.PREFILL, ids(*range(1, 101)), (ref.Segment(first, 0, 40), ref.Segment(second, 0, 60))),
        (Phase.DECODE, ids(5, 6), (ref.Segment(first, 40, 1), ref.Segment(second, 60, 1))),
        (Phase.VERIFY, ids(7, 8, 9, 10, 11), (ref.Segment(second, 61, 5),)),
        (Phase.VERIFY, ids(12, 13, 14), (ref.Segment(second, 63, 3),)),
        (Phase.DECODE, ids(3), (ref.Segment(second, 66, 1),)),
    ]
    contiguous = ContiguousCache()
    for phase, new, segments in calls:
        batch = ref.Batch(phase, new, segments)
        paged, plain = model(batch, pool), model(batch, contiguous)
        assert torch.equal(plain.view(torch.int16), paged.view(torch.int16))
        last = plain[batch.last_rows]
        drafts = ref.Batch(
            Phase.DRAFT,
            ids(4, 5).repeat(len(segments)),
            tuple(ref.Segment(segment.table, segment.start + segment.rows, 2) for segment in segments),
        )
        assert torch.equal(model.draft(drafts, last, contiguous), model.draft(drafts, last, pool))


def test_attention_knows_distances_not_positions(model: ref.ReferenceModel, pool: ref.PagedPool) -> None:
    """The same tokens at later positions give the same output: the values carry no rotation out of the layer."""
    x = torch.randn(6, 64, generator=torch.Generator().manual_seed(0)).bfloat16()
    pages = table(pool, 6)
    near, far = (
        model.layers[0]
        .attn(
            x,
            ref.Batch(Phase.PREFILL, torch.zeros(6, dtype=torch.long), (ref.Segment(pages, start, 6),)),
            ContiguousCache(),
            0,
        )
        .float()
        for start in (0, 1000)
    )
    assert (near - far).norm() < 0.05 * near.norm()
    shuffled = model.layers[0].attn(
        x[[1, 0, 2, 3, 4, 5]],
        ref.Batch(Phase.PREFILL, torch.zeros(6, dtype=torch.long), (ref.Segment(pages, 0, 6),)),
        ContiguousCache(),
        0,
    )
    assert (near[5] - shuffled[5]).norm() > 0.05 * near[5].norm()


def test_later_tokens_change_no_earlier_state(model: ref.ReferenceModel, pool: ref.PagedPool) -> None:
    """Attention is causal: another fifth token leaves the first four states alone and changes the fifth."""
    states = [
        model(ref.Batch(Phase.PREFILL, ids(1, 2, 3, 4, last), (ref.Segment(table(pool, 5), 0, 5),)), pool)
        for last in (5, 6)
    ]
    assert torch.equal(states[0][:4], states[1][:4])
    assert not torch.equal(states[0][4], states[1][4])


def test_earlier_tokens_change_later_states(model: ref.ReferenceModel, pool: ref.PagedPool) -> None:
    """The answer depends on the whole prompt, so that wrong bits anywhere would be seen in it."""
    states = [
        model(ref.Batch(Phase.PREFILL, ids(first, 2, 3, 4), (ref.Segment(table(pool, 4), 0, 4),)), pool)
        for first in (1, 9)
    ]
    assert not torch.equal(states[0][3], states[1][3])


def test_every_layer_takes_part(model: ref.ReferenceModel, pool: ref.PagedPool) -> None:
    """One element of a target layer's ``wo_a`` changes all scores, one of the draft's only those of its proposals."""

    def outcome() -> tuple[torch.Tensor, torch.Tensor]:
        pages = table(pool, 8)
        hidden = model(ref.Batch(Phase.PREFILL, ids(1, 2, 3), (ref.Segment(pages, 0, 3),)), pool)
        drafts = ref.Batch(Phase.DRAFT, ids(4, 5), (ref.Segment(pages, 3, 2),))
        return model.logits(hidden), model.draft(drafts, hidden[-1:], pool)

    scores, drafted = outcome()
    for block, is_draft in [(model.layers[0], False), (model.layers[1], False), (model.mtp[0], True)]:
        before = block.attn.wo_a.weight.data[5, 7].clone()
        block.attn.wo_a.weight.data[5, 7] += 1000.0
        changed_scores, changed_drafted = outcome()
        assert torch.equal(scores, changed_scores) == is_draft
        assert not torch.equal(drafted, changed_drafted)
        block.attn.wo_a.weight.data[5, 7] = before


@pytest.mark.parametrize(
    ("proposed", "chosen", "count"),
    [((1, 2), (1, 2, 3), 3), ((1, 2), (1, 9, 3), 2), ((1, 2), (9, 2, 3), 1), ((), (4,), 1)],
)
def test_accepts_up_to_the_first_difference(proposed: tuple[int, ...], chosen: tuple[int, ...], count: int) -> None:
    """All proposals that the target chose too, and the target's next token; nothing after a difference."""
    assert accepted(proposed, chosen) == count


def test_guesses_are_a_chain(model: ref.ReferenceModel) -> None:
    """Each guess follows from the one before it alone, starting from the given tokens."""
    chain = model.guess(ids(3, 50), 4)
    assert chain[:, 0].tolist() == [3, 50]
    for column in range(3):
        assert torch.equal(chain[:, column + 1], model.guess(chain[:, column], 2)[:, 1])


@pytest.mark.parametrize("drafts", [1, 4, 7])
def test_speculative_answers_are_the_greedy_ones(model: ref.ReferenceModel, pool: ref.PagedPool, drafts: int) -> None:
    """Drafting and verification choose the tokens of plain greedy decoding, in fewer calls.

    Rows are computed in other batches, where another library may round sums in another way: a difference is allowed
    only where the two best scores are closer than that.
    """
    plain = serve(model, pool, PROMPTS, NEW_TOKENS)
    drafted = serve(model, pool, PROMPTS, NEW_TOKENS, drafts)
    for one, other in zip(plain, drafted, strict=True):
        assert len(other.tokens) == NEW_TOKENS
        same = next((i for i in range(NEW_TOKENS) if one.tokens[i] != other.tokens[i]), NEW_TOKENS)
        if same < NEW_TOKENS:
            best = one.logits[same].topk(2).values
            assert best[0] - best[1] < TIE
        torch.testing.assert_close(torch.stack(one.logits[:same]), torch.stack(other.logits[:same]), atol=TIE, rtol=0)


def test_drafts_are_often_right(model: ref.ReferenceModel, pool: ref.PagedPool) -> None:
    """Proposals are neither always nor never accepted, so that both ways through a verification are exercised."""
    server = ref.Server(model, pool, draft_tokens=4)
    for prompt in PROMPTS:
        server.submit(prompt, NEW_TOKENS)
    server.run()
    rows = sum(rows * calls for rows, calls in server.rows[Phase.VERIFY].items())
    rounds = rows / 5
    new_tokens = len(PROMPTS) * (NEW_TOKENS - 1)
    assert 1.5 * rounds < new_tokens < 4.5 * rounds


@pytest.mark.parametrize("drafts", [0, 4])
def test_same_requests_give_the_same_bits(model: ref.ReferenceModel, pool: ref.PagedPool, drafts: int) -> None:
    """Two runs of the same batch agree in every bit of every score."""
    first = serve(model, pool, PROMPTS, 8, drafts)
    assert bits(first) == bits(serve(model, pool, PROMPTS, 8, drafts))
    assert len({tuple(answer) for answer in tokens(first)}) == len(PROMPTS)


def test_model_loaded_twice_gives_the_same_bits(
    model: ref.ReferenceModel, config: ref.ModelConfig, checkpoint: Path
) -> None:
    """Nothing of an answer depends on uninitialised memory or on the pool's history."""
    first = serve(model, ref.PagedPool(config, capacity_tokens=256), PROMPTS, 8, 4)
    used = ref.PagedPool(config, capacity_tokens=512)
    other = ref.load_model(checkpoint)
    serve(other, used, ref.burst(config, 4, seed=9), 8, 4)
    assert bits(first) == bits(serve(other, used, PROMPTS, 8, 4))


def test_pool_that_grows_in_flight_changes_no_bit(model: ref.ReferenceModel, config: ref.ModelConfig) -> None:
    """Growing after every step, with requests in flight, leaves all scores as they are."""
    expected = serve(model, ref.PagedPool(config, capacity_tokens=512), PROMPTS, 8, 4)
    pool = ref.PagedPool(config, capacity_tokens=512)
    server = ref.Server(model, pool, draft_tokens=4, max_running=len(PROMPTS))
    requests = [server.submit(prompt, 8) for prompt in PROMPTS]
    grown = 0
    while server.step():
        grown += pool.grow(int(40 * pool.bytes_per_token))
    assert bits(expected) == bits(requests)
    assert grown > 0
    assert pool.capacity_tokens == 512 + grown
