"""Cases, inputs, references and bitwise comparison, for the tests, the benches and the check on the device.

``enumerate_*`` says which cases there are, ``generate_*`` makes the tensors of one. Everything is made from a seed on
the device it is for, so a failure can be repeated from its name.
"""

from __future__ import annotations

from itertools import product
from typing import TYPE_CHECKING, Final, NamedTuple

import torch

from memreclaim_kernels import blocks
from memreclaim_kernels.blocks import WeightShape

if TYPE_CHECKING:
    from collections.abc import Iterator

CHECKPOINT_EXPONENTS: Final = (115, 126)
"""Range of every exponent byte in 1,552 ``wo_a`` scale tensors of real V4-Flash shards."""
SAFE_EXPONENTS: Final = 247
"""Exponents at which 448 does not overflow: 0..246. An infinity times a one-hot zero would be NaN."""
KINDS: Final = ("normal", "tiny", "huge", "overflow", "cancelling", "zeros", "weak", "faint", "exact")
"""Kinds of input; see :func:`generate_case`."""


class Case(NamedTuple):
    """Operands of one projection."""

    o: torch.Tensor
    """bf16 ``[T, G, D]``, last stride 1."""
    codes: torch.Tensor
    exponents: torch.Tensor


class Stride(NamedTuple):
    """Layout of activations: extra elements between rows and between groups; a shared group has stride 0."""

    row_pad: int = 0
    group_pad: int = 0
    shared_group: bool = False


def enumerate_rows() -> Iterator[int]:
    """Row counts at the edges of every bucket: families change at 1, 8 and 192, tiles at powers of two."""
    yield from (1, 2, 3, 8, 9, 16, 17, 32, 33, 64, 65, 128, 129, 192, 193, 4096)


def enumerate_shapes() -> Iterator[WeightShape]:
    """Weight shapes of a rank: TP4, padded TP3, TP8 and TP1 of DeepSeek-V4.1-Flash."""
    for groups in (2, 4, 1, 8):
        yield WeightShape(groups, 1024, 4096)


def enumerate_small_shapes() -> Iterator[WeightShape]:
    """Weight shapes an interpreter can run: one block, several groups, and a depth that no tile divides."""
    yield WeightShape(1, 32, 32)
    yield WeightShape(2, 32, 256)
    yield WeightShape(1, 96, 288)


def enumerate_strides() -> Iterator[Stride]:
    """Contiguous, a padded row (odd, so that nothing is aligned), padded groups, and one group for all."""
    yield from (Stride(), Stride(row_pad=8), Stride(row_pad=3), Stride(group_pad=5), Stride(shared_group=True))


def enumerate_codes() -> Iterator[tuple[int, int]]:
    """Every pair of e4m3 byte and finite exponent byte."""
    yield from product(range(256), range(blocks.MAX_EXPONENT + 1))


