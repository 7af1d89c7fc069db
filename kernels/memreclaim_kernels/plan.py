"""Which kernel serves a call: one plan per (rows, weight shape, device, phase, numerics), decided only here.

``candidates`` lists what could serve, best first; ``select`` takes the first that may. A kernel may serve ``identical``
numerics only after :mod:`memreclaim_kernels.selfcheck` found its bits equal to the stock path's on this device, for
this weight shape and row bucket; until then, and where one bit differs, the plan is to dequantise and run the stock
product.

This module needs no GPU, starts no CUDA and imports no Triton.
"""

from __future__ import annotations

import hashlib
import importlib.util
import threading
from dataclasses import dataclass, field
from functools import cache
from typing import TYPE_CHECKING, Any, Final, Literal, NamedTuple, TypeAlias, cast, get_args

from memreclaim_kernels import tables
from memreclaim_kernels.blocks import BLOCK, TILE_ROWS, is_blocked

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    import torch

Path: TypeAlias = Literal["empty", "gemv", "small", "mid", "large", "dequant"]
Backend: TypeAlias = Literal["reference", "triton", "cuda"]
Order: TypeAlias = Literal["chain", "splits8", "gemv", "free"]
"""Order of fp32 sums. ``chain``: one ascending chain of k16 steps, as cuBLAS. ``splits8``: SGLang's 2..8-row kernel, 8
chains of 512 columns added as ``(((p0+p2)+p4)+p6) + (((p1+p3)+p5)+p7)``. ``gemv``: SGLang's 1-row kernel. ``free``:
any."""
Phase: TypeAlias = Literal["decode", "verify", "draft", "prefill"]
Numerics: TypeAlias = Literal["identical", "fused"]
Stock: TypeAlias = Literal["bmm", "sglang"]
"""Whose bits ``identical`` means: cuBLAS's at every row count, or SGLang's, whose own kernels serve 1..8 rows."""

BUCKETS: Final = (0, 1, 8, 16, 32, 64, 128, 192, 512, 1024, 65536)
"""Upper ends of the row buckets; 8 and 192 are where the families change, the others where tuned tiles do."""
SMALL_ROWS: Final = 8
MID_ROWS: Final = 192
_SGLANG_SHAPE: Final = (2, 1024, 4096)
"""The only weight shape for which SGLang leaves cuBLAS: its fast paths test for ``(2, 4096)`` literally."""
SHARED_MEMORY_FLOOR: Final = 99 * 1024
"""Bytes of shared memory a block may have on GB10 and other consumer parts; used where the device is unknown."""


class Device(NamedTuple):
    """What a plan needs to know of a device."""

    name: str
    capability: tuple[int, int] | None
    """CUDA compute capability; None on a CPU."""
    shared_memory: int = SHARED_MEMORY_FLOOR
    """Bytes of shared memory that one block may use."""

    @property
    def is_cuda(self) -> bool:
        """Whether CUDA kernels run there."""
        return self.capability is not None


CPU: Final = Device("cpu", None, 0)
_DEVICES: dict[torch.device, Device] = {}


def device_of(device: torch.device) -> Device:
    """Describe a torch device; cached. Starts CUDA only for a CUDA device."""
    known = _DEVICES.get(device)
    if known is not None:
        return known
    if device.type != "cuda":
        return CPU
    import torch

    properties = torch.cuda.get_device_properties(device)
    limit = getattr(properties, "shared_memory_per_block_optin", SHARED_MEMORY_FLOOR)
    found = Device(properties.name, (properties.major, properties.minor), int(limit))
    return _DEVICES.setdefault(device, found)


