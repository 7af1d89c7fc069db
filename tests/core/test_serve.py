"""``grouped_projection`` at every row count, layout and phase, on a tag and on the plain weight."""

from __future__ import annotations

import pytest
import torch
from core.models import Attention, activations, exact_weight, reclaimed, same_bits

import memreclaim as mr
from memreclaim import counters

pytestmark = pytest.mark.cpu

ROWS = (0, 1, 2, 8, 9, 16, 17, 32, 33, 64, 65, 128, 129, 192, 193, 300)
WEIGHT = exact_weight()


@pytest.mark.parametrize("phase", ["decode", "verify", "draft", "prefill"])
@pytest.mark.parametrize("rows", ROWS)
def test_every_row_count_has_the_stock_bits(rows: int, phase: str, device: torch.device) -> None:
    """Case 12: a tag's projection has the stock path's bits at every row count and phase, and is new and contiguous."""
    layer = reclaimed(WEIGHT.to(device))
    o = activations(rows).to(device)
    expected = Attention(WEIGHT.to(device))(o)
    out = mr.grouped_projection(o, layer.wo_a.weight, phase=phase)
    assert same_bits(out, expected)
    assert out.is_contiguous()
    assert same_bits(mr.grouped_projection(o, WEIGHT.to(device), phase=phase), expected)


@pytest.mark.parametrize("rows", [0, 1, 5, 20])
@pytest.mark.parametrize("extra", [0, 8, 96])
def test_row_strides(rows: int, extra: int) -> None:
    """Case 12: rows further apart than ``G*D``, as a slice of a wider buffer has them."""
    wide = torch.randn((rows, 2 * 96 + extra), generator=torch.Generator().manual_seed(0)).to(torch.bfloat16)
    o = wide[:, : 2 * 96].view(rows, 2, 96) if extra == 0 else wide.as_strided((rows, 2, 96), (2 * 96 + extra, 96, 1))
    assert same_bits(mr.grouped_projection(o, reclaimed(WEIGHT).wo_a.weight), Attention(WEIGHT)(o.clone()))


@pytest.mark.parametrize(
    ("groups", "rank", "depth"), [(1, 32, 32), (3, 96, 64), (2, 256, 32), (8, 32, 160), (4, 64, 512)]
)
def test_other_ranks_and_depths(groups: int, rank: int, depth: int) -> None:
    """Case 13: any multiples of 32 are served."""
    weight, o = exact_weight(groups, rank, depth), activations(3, groups, depth)
    assert same_bits(mr.grouped_projection(o, reclaimed(weight, groups).wo_a.weight), Attention(weight, groups)(o))


def test_a_part_of_a_tag_is_projected_exactly() -> None:
    """Case 14: one group of a tag, sliced, is a plain read and not the whole twin."""
    tag, o = reclaimed(WEIGHT).wo_a.weight, activations(3)
    out = mr.grouped_projection(o[:, 1:], tag.view(2, 64, 96)[1:])
    assert same_bits(out, Attention(WEIGHT)(o)[:, 1:].contiguous())


def test_calls_are_counted_by_path_and_phase() -> None:
    """Case 12: falling to dequantisation moves a counter."""
    before = counters.calls.snapshot()
    mr.grouped_projection(activations(16), reclaimed(WEIGHT).wo_a.weight, phase="verify")
    mr.grouped_projection(activations(16), WEIGHT, phase="verify")
    after = counters.calls.snapshot()
    moved = {key: after[key] - before.get(key, 0) for key in after if after[key] != before.get(key, 0)}
    assert moved == {("dequant", "verify"): 1, ("stock", "verify"): 1}


@pytest.mark.parametrize("phase", ["", "DECODE", "train"])
def test_unknown_phases_are_refused(phase: str) -> None:
    """A phase that does not exist is the caller's error."""
    with pytest.raises(ValueError, match="is not a valid Phase"):
        mr.grouped_projection(activations(1), WEIGHT, phase=phase)


@pytest.mark.parametrize(
    "o",
    [
        torch.zeros((3, 4, 96), dtype=torch.bfloat16),
        torch.zeros((3, 2, 64), dtype=torch.bfloat16),
        torch.zeros((3, 2, 96)),
    ],
)
def test_activations_that_do_not_fit(o: torch.Tensor) -> None:
    """Wrong groups, depth or dtype raise and serve nothing."""
    with pytest.raises(ValueError, match="activations must be"):
        mr.grouped_projection(o, reclaimed(WEIGHT).wo_a.weight)


def test_a_raw_numerics_word_goes_with_the_tag() -> None:
    """``fused`` numerics stay within bf16 rounding of the stock path and leave the einsum of the model alone."""
    layer = reclaimed(WEIGHT)
    layer.wo_a.weight.memreclaim_backing.numerics = "fused"
    o = activations(7)
    assert same_bits(layer(o), Attention(WEIGHT)(o))
    assert torch.allclose(
        mr.grouped_projection(o, layer.wo_a.weight).float(), Attention(WEIGHT)(o).float(), rtol=2e-2, atol=1e-2
    )
