"""The check on the device that lets a kernel serve ``identical`` numerics: its bits against the stock path's.

The order in which a library adds is its own business and may change with GPU, version and row count, so nothing is
taken from a table: every candidate plan is compared with the stock path on this device before it may serve. Up to 192
rows every row count is compared and judged for itself; above, the edges of token tiles are, and speak for their bucket.
The inputs are every code at every exponent, one at a time, and every kind of :mod:`memreclaim_kernels.testing`,
contiguous and strided. The first candidate of which not one bit differs is used; where there is none, the plan is to
dequantise and call the stock path, and its reason says at which coordinate the kernel differed.

At G=2 x 1024 x 4096 and ``max_rows`` 1024 the check holds 8.4 MB of codes, 16.8 MB of bf16 and 25 MB of activations and
outputs for as long as it runs.
"""

from __future__ import annotations

from functools import lru_cache
from importlib import import_module
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import torch

from memreclaim_kernels import blocks, ops, plan, reference, testing
from memreclaim_kernels.testing import Stride

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from memreclaim_kernels.blocks import WeightShape
    from memreclaim_kernels.plan import Numerics, Phase, Plan, Stock, Verdict

    StockPath = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]

DEFAULT_MAX_ROWS: Final = 1024
"""Above, decoding is a small part: dequantise + stock took 1.10 of stock at 4096 rows on an H200, 1.04 at 8192."""
TOLERANCE: Final = 2e-3
"""Bound on the relative error of ``free`` sums against float64; bf16 rounding alone gives 1.1e-3 to 1.7e-3."""
_DECODE: Final = "decode"
_FINITE_KINDS: Final = ("normal", "tiny")
_STRIDES: Final = (Stride(), Stride(row_pad=16))


class Check(NamedTuple):
    """What was found for one row bucket."""

    rows: tuple[int, int]
    """First and last row count."""
    chosen: Plan
    """What serves its last row count from now on."""
    dequantised: tuple[int, ...]
    """Row counts, of those compared, that no kernel serves."""
    verdicts: tuple[tuple[Plan, Verdict], ...]
    """Every plan that was compared, in order of preference."""


def check(
    shape: WeightShape,
    device: torch.device,
    *,
    phase: Phase = "decode",
    numerics: Numerics = "identical",
    stock: Stock = "bmm",
    stock_path: StockPath | None = None,
    max_rows: int = DEFAULT_MAX_ROWS,
) -> tuple[Check, ...]:
    """Compare, record, and say what serves each bucket of a weight shape.

    ``stock_path(o, weight)`` is the engine's own call on a bf16 ``weight [G, R, D]``; cuBLAS's ``einsum`` when left
    out, which is right for ``stock="bmm"`` only. On a CPU there is nothing to compare and the result is empty. Raises
    ``ValueError`` for ``stock="sglang"`` without its stock path.
    """
    if stock != "bmm" and stock_path is None:
        message = f"stock={stock!r} needs that engine's stock path to compare with"
        raise ValueError(message)
    about = plan.device_of(device)
    if not about.is_cuda:
        return ()
    choose: dict[str, Any] = {"device": about, "phase": phase, "numerics": numerics, "stock": stock}
    against = plan.compared_with(phase, stock)
    checks = []
    for first, last in _buckets(max_rows):
        offers = _offers(first, last, shape, choose)
        verdicts = _settle(offers, shape, device, stock_path or reference.grouped_projection, against)
        chosen = {rows: plan.select(rows, *shape, **choose) for rows in rows_to_compare(first, last)}
        dequantised = tuple(rows for rows, each in chosen.items() if each.path == "dequant")
        checks.append(Check((first, last), chosen[last], dequantised, verdicts))
    _decode_inputs.cache_clear()
    if any(check.chosen.backend == "cuda" and check.chosen.path != "dequant" for check in checks):
        # Row counts between those compared may need a kernel of their own: a second each, and none in a graph capture.
        import_module("memreclaim_kernels.native").prepare(shape, device, max_rows)
    return tuple(checks)


def check_backend(device: torch.device) -> plan.Backend:
    """Find a backend whose encode, prove and dequantise do what the reference does, and disable those that do not.

    Every code at every exponent is decoded, encoded and proven, and a flipped bit must be found. Returns the backend
    that serves from now on; ``reference``, which is slow on a GPU, when no kernels are right or can be compiled.
    """
    about = plan.device_of(device)
    while (backend := plan.backend_for(about)) != "reference":
        try:
            wrong = _backend_fault(device)
        except Exception as error:  # noqa: BLE001  compilers and drivers raise what they like
            wrong = repr(error)
        if not wrong:
            break
        plan.disable(backend, wrong)
    return backend


def _backend_fault(device: torch.device) -> str | None:
    exponents = torch.arange(blocks.MAX_EXPONENT + 1, dtype=torch.uint8, device=device).view(1, 1, -1)
    natural = torch.arange(1024, device=device).view(1, 32, 32).repeat(1, 1, exponents.numel()).to(torch.uint8)
    codes = blocks.pack(natural)
    weight = reference.dequantize(codes, exponents)
    difference = testing.first_difference(ops.dequantize(codes, exponents), weight)
    if difference:
        return f"dequantize: {difference}"
    weight = weight[..., : testing.SAFE_EXPONENTS * blocks.BLOCK].nan_to_num(0).contiguous()
    encoded, expected = ops.encode(weight), reference.encode(weight)
    if not all(map(torch.equal, encoded, expected)):
        return "encode: other bytes than the reference"
    proofs = [ops.prove(*encoded, weight).tolist()]
    weight.view(torch.int16).view(-1)[-7] ^= 1
    proofs.append(ops.prove(*encoded, weight).tolist())
    right = [[0, -1], [1, weight.numel() - 7]]
    return None if proofs == right else f"prove: {proofs} instead of {right}"