@dataclass(frozen=True, slots=True)
class Plan:
    """One way to serve a call. Equal plans run the same kernel with the same configuration."""

    path: Path
    backend: Backend
    order: Order = "chain"
    config: tuple[tuple[str, int], ...] = ()
    """Tile sizes and launch options, sorted by name."""
    source: str = field(default="heuristic", compare=False)
    """Where the configuration comes from: the name of a table, or ``heuristic``."""
    reason: str = field(default="", compare=False)
    """Why a better path was not taken, for a ``dequant`` plan that is a fallback."""
    key: str = field(init=False, compare=False)
    """The plan as one word, the form in which it is passed to the custom op."""

    def __post_init__(self) -> None:
        """Derive the key."""
        options = ",".join(f"{name}={value}" for name, value in self.config)
        object.__setattr__(self, "key", f"{self.path}:{self.backend}:{self.order}:{options}")

    def option(self, name: str, default: int) -> int:
        """Value of a configuration entry."""
        return dict(self.config).get(name, default)


def parse(key: str) -> Plan:
    """The plan of a key; a bare path (``"small"``) means that family's default on the tensor's device.

    Raises ``ValueError`` for words that name no path, backend or order.
    """
    path, backend, order, options = [*key.split(":"), "", "", ""][:4]
    backend, order = backend or "reference", order or "chain"
    if path not in get_args(Path) or backend not in get_args(Backend) or order not in get_args(Order):
        message = f"{key!r} names no plan"
        raise ValueError(message)
    pairs = [item.partition("=") for item in options.split(",") if item]
    config = tuple((name, int(value)) for name, _, value in pairs)
    return Plan(cast("Path", path), cast("Backend", backend), cast("Order", order), config)


def bucket_of(rows: int) -> tuple[int, int]:
    """First and last row count of the bucket that ``rows`` falls into."""
    low = 0
    for high in BUCKETS:
        if rows <= high:
            return low, high
        low = high + 1
    return low, 2**31 - 1


def stock_orders(rows: int, shape: tuple[int, int, int], phase: Phase, stock: Stock) -> tuple[Order, ...]:
    """Orders of sums that ``identical`` may have to keep, the likeliest first; the check on the device decides."""
    if stock == "sglang" and shape == _SGLANG_SHAPE and phase != "prefill" and rows <= SMALL_ROWS:
        # Its dispatch goes by flags of the call: where they do not say decode or verify, cuBLAS serves these rows too.
        return ("gemv" if rows == 1 else "splits8", "chain")
    return ("chain",)


def plan_supports(plan: Plan, rows: int, groups: int, rank: int, depth: int, device: Device) -> str | None:  # noqa: PLR0911
    """Why ``plan`` cannot run this call, or None when it can. The only home of legality: launchers trust it."""
    if plan.path == "empty":
        return None if rows == 0 else "only for 0 rows"
    if rows < 1:
        return "0 rows run nothing"
    if not is_blocked((groups, rank, depth)):
        return "rank and depth must be multiples of 32"
    if plan.path == "dequant":
        return None
    if not device.is_cuda:
        return "needs a CUDA device"
    if plan.path == "gemv" and rows != 1:
        return "gemv takes 1 row"
    if plan.path == "small" and rows > SMALL_ROWS:
        return f"small takes at most {SMALL_ROWS} rows"
    if plan.backend == "triton":
        return _triton_refusal(plan, depth, device)
    if plan.backend == "cuda":
        return _cuda_refusal(plan, rows, (groups, rank, depth), device)
    return f"backend {plan.backend} has no {plan.path} kernel"


def _triton_refusal(plan: Plan, depth: int, device: Device) -> str | None:
    if device.capability is None or device.capability < (8, 0):
        return "bf16 MMA needs sm80"
    if plan.order == "splits8" and depth % (8 * BLOCK):
        return "8 K-splits need a depth that is a multiple of 256"
    if plan.order == "gemv" and depth % 1024:
        return "the gemv order needs a depth that is a multiple of 1024"
    sizes = [plan.option("block_m", 16), plan.option("block_n", 32), plan.option("block_k", 128)]
    if any(size < TILE_ROWS or size & (size - 1) for size in sizes) or sizes[2] < BLOCK:
        return "tile sizes must be powers of two, at least 16 rows and 32 columns"
    if plan.order != "free" and plan.option("split_k", 1) != 1:
        return "split-K adds in an order of its own"
    block_m, block_n, block_k = sizes
    # The activation and code tiles of every stage, and the decoded tile once, pass through shared memory.
    needed = plan.option("stages", 2) * block_k * (2 * block_m + block_n) + 2 * block_n * block_k
    return f"needs {needed} bytes of shared memory" if needed > device.shared_memory else None


