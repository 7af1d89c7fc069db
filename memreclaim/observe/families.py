"""The metrics of a rank, as plain data from a snapshot.

How they reach Prometheus is the business of :mod:`memreclaim.observe.metrics` and :mod:`memreclaim.observe.exposition`.
Names are without the prefix ``memreclaim_``. Every counter's label values start at 0: ``increase()`` does not see a
counter that is born at 1.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import product
from typing import TYPE_CHECKING, Final

from memreclaim.journal import OPERATIONS, RESULTS, TRIGGERS
from memreclaim.rank_snapshot import RankState
from memreclaim.states import Phase, State

if TYPE_CHECKING:
    from collections.abc import Iterator

    from memreclaim.journal import Histogram
    from memreclaim.rank_snapshot import RankSnapshot

ID_LABELS: Final = ("model_name", "engine_type", "tp_rank", "pp_rank", "dp_rank", "moe_ep_rank")
ROW_BUCKETS: Final = ("1", "2..8", "9..192", ">192")
PATHS: Final = ("gemv", "small", "mid", "large", "dequant", "stock")
REFUSED: Final = (
    "data_ptr",
    "const_data_ptr",
    "__dlpack__",
    "__cuda_array_interface__",
    "storage",
    "share_memory_",
    "grouped_projection",
)
READS: Final = ("state_dict", "pickle", "deepcopy", "numpy", "aten.clone.default", "grouped_projection")
ROUTES: Final = ("/metrics", "/healthz", "/readyz", "/v1/report", "/v1/layers")
FAILURES: Final = ("http", "operation", "audit", "probe", "mirror")

Labels = tuple[str, ...]


@dataclass(frozen=True)
class Spec:
    """One metric."""

    name: str
    kind: str
    """``gauge``, ``counter`` or ``histogram``."""
    labels: Labels
    """Beyond :data:`ID_LABELS`."""
    help: str


@dataclass(frozen=True)
class Family:
    """One metric with its values now; counters and gauges have numbers, histograms have histograms."""

    spec: Spec
    numbers: dict[Labels, float]
    histograms: dict[Labels, Histogram]


def _spec(name: str, kind: str, labels: str, text: str) -> tuple[str, Spec]:
    return name, Spec(name, kind, tuple(labels.split()), text)


SPECS: Final = dict(
    (
        _spec(
            "build_info",
            "gauge",
            "version torch_version triton_version device_name compute_capability",
            "Always 1; the labels say what runs here.",
        ),
        _spec("state", "gauge", "state", "1 for the state that the rank is in, 0 for the others."),
        _spec(
            "ranks_expected", "gauge", "", "Ranks that the engine runs; exported by the first rank and the head node."
        ),
        _spec("layers", "gauge", "status", "Layers by where they stand."),
        _spec(
            "layer_mismatched_elements",
            "gauge",
            "layer component",
            "Elements whose bits differ: of a kept weight from its twin, or (at least) of a served twin that changed.",
        ),
        _spec("layer_reclaimed", "gauge", "layer component", "1 when the bf16 weight is dropped."),
        _spec("gross_bytes", "gauge", "component", "bf16 bytes released now."),
        _spec("twin_bytes", "gauge", "component", "Bytes that twins cost now."),
        _spec("net_bytes", "gauge", "component", "Gross minus twin; never add the three."),
        _spec("freed_bytes", "gauge", "measure", "The same gross bytes in up to three measures; never add them."),
        _spec("peak_extra_bytes", "gauge", "", "Most memory above the starting point while reclaiming."),
        _spec("kv_pool_bytes", "gauge", "pool", "Bytes of the KV pool, summed from its tensors."),
        _spec("kv_pool_tokens", "gauge", "", "Tokens that the KV pool holds when it is full."),
        _spec(
            "kv_pool_gained_tokens", "gauge", "limited_by", "Tokens that reclaiming added, and what bounds the pool."
        ),
        _spec(
            "kv_pool_head_room_bytes",
            "gauge",
            "",
            "Freed bytes that the pool did not take, all of them when it is pinned.",
        ),
        _spec("device_memory_bytes", "gauge", "kind source", "Memory as its source reports it; figures overlap."),
        _spec("proofs_total", "counter", "result", "Proofs of a layer."),
        _spec("proof_duration_seconds", "histogram", "", "Time to build and prove one layer's twin."),
        _spec("last_audit_timestamp_seconds", "gauge", "", "When every served twin was last known to be whole."),
        _spec("audit_interval_seconds", "gauge", "", "Time between audits; 0 when they are off."),
        _spec("operations_total", "counter", "operation trigger result", "Operations on this rank."),
        _spec("operation_duration_seconds", "histogram", "operation trigger result", "Time that an operation took."),
        _spec(
            "kernel_duration_seconds", "histogram", "path rows", "Sampled time of one projection served from a twin."
        ),
        _spec("kernel_baseline_seconds", "gauge", "path rows", "Time of one projection, measured before the drop."),
        _spec("calls_total", "counter", "path phase", "Projections routed from Python; graph replays are not seen."),
        _spec(
            "materializations_total",
            "counter",
            "operation",
            "Exact bf16 copies of a dropped weight handed to a reader.",
        ),
        _spec(
            "tag_refusals_total", "counter", "operation", "Readers that asked for the raw memory of a dropped weight."
        ),
        _spec("http_requests_total", "counter", "method route code", "Requests to this rank's service."),
        _spec("http_request_duration_seconds", "histogram", "method route code", "Time to answer a request."),
        _spec("internal_errors_total", "counter", "where", "Errors inside memreclaim that were survived."),
    )
)
"""Every metric, in the order in which it is exported."""

_INITIAL: Final[dict[str, tuple[Labels, ...]]] = {
    "proofs_total": (("exact",), ("mismatch",), ("error",)),
    "operations_total": tuple(product(OPERATIONS, TRIGGERS, RESULTS)),
    "calls_total": tuple(product(PATHS, map(str, Phase))),
    "materializations_total": tuple((name,) for name in READS),
    "tag_refusals_total": tuple((name,) for name in REFUSED),
    "http_requests_total": tuple(("GET", route, "200") for route in ROUTES),
    "internal_errors_total": tuple((where,) for where in FAILURES),
}


def families(rank: RankSnapshot) -> Iterator[Family]:
    """All metrics of ``rank``, those without a value now included (they have no samples)."""
    numbers = _gauges(rank)
    for spec in SPECS.values():
        if spec.kind == "histogram":
            yield Family(spec, {}, {key[1:]: value for key, value in rank.histograms.items() if key[0] == spec.name})
        elif spec.kind == "counter":
            counted = dict.fromkeys(_INITIAL[spec.name], 0.0)
            counted |= {key[1:]: float(value) for key, value in rank.counts.items() if key[0] == spec.name}
            yield Family(spec, counted, {})
        else:
            yield Family(spec, numbers.get(spec.name, {}), {})


def _gauges(rank: RankSnapshot) -> dict[str, dict[Labels, float]]:
    return {
        "build_info": {tuple(vars(rank.build).values()): 1},
        "state": {(state.value,): float(state is rank.state) for state in RankState},
        "ranks_expected": {(): rank.ranks} if rank.identity.first else {},
        "audit_interval_seconds": {(): rank.audit.interval_seconds},
        "last_audit_timestamp_seconds": {(): rank.audit.last_timestamp},
        "kernel_baseline_seconds": {(path, rows): value for (path, rows), value in rank.baselines.seconds.items()},
        "device_memory_bytes": {(figure.kind, figure.source): figure.n_bytes for figure in rank.memory},
        **_layer_gauges(rank),
        **_byte_gauges(rank),
    }


def _layer_gauges(rank: RankSnapshot) -> dict[str, dict[Labels, float]]:
    by_state: dict[Labels, float] = {
        (state.value,): float(sum(layer.state is state for layer in rank.layers)) for state in State
    }
    return {
        "layers": by_state,
        "layer_mismatched_elements": {(layer.name, layer.component): rank.mismatched(layer) for layer in rank.layers},
        "layer_reclaimed": {
            (layer.name, layer.component): float(layer.state is State.RECLAIMED) for layer in rank.layers
        },
    }


def _byte_gauges(rank: RankSnapshot) -> dict[str, dict[Labels, float]]:
    totals = {"target": (0, 0, 0), **rank.totals()}
    gauges: dict[str, dict[Labels, float]] = {
        f"{name}_bytes": {(component,): sums[index] for component, sums in totals.items()}
        for index, name in enumerate(("gross", "twin", "net"))
    }
    measured = {("nominal",): rank.freed.nominal, ("allocator",): rank.freed.allocator, ("device",): rank.freed.device}
    gauges["freed_bytes"] = {key: value for key, value in measured.items() if value is not None}
    if rank.peak_extra_bytes is not None:
        gauges["peak_extra_bytes"] = {(): rank.peak_extra_bytes}
    if rank.pool is not None:
        gauges["kv_pool_bytes"] = {(name,): n_bytes for name, n_bytes in rank.pool.n_bytes.items()}
        gauges["kv_pool_tokens"] = {(): rank.pool.tokens}
        gauges["kv_pool_gained_tokens"] = {(rank.pool.limited_by,): rank.pool.gained_tokens}
        gauges["kv_pool_head_room_bytes"] = {(): rank.pool.head_room_bytes}
    return gauges