def _offers(first: int, last: int, shape: WeightShape, choose: dict[str, Any]) -> dict[Plan, list[int]]:
    """Kernel plans of a bucket in order of preference, each with the row counts it is offered for."""
    offers: dict[Plan, list[int]] = {}
    for rows in rows_to_compare(first, last):
        for candidate in plan.candidates(rows, *shape, **choose):
            if candidate.path != "dequant":
                offers.setdefault(candidate, []).append(rows)
    return offers


def _settle(
    offers: dict[Plan, list[int]], shape: WeightShape, device: torch.device, stock_path: StockPath, against: str
) -> tuple[tuple[Plan, Verdict], ...]:
    """Compare and record plans until every row count has one that is right."""
    verdicts = []
    served: set[int] = set()
    for candidate, rows in offers.items():
        todo = tuple(count for count in rows if count not in served)
        if not todo:
            continue
        faults, elements = _compare(candidate, todo, shape, device, stock_path)
        if faults and todo[-1] > plan.MID_ROWS:
            # Here some counts stand for all of a bucket, and one that differs speaks for all of them too.
            faults = dict.fromkeys(todo, next(iter(faults.values())))
        for count in todo:
            fault = faults.get(count, "")
            verdict = plan.Verdict(same=not fault, rows=(count,), elements=elements, difference=fault)
            plan.record(candidate, count, shape, plan.device_of(device), verdict, against=against)
        fault = next(iter(faults.values()), "")
        verdicts.append((candidate, plan.Verdict(not faults, todo, elements, fault)))
        served.update(set(todo) - set(faults))
    return tuple(verdicts)


def _buckets(max_rows: int) -> Iterator[tuple[int, int]]:
    low = 1
    for high in plan.BUCKETS[1:]:
        if high <= max_rows:
            yield low, high
        low = high + 1


def rows_to_compare(first: int, last: int) -> tuple[int, ...]:
    """Row counts compared in a bucket: all of them up to 192, above that the edges of token tiles."""
    if last <= plan.MID_ROWS:
        return tuple(range(first, last + 1))
    edges = {first, last, (first + last) // 2}
    edges.update(at for tile in (256, 384, 512, 768) for at in (tile - 1, tile, tile + 1) if first <= at <= last)
    return tuple(sorted(edges))


def _compare(
    candidate: Plan, rows: tuple[int, ...], shape: WeightShape, device: torch.device, stock_path: StockPath
) -> tuple[dict[int, str], int]:
    """What differs from the stock path at which row count, over every kind of input, and the number of outputs."""
    faults: dict[int, str] = {}
    elements = 0
    for name, o, codes, exponents, weight in _inputs(candidate, rows, shape, device):
        count = o.shape[0]
        if count in faults:
            continue
        try:
            actual = ops.grouped_projection(o, codes, exponents, candidate.key)
        except Exception as error:  # noqa: BLE001  compilers raise what they like
            # A kernel that does not compile or launch here must not serve, and need not stop the engine.
            return dict.fromkeys(rows, f"cannot run: {error!r}"), elements
        elements += actual.numel()
        difference = _difference(candidate, actual, o, weight, stock_path)
        if difference:
            faults[count] = f"{name}, {count} rows, stride {o.stride()}: {difference}"
        if difference and name == _DECODE:
            return dict.fromkeys(rows, faults[count]), elements
    return faults, elements


def _inputs(
    candidate: Plan, rows: tuple[int, ...], shape: WeightShape, device: torch.device
) -> Iterator[tuple[str, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]]:
    """Name, activations, codes, exponents and dequantised weight of every comparison."""
    # First every code at every exponent, one at a time: the decoder of this very kernel against integer arithmetic.
    codes, exponents, columns, weight = _decode_inputs(shape, device)
    for start in range(0, len(columns), rows[-1]):
        chosen = [columns[(start + token) % len(columns)] for token in range(rows[-1])]
        yield _DECODE, testing.generate_one_hot(chosen, shape, device=device), codes, exponents, weight
    for number, kind in enumerate(_FINITE_KINDS if candidate.order == "free" else testing.KINDS):
        case = testing.generate_case(kind, rows[-1], shape, seed=number, device=device)
        weight = ops.dequantize(case.codes, case.exponents)
        for stride in _STRIDES:
            o = testing.lay_out(case.o, stride)
            for count in rows:
                yield kind, o[:count], case.codes, case.exponents, weight


@lru_cache(maxsize=1)
def _decode_inputs(
    shape: WeightShape, device: torch.device
) -> tuple[torch.Tensor, torch.Tensor, list[int], torch.Tensor]:
    """Twin, columns and weight of the decode comparison; the reference decoder takes thousands of launches for it."""
    codes, exponents, columns = testing.generate_decode_twin(shape, device=device)
    return codes, exponents, columns, reference.dequantize(codes, exponents)


def _difference(
    candidate: Plan, actual: torch.Tensor, o: torch.Tensor, weight: torch.Tensor, stock_path: StockPath
) -> str | None:
    if candidate.order != "free":
        return testing.first_difference(actual, stock_path(o, weight))
    error = testing.relative_error(actual, torch.einsum("tgd,grd->tgr", o.double(), weight.double()))
    return None if error <= TOLERANCE else f"relative error {error:.2e} is above {TOLERANCE:.0e}"