def _cuda_refusal(plan: Plan, rows: int, shape: tuple[int, int, int], device: Device) -> str | None:
    refusal: str | None = _cuda().refusal(plan, rows, shape, device)
    return refusal


class Verdict(NamedTuple):
    """Outcome of comparing one plan with the stock path on one device; see :mod:`memreclaim_kernels.selfcheck`."""

    same: bool
    """Not one bit differed (``identical`` orders), or every value was within tolerance (``free``)."""
    rows: tuple[int, ...]
    """Row counts that were compared."""
    elements: int
    """How many outputs were compared."""
    difference: str = ""
    """The first difference, with coordinate and both values."""


_VerdictKey: TypeAlias = tuple[str, "tuple[int, int] | None", int, int, int, tuple[int, int], str, str]
_Call: TypeAlias = tuple[int, int, int, int, Device, str, str, str]
_lock = threading.Lock()
_verdicts: dict[_VerdictKey, Verdict] = {}
_selected: dict[_Call, Plan] = {}
_generation = 0
_disabled: dict[str, str] = {}
_listeners: list[Callable[[Plan, int, tuple[int, int, int], Device], None]] = []
_announced: set[tuple[object, ...]] = set()
checked: set[Device] = set()
"""Devices on which encode, prove and dequantise were compared with the reference, or are about to be."""


def compared_with(phase: Phase, stock: Stock) -> str:
    """Name of the stock path that a call's bits are those of.

    An engine's own dispatch may choose by phase; in prefill, and where no engine is, it is cuBLAS.
    """
    return "bmm" if stock == "bmm" or phase == "prefill" else f"{stock}/{phase}"


def _verdict_key(plan: Plan, rows: int, shape: tuple[int, int, int], device: Device, against: str) -> _VerdictKey:
    # Up to 192 rows every count is compared for itself: cuBLAS may cut K at one count and not at the next.
    cell = (rows, rows) if rows <= MID_ROWS else bucket_of(rows)
    return (device.name, device.capability, *shape, cell, plan.key, against)


def generation() -> int:
    """Counts up whenever plans are chosen anew, so that a caller can keep one as long as this stays the same."""
    return _generation


def _choose_anew() -> None:
    """Forget choices; the lock is held."""
    global _generation  # noqa: PLW0603  one per process, like the choices
    _selected.clear()
    _generation += 1


def record(
    plan: Plan, rows: int, shape: tuple[int, int, int], device: Device, verdict: Verdict, *, against: str = "bmm"
) -> None:
    """Note what the comparison with the stock path found at ``rows``, and choose anew from now on.

    Above 192 rows a verdict holds for the whole bucket of ``rows``.
    """
    with _lock:
        _verdicts[_verdict_key(plan, rows, shape, device, against)] = verdict
        _choose_anew()


def verified(
    plan: Plan, rows: int, shape: tuple[int, int, int], device: Device, *, against: str = "bmm"
) -> Verdict | None:
    """What :func:`record` was told for this plan, weight shape and row count on this kind of device, or None.

    ``against`` is what the plan was compared with, see :func:`compared_with`.
    """
    return _verdicts.get(_verdict_key(plan, rows, shape, device, against))


def disable(backend: Backend, reason: str) -> None:
    """Stop choosing a backend in this process, for instance because it cannot be compiled here."""
    with _lock:
        _disabled[backend] = reason
        _choose_anew()


