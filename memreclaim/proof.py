"""The proof that a twin decodes to a weight's bits.

The comparison is on 16-bit patterns, so -0.0 differs from +0.0, and it runs through the decoder that serves: on a GPU
one fused kernel that decodes in registers and compares, without a bf16 copy of the weight.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from typing import TYPE_CHECKING, Self

import torch

from memreclaim.errors import NotExact
from memreclaim.states import Reason
from memreclaim_kernels import blocks, ops

if TYPE_CHECKING:
    from memreclaim.twin import Twin


class Mismatch(tuple[int, ...]):  # noqa: SLOT001  a tuple of any length cannot have slots
    """The coordinate of an element that differs, as a plain tuple, with both values.

    The coordinate is in the weight's own shape: ``(row, column)`` of a 2-D weight, ``(group, row, column)`` of a 3-D
    one.
    """

    expected_bits: int
    """16-bit pattern in the weight."""
    actual_bits: int
    """16-bit pattern that the twin decodes to."""

    def __new__(cls, coordinate: tuple[int, ...], expected_bits: int, actual_bits: int) -> Self:
        """Make a coordinate that carries both bit patterns."""
        self = super().__new__(cls, coordinate)
        self.expected_bits = expected_bits
        self.actual_bits = actual_bits
        return self

    @property
    def expected(self) -> float:
        """The weight's value."""
        return _bf16_value(self.expected_bits)

    @property
    def actual(self) -> float:
        """The twin's value."""
        return _bf16_value(self.actual_bits)

    def describe(self) -> str:
        """Coordinate and both values, for messages."""
        return (
            f"at {tuple(self)}: weight {self.expected!r} (0x{self.expected_bits:04x}), "
            f"twin {self.actual!r} (0x{self.actual_bits:04x})"
        )


@dataclass(frozen=True)
class Proof:
    """Verdict of one comparison."""

    exact: bool
    """No element differs."""
    elements: int
    """How many elements were compared."""
    mismatched: int
    """How many differ."""
    first_mismatch: Mismatch | None
    """The first one in row-major order."""


def prove(twin: Twin, weight: torch.Tensor) -> Proof:
    """Compare every bit that ``twin`` decodes to with ``weight``.

    Shapes: ``weight`` bf16 ``[G, R, D]`` or ``[G*R, D]``, on the twin's device. Peak memory: 4 MiB.
    Raises ``ValueError`` for a weight of another shape or dtype, or one that is not contiguous.
    """
    _check_comparable(twin, weight)
    grouped = weight.detach().view(twin.shape)
    mismatched, first = ops.prove(twin.packed, twin.exponents, grouped).tolist()
    located = _locate(twin, weight, first) if mismatched else None
    return Proof(exact=mismatched == 0, elements=grouped.numel(), mismatched=mismatched, first_mismatch=located)


def demand(twin: Twin, weight: torch.Tensor) -> None:
    """Raise :class:`~memreclaim.errors.NotExact` (``mismatch``) unless :func:`prove` finds every bit equal."""
    verdict = prove(twin, weight)
    if not verdict.exact:
        raise NotExact(Reason.MISMATCH, verdict.mismatched, verdict.first_mismatch)


def _check_comparable(twin: Twin, weight: torch.Tensor) -> None:
    groups, rank, depth = twin.shape
    if tuple(weight.shape) not in {(groups, rank, depth), (groups * rank, depth)}:
        message = f"weight has shape {tuple(weight.shape)}, the twin stands for {tuple(twin.shape)}"
        raise ValueError(message)
    if weight.dtype != torch.bfloat16 or not weight.is_contiguous():
        message = f"weight must be contiguous bfloat16, not {weight.dtype} with strides {weight.stride()}"
        raise ValueError(message)


def _locate(twin: Twin, weight: torch.Tensor, flat: int) -> Mismatch:
    """Coordinate and both values of the element at index ``flat``, decoding only the 32x32 block around it."""
    shape = blocks.WeightShape(*twin.shape)
    group, rest = divmod(flat, shape.rank * shape.depth)
    row, column = divmod(rest, shape.depth)
    decoded = twin.decode_block(group, row // blocks.BLOCK, column // blocks.BLOCK)
    actual = decoded[row % blocks.BLOCK, column % blocks.BLOCK]
    expected = weight.detach().view(-1)[flat]
    coordinate = (group, row, column) if weight.dim() == 3 else (group * shape.rank + row, column)  # noqa: PLR2004
    return Mismatch(coordinate, _bits(expected), _bits(actual))


def _bits(value: torch.Tensor) -> int:
    return int(value.view(torch.int16)) & 0xFFFF


def _bf16_value(bits: int) -> float:
    # Without torch, whose default device may be one that holds no values while an engine builds its model.
    value: float = struct.unpack("<f", (bits << 16).to_bytes(4, "little"))[0]
    return value