def generate_twin(
    shape: WeightShape,
    *,
    exponents: tuple[int, int] = CHECKPOINT_EXPONENTS,
    seed: int = 0,
    device: torch.device | str = "cpu",
) -> tuple[torch.Tensor, torch.Tensor]:
    """Random codes without NaN, as a checkpoint has them, and exponents from an inclusive range.

    Returns uint8 ``[G, R/16, D/32, 512]`` and uint8 ``[G, R/32, D/32]``.
    """
    generator = torch.Generator(device).manual_seed(seed)
    groups, rank, depth = shape
    packed = (groups, rank // blocks.TILE_ROWS, depth // blocks.TILE_COLS, blocks.TILE_BYTES)
    codes = torch.randint(0, 256, packed, generator=generator, device=device, dtype=torch.uint8)
    codes.masked_fill_((codes & 0x7F) == 0x7F, 0x3A)  # noqa: PLR2004  a NaN code becomes 1.25
    low, high = exponents
    grid = (groups, rank // blocks.BLOCK, depth // blocks.BLOCK)
    return codes, torch.randint(low, high + 1, grid, generator=generator, device=device, dtype=torch.uint8)


def generate_activations(
    rows: int,
    shape: WeightShape,
    *,
    scale: float = 1.0,
    stride: Stride | None = None,
    seed: int = 0,
    device: torch.device | str = "cpu",
) -> torch.Tensor:
    """Normally distributed bf16 ``[T, G, D]`` of standard deviation ``scale``, in the given layout."""
    generator = torch.Generator(device).manual_seed(seed + 1)
    groups = 1 if stride is not None and stride.shared_group else shape.groups
    values = torch.randn((rows, groups, shape.depth), generator=generator, device=device).mul_(scale).bfloat16()
    return lay_out(values.expand(rows, shape.groups, shape.depth), stride or Stride())


def lay_out(values: torch.Tensor, stride: Stride) -> torch.Tensor:
    """``values [T, G, D]`` in another memory layout, surrounded by NaN that shows when a kernel reads too much."""
    if stride.shared_group:
        return values[:, :1].expand(values.shape)
    if stride == Stride():
        return values.contiguous()
    rows, groups, depth = values.shape
    group_stride = depth + stride.group_pad
    row_stride = groups * group_stride + stride.row_pad
    memory = torch.full((max(rows, 1) * row_stride,), float("nan"), dtype=values.dtype, device=values.device)
    return memory.as_strided(values.shape, (row_stride, group_stride, 1)).copy_(values)


def generate_case(
    kind: str,
    rows: int,
    shape: WeightShape,
    *,
    stride: Stride | None = None,
    seed: int = 0,
    device: torch.device | str = "cpu",
) -> Case:
    """Operands of one kind.

    ``normal``, ``tiny``, ``huge``, ``overflow``: random, activations around 1, 2**-60 and 2**60, and so large that some
    outputs are infinite; ``cancelling``: neighbouring columns cancel but for their last bits, so that every lost bit of
    an intermediate sum shows; ``zeros``: half of the activations and codes are zeros of both signs, a fifth of the rows
    wholly; ``weak`` and ``faint``: weights, or activations, that are bf16 subnormals; ``exact``: small integers and
    eighths, whose sums fp32 holds exactly in any order. Raises ``ValueError`` for any other word.
    """
    codes, exponents = generate_kind_twin(kind, shape, seed=seed, device=device)
    scale = {"tiny": 2.0**-60, "huge": 2.0**60, "faint": 2.0**-130}.get(kind, 1.0)
    if kind == "overflow":
        # Random codes have a root mean square of 103, so outputs have one of 2**127.
        scales = torch.exp2(exponents.double() - blocks.EXPONENT_BIAS)
        scale = 2.0**127 / (103 * float(scales.square().mean().sqrt()) * shape.depth**0.5)
    o = generate_activations(rows, shape, scale=scale, stride=stride, seed=seed, device=device)
    if kind == "cancelling":
        pairs = o.clone()
        pairs[..., 1::2] = -(pairs[..., 0::2].float() * (1 + 2.0**-7)).bfloat16()
        o = lay_out(pairs, stride or Stride())
    elif kind == "zeros":
        sparse = o.clone()
        sparse[..., ::2] = 0.0
        sparse[..., ::4] = -0.0
        sparse[4::5] = -0.0
        o = lay_out(sparse, stride or Stride())
    elif kind == "exact":
        o = lay_out(o.clone().mul_(2).round_().clamp_(-4, 4), stride or Stride())
    return Case(o, codes, exponents)


def generate_kind_twin(
    kind: str, shape: WeightShape, *, seed: int = 0, device: torch.device | str = "cpu"
) -> tuple[torch.Tensor, torch.Tensor]:
    """The twin of :func:`generate_case`."""
    if kind not in KINDS:
        message = f"{kind!r} is no kind of input; there are {', '.join(KINDS)}"
        raise ValueError(message)
    span = {"weak": (0, 12), "exact": (127, 127)}.get(kind, CHECKPOINT_EXPONENTS)
    codes, exponents = generate_twin(shape, exponents=span, seed=seed, device=device)
    if kind == "cancelling":
        # Bytes 0 and 2, 1 and 3 of a word are neighbouring columns of one row: make them equal.
        codes.view(-1, 4)[:, 2:] = codes.view(-1, 4)[:, :2]
    elif kind == "zeros":
        # Byte 0 of a word is an even column of the upper half, byte 3 an odd column of the lower.
        codes.view(-1, 4)[:, ::3] &= 0x80
    elif kind == "exact":
        # Magnitudes 1, 1.125 .. 1.875 and 0.0: a sum is a multiple of 1/8 below 4 * 1.875 * depth < 2**21 for depth <
        # 2**18.
        codes &= 0x87
        codes |= 0x38
    return codes, exponents


def generate_decode_twin(
    shape: WeightShape, *, device: torch.device | str = "cpu"
) -> tuple[torch.Tensor, torch.Tensor, list[int]]:
    """A twin that holds every code but NaN at every exponent that cannot overflow, and the columns that hold them all.

    Column ``c`` of a block has the 32 codes from ``32 * (c % 8)`` on, and the exponents 0..246 are dealt out block
    column by block column: 8 columns of each of the first ``ceil(247 / (G * R/32))`` block columns hold all that there
    is. A one-hot activation makes a projection give one of these columns, decoded, with nothing added.
    """
    groups, rank, depth = shape
    row_blocks = groups * (rank // blocks.BLOCK)
    block_columns = min(-(-SAFE_EXPONENTS // row_blocks), depth // blocks.BLOCK)
    rows = torch.arange(rank, device=device)[:, None] % blocks.BLOCK
    codes = (rows + torch.arange(depth, device=device)[None, :] % 8 * blocks.BLOCK).to(torch.uint8)
    codes.masked_fill_((codes & 0x7F) == 0x7F, 0x7E)  # noqa: PLR2004  NaN codes become 448
    grid = torch.arange(depth // blocks.BLOCK, device=device)[None, :] * row_blocks
    exponents = (torch.arange(row_blocks, device=device)[:, None] + grid) % SAFE_EXPONENTS
    columns = [block * blocks.BLOCK + column for block in range(block_columns) for column in range(8)]
    packed = blocks.pack(codes.expand(groups, rank, depth))
    return packed, exponents.view(groups, rank // blocks.BLOCK, -1).to(torch.uint8), columns


def generate_one_hot(columns: list[int], shape: WeightShape, *, device: torch.device | str = "cpu") -> torch.Tensor:
    """bf16 ``[len(columns), G, D]``: each token is 1 at its column, in every group, and 0 elsewhere."""
    o = torch.zeros((len(columns), shape.groups, shape.depth), dtype=torch.bfloat16, device=device)
    o[torch.arange(len(columns)), :, columns] = 1
    return o


def project_float64(case: Case, weight: torch.Tensor) -> torch.Tensor:
    """``out[t, g, r]`` in float64, for a dequantised ``weight [G, R, D]``."""
    return torch.einsum("tgd,grd->tgr", case.o.double(), weight.double())


def relative_error(actual: torch.Tensor, expected: torch.Tensor) -> float:
    """``|actual - expected| / |expected|`` in the 2-norm, computed in float64."""
    norm = expected.double().norm()
    return float((actual.double() - expected.double()).norm() / norm) if norm else float(actual.double().norm())


def first_difference(actual: torch.Tensor, expected: torch.Tensor) -> str | None:
    """The first coordinate at which two bf16 tensors differ in their bits, with both values; None when they do not.

    A NaN equals a NaN: its payload is the hardware's choice and means nothing.
    """
    if actual.shape != expected.shape or actual.dtype != expected.dtype:
        return f"{actual.dtype} {tuple(actual.shape)} against {expected.dtype} {tuple(expected.shape)}"
    a, e = actual.contiguous().view(torch.int16).view(-1), expected.contiguous().view(torch.int16).view(-1)
    if torch.equal(a, e):
        return None
    differs = (a != e) & ~(actual.isnan() & expected.isnan()).reshape(-1)
    count = int(differs.sum())
    if count == 0:
        return None
    flat = int(differs.byte().argmax())
    pairs = ((actual, a), (expected, e))
    coordinate = tuple(int(i) for i in torch.unravel_index(torch.tensor(flat), actual.shape))
    got, wanted = (f"{float(t.reshape(-1)[flat])!r} (0x{int(b[flat]) & 0xFFFF:04x})" for t, b in pairs)
    return f"{count} of {a.numel()} differ, the first at {coordinate}: {got}, expected {wanted}"


def assert_same_bits(actual: torch.Tensor, expected: torch.Tensor, name: str = "result") -> None:
    """Raise ``AssertionError`` naming the first coordinate that differs and both values."""
    difference = first_difference(actual, expected)
    if difference is not None:
        message = f"{name}: {difference}"
        raise AssertionError(message)