def digest() -> str:
    """Hash of all that was judged in this process: verdicts, and backends that were disabled.

    Equal on devices of one kind that found the same, whatever their index and whenever each kernel was compared.
    """
    with _lock:
        judged = sorted(repr((key, verdict.same)) for key, verdict in _verdicts.items())
        disabled = sorted(_disabled)
    return hashlib.sha256(repr((judged, disabled)).encode()).hexdigest()[:12]


def forget() -> None:
    """Drop every verdict, choice and disabled backend of this process (tests, and a changed device)."""
    with _lock:
        _verdicts.clear()
        _choose_anew()
        _disabled.clear()
        _announced.clear()
        checked.clear()


def on_select(listener: Callable[[Plan, int, tuple[int, int, int], Device], None]) -> Callable[[], None]:
    """Have ``listener(plan, rows, (G, R, D), device)`` called once per weight shape, row bucket and plan.

    Returns a function that takes the listener away again.
    """
    _listeners.append(listener)
    return lambda: _listeners.remove(listener)


def backend_for(device: Device) -> Backend:
    """Backend of encode, prove and dequantise on a device."""
    if not device.is_cuda:
        return "reference"
    if _is_usable("cuda") and _cuda().unavailable(device) is None:
        return "cuda"
    return "triton" if _is_usable("triton") and device.capability >= (8, 0) else "reference"  # type: ignore[operator]


def candidates(
    rows: int,
    groups: int,
    rank: int,
    depth: int,
    *,
    device: Device,
    phase: Phase = "decode",
    numerics: Numerics = "identical",
    stock: Stock = "bmm",
) -> tuple[Plan, ...]:
    """Legal plans for a call, best first; the last one always serves.

    ``depth`` and ``rank`` in elements. Prefill never takes ``free`` sums, whatever ``numerics`` says.
    """
    if rows == 0:
        return (Plan("empty", "reference"),)
    effective: Numerics = "identical" if phase == "prefill" else numerics
    shape = (groups, rank, depth)
    orders: tuple[Order, ...] = ("free",) if effective == "fused" else stock_orders(rows, shape, phase, stock)
    offers = [
        plan
        for order in orders
        for plan in _offers(rows, shape, device, effective, order)
        if plan.path == "dequant" or plan_supports(plan, rows, groups, rank, depth, device) is None
    ]
    kernels = [plan for plan in offers if plan.path != "dequant"]
    chosen = [plan for plan in offers if plan.path == "dequant"]
    # A table may prefer dequantisation: then nothing below it is wanted.
    if offers[0].path == "dequant":
        kernels = []
    return (*dict.fromkeys(kernels), chosen[0])


def _offers(rows: int, shape: tuple[int, int, int], device: Device, numerics: Numerics, order: Order) -> Iterator[Plan]:
    """Plans of the tables, then of the backends' heuristics, then dequantisation; not all of them legal."""
    fallback = Plan("dequant", backend_for(device))
    if device.capability is not None:
        for table in tables.for_device(device.name, device.capability):
            for entry in table.entries:
                if not entry.matches(rows, *shape, numerics) or (numerics == "identical" and entry.order != order):
                    continue
                if entry.path == "dequant":
                    yield Plan("dequant", fallback.backend, source=table.source)
                elif _is_usable(entry.backend):
                    path, backend = cast("Path", entry.path), cast("Backend", entry.backend)
                    yield Plan(path, backend, cast("Order", entry.order), entry.config, table.source)
        if _is_usable("cuda") and _cuda().unavailable(device) is None:
            yield from _cuda().offers(rows, shape, device, order)
        if _is_usable("triton"):
            yield from _triton_offers(rows, order)
    yield fallback


