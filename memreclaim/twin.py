"""The fp8 twin of a bf16 weight: e4m3 codes and one exponent byte per 32x32 block.

A twin costs one byte an element and one byte a block. Its values are ``code * 2**(exponent - 127)``, rounded once to
bf16, which is what an engine computes when it loads such a weight from an fp8 checkpoint.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Self

import torch

from memreclaim import proof
from memreclaim.errors import NotExact
from memreclaim.states import Reason
from memreclaim_kernels import blocks, ops, reference

if TYPE_CHECKING:
    from memreclaim_kernels.blocks import WeightShape

_E4M3_NAN = 0x7F


class Twin:
    """Exact fp8 stand-in for a weight ``[G, R, D]``; only :meth:`overwrite` changes it after it is made."""

    __slots__ = ("__weakref__", "_exponents", "_layout", "_packed")

    def __init__(self, packed: torch.Tensor, exponents: torch.Tensor, layout: tuple[int, ...] | None = None) -> None:
        """Wrap codes in storage order and their exponents; use :func:`build_twin` or :meth:`from_checkpoint`.

        Shapes: ``packed`` uint8 ``[G, R/16, D/32, 512]``, ``exponents`` uint8 ``[G, R/32, D/32]``. ``layout`` is the
        shape that :meth:`dequantize` returns, ``[G, R, D]`` when left out.
        """
        shape = blocks.shape_of(packed)
        if exponents.shape != (shape.groups, shape.rank // blocks.BLOCK, shape.depth // blocks.BLOCK):
            message = f"exponents of shape {tuple(exponents.shape)} do not fit codes for {tuple(shape)}"
            raise ValueError(message)
        self._packed = packed
        self._exponents = exponents
        self._layout = tuple(shape) if layout is None else layout

    @classmethod
    def from_checkpoint(cls, codes: torch.Tensor, scales: torch.Tensor, *, groups: int | None = None) -> Self:
        """Twin of a checkpoint's own bytes.

        Shapes: ``codes`` float8_e4m3fn ``[R, D]`` (``groups`` times ``R/groups`` rows, group-major) or ``[G, R, D]``;
        ``scales`` float8_e8m0fnu, or float32 powers of two, ``[R/b, D/b]`` (or ``[G, R/b, D/b]``) with b = 32 or 128.
        Raises :class:`NotExact` for NaN codes, scales that are NaN, not a power of two or outside ``2**-127 ..
        2**127``, and for values that overflow bf16; ``ValueError`` for shapes and dtypes that are none of these.
        """
        natural = _as_code_bytes(codes)
        layout = tuple(natural.shape)
        natural = _grouped(natural, groups)
        exponents = _spread(_scale_exponents(scales), natural)
        if bool(((natural & _E4M3_NAN) == _E4M3_NAN).any()):
            raise NotExact(Reason.NOT_FINITE)
        twin = cls(blocks.pack(natural), exponents, layout)
        if bool((exponents > reference.LARGEST_SAFE_EXPONENT).any()) and not twin.dequantize().isfinite().all():
            raise NotExact(Reason.NOT_FINITE)
        return twin

    @property
    def shape(self) -> WeightShape:
        """``(G, R, D)``."""
        return blocks.shape_of(self._packed)

    @property
    def layout(self) -> tuple[int, ...]:
        """Shape of the weight itself, which :meth:`dequantize` returns: ``(G, R, D)`` or ``(G*R, D)``."""
        return self._layout

    @property
    def device(self) -> torch.device:
        """Where codes and exponents live."""
        return self._packed.device

    @property
    def nbytes(self) -> int:
        """What the twin costs: one byte an element and one a block."""
        return self._packed.nbytes + self._exponents.nbytes

    @property
    def packed(self) -> torch.Tensor:
        """Codes in storage order, uint8 ``[G, R/16, D/32, 512]``; see :mod:`memreclaim_kernels.blocks`. Not a copy."""
        return self._packed

    @property
    def exponents(self) -> torch.Tensor:
        """Biased exponents, uint8 ``[G, R/32, D/32]``, scale ``2**(byte - 127)``. Not a copy."""
        return self._exponents

    @property
    def codes(self) -> torch.Tensor:
        """Codes in natural order, float8_e4m3fn ``[G, R, D]``. A copy."""
        return blocks.unpack(self._packed).view(torch.float8_e4m3fn)

    def dequantize(self) -> torch.Tensor:
        """The exact bf16 weight, in the shape that it had; a new tensor on each call."""
        return ops.dequantize(self._packed, self._exponents).view(self._layout)

    def decode_block(self, group: int, block_row: int, block_column: int) -> torch.Tensor:
        """One decoded block, bf16 ``[32, 32]``."""
        tiles = self._packed[group : group + 1, 2 * block_row : 2 * block_row + 2, block_column : block_column + 1]
        exponent = self._exponents[group, block_row, block_column]
        natural = blocks.unpack(tiles.contiguous())[0]
        return reference.decode(natural, exponent.expand_as(natural))

    def overwrite(self, other: Twin) -> None:
        """Take the bytes of ``other`` where this twin's are, since CUDA graphs may hold the address.

        Only at the engine's safe point: kernels read a twin without a lock, and one that runs meanwhile would compute
        from a mixture of both. Waits for the device before and after, so that kernels of every stream have read the
        old bytes or will read the new ones. Who notes fingerprints takes a new one. ``other`` has the same shape, on
        any device; raises ``ValueError`` otherwise.
        """
        if other.shape != self.shape:
            message = f"a twin of {tuple(self.shape)} cannot take the bytes of one of {tuple(other.shape)}"
            raise ValueError(message)
        self._wait()
        self._packed.copy_(other.packed)
        self._exponents.copy_(other.exponents)
        self._wait()

    def _wait(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def __repr__(self) -> str:
        """Shape, bytes and device."""
        return f"Twin(shape={tuple(self.shape)}, nbytes={self.nbytes}, device={self.device})"


def build_twin(weight: torch.Tensor, *, groups: int | None = None) -> Twin:
    """Exact twin of a bf16 weight.

    Shapes: ``[G, R, D]``, or ``[G*R, D]`` with ``groups``; contiguous, R and D multiples of 32.
    Raises :class:`NotExact` with reason ``mismatch``, ``not_finite``, ``dtype``, ``shape`` or ``not_contiguous``.
    Peak memory beside the weight: the twin and 4 MiB.
    """
    refusal = unfit(weight, groups)
    if refusal is not None:
        raise NotExact(refusal)
    raw = weight.detach()
    grouped = raw.view(_grouped_shape(tuple(raw.shape), groups))
    twin = Twin(*ops.encode(grouped), layout=tuple(raw.shape))
    verdict = proof.prove(twin, raw)
    # An infinity decodes to itself (256 * 2**120 overflows), so a perfect match at such a scale proves nothing.
    suspicious = not verdict.exact or bool((twin.exponents > reference.LARGEST_SAFE_EXPONENT).any())
    if suspicious and not _all_finite(grouped):
        raise NotExact(Reason.NOT_FINITE, verdict.mismatched, verdict.first_mismatch)
    if not verdict.exact:
        raise NotExact(Reason.MISMATCH, verdict.mismatched, verdict.first_mismatch)
    return twin


def unfit(weight: torch.Tensor, groups: int | None = None) -> Reason | None:
    """Why no twin of ``weight`` can be tried, seen from its metadata alone, or None."""
    if weight.dtype != torch.bfloat16:
        return Reason.DTYPE
    try:
        shape = _grouped_shape(tuple(weight.shape), groups)
    except ValueError:
        return Reason.SHAPE
    if not blocks.is_blocked(shape):
        return Reason.SHAPE
    return None if weight.is_contiguous() else Reason.NOT_CONTIGUOUS


def _grouped_shape(shape: tuple[int, ...], groups: int | None) -> tuple[int, int, int]:
    """``[G, R, D]`` of a weight stored as ``[G, R, D]`` or ``[G*R, D]``."""
    if len(shape) == 3 and groups in {None, shape[0]}:  # noqa: PLR2004
        return shape[0], shape[1], shape[2]
    count = 1 if groups is None else groups
    if len(shape) == 2 and count > 0 and shape[0] % count == 0:  # noqa: PLR2004
        return count, shape[0] // count, shape[1]
    message = f"a weight of shape {shape} has no {groups} groups"
    raise ValueError(message)


def _grouped(natural: torch.Tensor, groups: int | None) -> torch.Tensor:
    shape = _grouped_shape(tuple(natural.shape), groups)
    if not blocks.is_blocked(shape):
        message = f"codes of shape {tuple(natural.shape)} are not made of 32x32 blocks"
        raise ValueError(message)
    return natural.reshape(shape)


def _as_code_bytes(codes: torch.Tensor) -> torch.Tensor:
    if codes.dtype != torch.float8_e4m3fn:
        message = f"codes must be float8_e4m3fn, not {codes.dtype}"
        raise ValueError(message)
    return codes.detach().view(torch.uint8)


def _scale_exponents(scales: torch.Tensor) -> torch.Tensor:
    """Exponent bytes of checkpoint scales, uint8 like ``scales``."""
    if scales.dtype == torch.float8_e8m0fnu:
        exponents = scales.view(torch.uint8)
        if bool((exponents > blocks.MAX_EXPONENT).any()):
            raise NotExact(Reason.NOT_FINITE)
        return exponents
    if scales.dtype != torch.float32:
        message = f"scales must be float8_e8m0fnu or float32, not {scales.dtype}"
        raise ValueError(message)
    bits = scales.contiguous().view(torch.int32)
    if not bool(scales.isfinite().all()):
        raise NotExact(Reason.NOT_FINITE)
    # 2**-127 is the one fp32 subnormal that an exponent byte (0) stands for.
    subnormal = bits == 0x00400000  # noqa: PLR2004
    normal = (bits > 0) & (bits & 0x007FFFFF == 0)
    if not bool((normal | subnormal).all()):
        raise NotExact(Reason.MISMATCH)
    return torch.where(subnormal, 0, bits >> 23).to(torch.uint8)


def _spread(exponents: torch.Tensor, natural: torch.Tensor) -> torch.Tensor:
    """Exponents of 32x32 or 128x128 blocks as one byte per 32x32 block ``[G, R/32, D/32]``."""
    groups, rank, depth = natural.shape
    if exponents.numel() == 0 or exponents.dim() not in (2, 3):
        message = f"scales of shape {tuple(exponents.shape)} do not fit codes of shape {tuple(natural.shape)}"
        raise ValueError(message)
    rows, columns = exponents.numel() // exponents.shape[-1], exponents.shape[-1]
    block = depth // columns
    if block not in (32, 128) or rows * block != groups * rank or columns * block != depth or rank % block:
        message = f"scales of shape {tuple(exponents.shape)} do not fit codes of shape {tuple(natural.shape)}"
        raise ValueError(message)
    grid = exponents.reshape(groups, rank // block, columns)
    repeat = block // blocks.BLOCK
    return grid.repeat_interleave(repeat, dim=1).repeat_interleave(repeat, dim=2).contiguous()


def _all_finite(grouped: torch.Tensor) -> bool:
    """Whether a weight holds no NaN and no infinity, slab by slab to stay under 4 MiB."""
    return all(bool(slab.isfinite().all()) for group in grouped for slab in group.split(128))
