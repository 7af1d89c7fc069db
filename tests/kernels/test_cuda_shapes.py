"""Block shapes that the CUDA kernels choose, and what they refuse, without a GPU."""

from __future__ import annotations

import itertools

import pytest

from memreclaim_kernels.blocks import WeightShape
from memreclaim_kernels.cuda import _launch, family_of, prepare
from memreclaim_kernels.cuda._check import shape_refusal
from memreclaim_kernels.cuda._large import tile_for
from memreclaim_kernels.cuda._mid import ring_for

pytestmark = pytest.mark.cpu

SHARED_LIMIT = 227 * 1024
SHAPES = [
    WeightShape(groups, rank, depth)
    for groups, rank, depth in itertools.product((1, 2, 4, 8, 16), (512, 1024), (1024, 2048, 4096))
]
ROWS = (1, 8, 9, 33, 64, 65, 128, 129, 192, 193, 256, 512, 513, 1024, 4096, 65536)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("splits", [1, 2, 3])
def test_ring_divides_its_work_and_fits(shape: WeightShape, splits: int) -> None:
    """A ring's stages divide K, its tokens cover the rows in one wave, and it fits shared memory."""
    for rows in ROWS:
        ring = ring_for(rows, shape, splits)
        if ring is None:
            continue
        blocks = shape.groups * (shape.rank // ring.rows) * -(-rows // ring.tokens)
        assert shape.depth // ring.bk % ring.stages == 0
        assert ring.stages >= 3
        assert blocks <= 132
        assert ring.shared_bytes() <= SHARED_LIMIT
        assert ring.decoders % (ring.bk // 32) == 0
        assert splits == 1 or ring.bk == 128


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_tile_divides_its_work_and_fits(shape: WeightShape) -> None:
    """A tile's stages divide K, its rows divide the rank, and it fits shared memory at every row count."""
    for rows in ROWS:
        tile = tile_for(rows, shape)
        assert shape.depth // tile.bk % tile.stages == 0
        assert shape.rank % (tile.wg * 64 * tile.ca) == 0
        assert tile.shared_bytes(shape.depth) <= SHARED_LIMIT
        assert tile.cw * tile.ca <= 2


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_mid_is_named_only_where_it_has_a_ring(shape: WeightShape) -> None:
    """``family_of`` never names the mid kernel for a call it has no block shape for."""
    named = {rows for rows in ROWS if family_of(rows, shape) == "mid"}
    assert named <= {rows for rows in ROWS if ring_for(rows, shape) is not None}


@pytest.mark.parametrize(
    ("family", "shape", "splits"),
    [
        ("gemv", WeightShape(2, 1024, 2048), 1),
        ("small", WeightShape(2, 1024, 512), 1),
        ("small", WeightShape(2, 1024, 8192), 1),
        ("small_mxfp8", WeightShape(1, 96, 4096), 1),
        ("mid", WeightShape(2, 1024, 3072), 1),
        ("large", WeightShape(2, 64, 4096), 1),
        ("large", WeightShape(1, 1024, 4096), 5),
        ("prove", WeightShape(1, 32, 96), 1),
        ("encode", WeightShape(1, 33, 64), 1),
    ],
)
def test_refusals_say_why(family: str, shape: WeightShape, splits: int) -> None:
    """A shape that a kernel does not take is refused with a sentence."""
    assert shape_refusal(family, shape, splits)  # type: ignore[arg-type]


@pytest.mark.parametrize("family", ["gemv", "small", "small_mxfp8", "mid", "large", "dequantize", "prove", "encode"])
@pytest.mark.parametrize("groups", [1, 2, 4, 8])
def test_shapes_of_checkpoints_are_taken(family: str, groups: int) -> None:
    """Every kernel takes the weight shapes of DeepSeek-V4.1-Flash at TP1 to TP8."""
    assert None is shape_refusal(family, WeightShape(groups, 1024, 4096))  # type: ignore[arg-type]


@pytest.mark.parametrize("splits", [1, 2, 3, 4])
def test_split_chains_end_at_whole_stages(splits: int) -> None:
    """CuBLAS's splits of 4096 columns (2, 3, 4) are taken by the chain kernels."""
    assert None is shape_refusal("mid", WeightShape(1, 1024, 4096), splits)


def test_prepare_compiles_no_kernel_that_nothing_calls(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each costs a second of every first boot; the quantising one is served by the engine's own second half."""
    compiled: list[tuple[object, ...]] = []
    for name in ("_small_kernel", "_gemv_kernel", "_plain_kernel"):
        monkeypatch.setattr(_launch, name, lambda *args, name=name: compiled.append((name, *args)))
    monkeypatch.setattr(_launch, "device_refusal", lambda *_args, **_kwargs: "no GPU here")

    prepare(0, WeightShape(2, 1024, 4096))

    assert [call for call in compiled if call[0] == "_small_kernel"] == [("_small_kernel", 0, 4096, 0)]
    assert ("_gemv_kernel", 0, 4096) in compiled