def _triton_offers(rows: int, order: Order) -> Iterator[Plan]:
    """The portable kernels' configurations where no table says better."""
    if order == "gemv" or (order == "free" and rows == 1):
        yield _triton("gemv", order, warps=4)
    elif rows <= SMALL_ROWS:
        # 16 weight rows a program is the most programs an MMA tile allows: 128 for G=2, one for each of an H200's 132
        # SMs. 128 columns a step is 2 KiB of codes a tile, and 3 stages of that keep loads in flight past the MMA
        # chain.
        yield _triton("small", order, block_n=16, block_k=128, warps=4, stages=3)
    elif rows <= MID_ROWS:
        # Published for GB10 and kept as the default: the token tile grows until weights are read twice at most, the
        # weight tile stays at 32 rows so that G=2 still gives 64 programs a token tile.
        block_m = 16 if rows <= 16 else 32 if rows <= 32 else 64  # noqa: PLR2004
        yield _triton("mid", order, block_m=block_m, block_n=32, block_k=128, split_k=1, warps=4, stages=3)
    # Above 192 rows the product is bound by compute, and decoding each weight tile once per token tile costs more than
    # one dequantisation: published for GB10, measured on H200 (1.84x of stock at 256 rows against 2.6x).


def _triton(path: Path, order: Order, **config: int) -> Plan:
    return Plan(path, "triton", order, tuple(sorted(config.items())))


def select(
    rows: int,
    groups: int,
    rank: int,
    depth: int,
    *,
    device: Device,
    phase: Phase = "decode",
    numerics: Numerics = "identical",
    stock: Stock = "bmm",
) -> Plan:
    """The plan of a call: the first candidate that was compared on this device and found right.

    Cached; a hit costs under 1 us. The last resort, ``dequant``, carries the reason in ``Plan.reason``.
    """
    call = (rows, groups, rank, depth, device, phase, numerics, stock)
    hit = _selected.get(call)
    if hit is not None:
        return hit
    plans = candidates(rows, groups, rank, depth, device=device, phase=phase, numerics=numerics, stock=stock)
    chosen = _first_allowed(plans, rows, (groups, rank, depth), device, compared_with(phase, stock))
    with _lock:
        _selected[call] = chosen
        news = (device, groups, rank, depth, bucket_of(rows), chosen.key, chosen.reason)
        announce = news not in _announced
        _announced.add(news)
    if announce:
        for listener in tuple(_listeners):
            listener(chosen, rows, (groups, rank, depth), device)
    return chosen


def _first_allowed(
    plans: tuple[Plan, ...], rows: int, shape: tuple[int, int, int], device: Device, against: str
) -> Plan:
    reasons = []
    for plan in plans:
        if plan.path in ("empty", "dequant"):
            break
        verdict = verified(plan, rows, shape, device, against=against)
        if verdict is not None and verdict.same:
            return plan
        why = "not compared with the stock path on this device" if verdict is None else f"differs: {verdict.difference}"
        reasons.append(f"{plan.key} {why}")
    return Plan(plan.path, plan.backend, plan.order, plan.config, plan.source, "; ".join(reasons))


@cache
def _is_installed(backend: str) -> bool:
    name = "triton" if backend == "triton" else f"memreclaim_kernels.{backend}"
    return importlib.util.find_spec(name) is not None


def default(path: str, device: Device) -> Plan:
    """A legal plan of a kernel family by the portable kernels, or ``dequant``; for benches and tests.

    Raises ``ValueError`` for a word that is no path.
    """
    if path == "dequant":
        return Plan("dequant", backend_for(device))
    rows = {"gemv": 1, "small": SMALL_ROWS, "mid": MID_ROWS, "large": MID_ROWS}.get(path)
    if rows is None:
        message = f"{path!r} is no path"
        raise ValueError(message)
    plan = next(_triton_offers(rows, "gemv" if path == "gemv" else "chain"))
    return Plan("large", "triton", "chain", plan.config) if path == "large" else plan


def _is_usable(backend: str) -> bool:
    return backend not in _disabled and _is_installed(backend)


def _cuda() -> Any:  # noqa: ANN401  see memreclaim_kernels.native
    from memreclaim_kernels import native

    return native
