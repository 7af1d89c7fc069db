"""What the dashboards show, as data: rows of panels, each with title, description, unit and queries."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Final

RANK: Final = 'job=~"$job",instance=~"$instance",model_name=~"$model_name",tp_rank=~"$tp_rank"'
"""Selector of a rank's series by the dashboard's variables."""
_HEAD: Final = 'job=~"$job",model_name=~"$model_name"'
_RATE: Final = "[$__rate_interval]"


@dataclass(frozen=True)
class Query:
    """One query of a panel."""

    expression: str
    legend: str = "TP{{tp_rank}}"
    table: bool = False
    """Asked for one moment, for tables and stats of labels."""
    heatmap: bool = False


@dataclass(frozen=True)
class Panel:
    """One panel; ``kind`` is a panel type of Grafana."""

    kind: str
    title: str
    description: str
    unit: str
    queries: tuple[Query, ...]
    width: int = 8
    height: int = 8
    bad_above: float | None = None
    """Red from here on."""
    bad_below: float | None = None
    """Red below."""
    mappings: dict[str, tuple[str, str]] = field(default_factory=dict)
    """Value to text and colour."""


@dataclass(frozen=True)
class Row:
    """One row."""

    title: str
    panels: tuple[Panel, ...]


def _of(metric: str, **labels: str) -> str:
    selector = ",".join([RANK, *(f'{name}="{value}"' for name, value in labels.items())])
    return f"memreclaim_{metric}{{{selector}}}"


def _quantile(q: float) -> Query:
    buckets = f"sum by (le, rows) (rate({_of('kernel_duration_seconds_bucket')}{_RATE}))"
    return Query(f"histogram_quantile({q}, {buckets})", f"p{q * 100:.0f} {{{{rows}}}} rows")


def _mean(histogram: str, by: str, window: str = "") -> str:
    """Mean of a histogram's values: of all, or of those in ``window``."""
    parts = (f"{_of(f'{histogram}_{part}')}{window}" for part in ("sum", "count"))
    return " / ".join(f"sum by ({by}) (rate({part}))" if window else f"sum by ({by}) ({part})" for part in parts)


_MEAN_TWIN: Final = _mean("kernel_duration_seconds", "rows", _RATE)
_STATES: Final = {
    "0": ("off", "text"),
    "1": ("starting", "blue"),
    "2": ("working", "purple"),
    "3": ("ready", "green"),
    "4": ("a layer does not match", "orange"),
    "5": ("failed", "red"),
}
_STATE_NUMBER: Final = " or ".join(
    f"({number} * ({_of('state', state=state)} == 1))"
    for number, state in enumerate(("off", "starting", "working", "ready", "degraded", "failed"))
)

SUMMARY: Final = Row(
    "Summary",
    (
        Panel(
            "stat",
            "Net memory gained",
            "bf16 bytes released minus what the twins cost, over all ranks.",
            "bytes",
            (Query(f"sum({_of('net_bytes')})", "net"),),
            width=5,
            height=5,
        ),
        Panel(
            "stat",
            "KV tokens gained",
            "Tokens that reclaiming added: the least over ranks, since the pool follows the weakest.",
            "short",
            (Query(f"min(sum without (limited_by) ({_of('kv_pool_gained_tokens')}))", "tokens"),),
            width=5,
            height=5,
        ),
        Panel(
            "stat",
            "Layers that do not match",
            "Kept layers without an exact twin, and served twins that changed.",
            "short",
            (Query(f"count({_of('layer_mismatched_elements')} > 0) or vector(0)", "layers"),),
            width=4,
            height=5,
            bad_above=1,
        ),
        Panel(
            "stat",
            "Ranks up",
            "Ranks that report, and how many the engine runs.",
            "short",
            (
                Query(f"count({_of('build_info')}) or vector(0)", "up"),
                Query(f"max(memreclaim_ranks_expected{{{_HEAD}}})", "expected"),
            ),
            width=5,
            height=5,
        ),
        Panel(
            "stat",
            "Layers reclaimed",
            "Layers whose bf16 weight is dropped, over all ranks.",
            "short",
            (Query(f"sum({_of('layers', status='reclaimed')})", "layers"),),
            width=5,
            height=5,
        ),
        Panel(
            "state-timeline",
            "State of each rank",
            "Which state each rank was in.",
            "short",
            (Query(_STATE_NUMBER),),
            width=24,
            height=6,
            mappings=_STATES,
        ),
    ),
)
LAYERS: Final = Row(
    "Layers",
    (
        Panel(
            "timeseries",
            "Layers by state",
            "How many layers are in each state.",
            "short",
            (Query(f"sum by (status) ({_of('layers')})", "{{status}}"),),
            width=10,
        ),
        Panel(
            "table",
            "Layers that do not match or were kept",
            "Every layer that is not reclaimed, and every one with differing elements.",
            "short",
            (Query(f"{_of('layer_mismatched_elements')} > 0 or ({_of('layer_reclaimed')} == 0) * 0", table=True),),
            width=14,
        ),
    ),
)
POOL: Final = Row(
    "KV pool",
    (
        Panel(
            "timeseries",
            "Capacity",
            "Tokens that the pool holds when it is full.",
            "short",
            (Query(_of("kv_pool_tokens")),),
        ),
        Panel(
            "timeseries",
            "Tokens gained",
            "Tokens that reclaiming added, with what bounds the pool.",
            "short",
            (Query(_of("kv_pool_gained_tokens"), "TP{{tp_rank}}, limited by {{limited_by}}"),),
        ),
        Panel(
            "timeseries",
            "Size and head-room",
            "Bytes of the pool, and freed bytes that it did not take.",
            "bytes",
            (
                Query(_of("kv_pool_bytes"), "TP{{tp_rank}} {{pool}}"),
                Query(_of("kv_pool_head_room_bytes"), "TP{{tp_rank}} head-room"),
            ),
        ),
    ),
)
MEMORY: Final = Row(
    "Device memory",
    (
        Panel(
            "timeseries",
            "Gross, twin and net",
            "bf16 bytes released, what twins cost, and the difference: never add the three.",
            "bytes",
            (
                Query(f"sum by (tp_rank) ({_of('gross_bytes')})", "TP{{tp_rank}} gross"),
                Query(f"sum by (tp_rank) ({_of('twin_bytes')})", "TP{{tp_rank}} twins"),
                Query(f"sum by (tp_rank) ({_of('net_bytes')})", "TP{{tp_rank}} net"),
            ),
        ),
        Panel(
            "timeseries",
            "Freed, in three measures",
            "The same gross bytes by shapes, by the allocator and by the driver.",
            "bytes",
            (
                Query(_of("freed_bytes"), "TP{{tp_rank}} {{measure}}"),
                Query(_of("peak_extra_bytes"), "TP{{tp_rank}} most extra while reclaiming"),
            ),
        ),
        Panel(
            "timeseries",
            "Memory of device and machine",
            "As each source reports it; the figures overlap.",
            "bytes",
            (Query(_of("device_memory_bytes"), "TP{{tp_rank}} {{source}} {{kind}}"),),
        ),
    ),
)
KERNELS: Final = Row(
    "Kernels",
    (
        Panel(
            "timeseries",
            "Mean time of one projection",
            "Sampled twin time against the stock path as it was measured before the drop.",
            "s",
            (
                Query(_MEAN_TWIN, "twin, {{rows}} rows"),
                Query(f"max by (rows) ({_of('kernel_baseline_seconds', path='stock')})", "stock before, {{rows}} rows"),
            ),
            width=12,
        ),
        Panel(
            "timeseries",
            "Quantiles",
            "Median and 99th percentile of the samples.",
            "s",
            (_quantile(0.5), _quantile(0.99)),
            width=12,
        ),
        Panel(
            "heatmap",
            "Samples",
            "Distribution of all samples.",
            "s",
            (Query(f"sum by (le) (increase({_of('kernel_duration_seconds_bucket')}{_RATE}))", "{{le}}", heatmap=True),),
            width=12,
        ),
        Panel(
            "timeseries",
            "Calls by path",
            "Projections routed from Python; graph replays are not seen.",
            "cps",
            (
                Query(
                    f"sum by (path, phase) (rate({_of('calls_total')}{_RATE}))",
                    "{{path}} {{phase}}",
                ),
            ),
            width=12,
        ),
    ),
)
OPERATIONS: Final = Row(
    "Operations",
    (
        Panel(
            "timeseries",
            "Operations",
            "Reclaims, restores, audits and updates, by result.",
            "short",
            (
                Query(
                    f"sum by (operation, result) (increase({_of('operations_total')}{_RATE}))",
                    "{{operation}} {{result}}",
                ),
            ),
        ),
        Panel(
            "timeseries",
            "Duration",
            "Mean time that an operation took.",
            "s",
            (
                Query(
                    _mean("operation_duration_seconds", "operation"),
                    "{{operation}}",
                ),
            ),
        ),
        Panel(
            "timeseries",
            "Time since the last clean audit",
            "Every served twin was whole then.",
            "s",
            (
                Query(f"time() - {_of('last_audit_timestamp_seconds')}"),
                Query(f"max({_of('audit_interval_seconds')})", "interval"),
            ),
        ),
        Panel(
            "timeseries",
            "Proofs",
            "Layers proven, by result.",
            "short",
            (Query(f"sum by (result) ({_of('proofs_total')})", "{{result}}"),),
            width=8,
        ),
        Panel(
            "timeseries",
            "Time of a proof",
            "Mean time to build and prove one layer's twin.",
            "s",
            (Query(_mean("proof_duration_seconds", "tp_rank")),),
            width=8,
        ),
        Panel(
            "timeseries",
            "Copies and refusals",
            "Exact bf16 copies handed to a reader, and readers that met a tag.",
            "short",
            (
                Query(f"sum by (tp_rank) (increase({_of('materializations_total')}{_RATE}))", "TP{{tp_rank}} copies"),
                Query(f"sum by (tp_rank) (increase({_of('tag_refusals_total')}{_RATE}))", "TP{{tp_rank}} refusals"),
            ),
            width=8,
        ),
    ),
)
SERVICE: Final = Row(
    "Service",
    (
        Panel(
            "timeseries",
            "Requests",
            "Requests to the ranks' services, by route and code.",
            "reqps",
            (Query(f"sum by (route, code) (rate({_of('http_requests_total')}{_RATE}))", "{{route}} {{code}}"),),
        ),
        Panel(
            "timeseries",
            "Request time",
            "Mean time to answer.",
            "s",
            (
                Query(
                    _mean("http_request_duration_seconds", "route", _RATE),
                    "{{route}}",
                ),
            ),
        ),
        Panel(
            "timeseries",
            "Internal errors",
            "Errors inside memreclaim that were survived.",
            "short",
            (Query(f"sum by (where) (increase({_of('internal_errors_total')}{_RATE}))", "{{where}}"),),
        ),
        Panel(
            "table",
            "What runs",
            "Versions and devices.",
            "short",
            (Query(_of("build_info"), table=True),),
            width=24,
            height=6,
        ),
    ),
)
ROWS: Final = (SUMMARY, LAYERS, POOL, MEMORY, KERNELS, OPERATIONS, SERVICE)
"""The main dashboard."""

_SGLANG: Final = 'model_name=~"$model_name",tp_rank=~"$tp_rank"'
_USAGE: Final = f"max by (model_name) (sglang:token_usage{{{_SGLANG}}})"
_TOKENS: Final = f"max by (model_name) (sglang:max_total_num_tokens{{{_SGLANG}}})"
_GAINED: Final = f"min by (model_name) (sum without (limited_by) ({_of('kv_pool_gained_tokens')}))"
SGLANG_ROWS: Final = (
    Row(
        "KV pool, as the engine and memreclaim see it",
        (
            Panel(
                "timeseries",
                "Tokens",
                "The engine's own capacity, and memreclaim's figure for the same pool.",
                "short",
                (
                    Query(f"max by (model_name) (sglang:max_total_num_tokens{{{_SGLANG}}})", "engine"),
                    Query(f"min by (model_name) ({_of('kv_pool_tokens')})", "memreclaim"),
                ),
                width=12,
            ),
            Panel(
                "timeseries",
                "Usage",
                "Share of the pool in use.",
                "percentunit",
                (Query(f"max by (model_name) (sglang:token_usage{{{_SGLANG}}})", "in use"),),
                width=12,
            ),
            Panel(
                "timeseries",
                "Tokens in use that would not fit without memreclaim",
                "Tokens in use beyond the capacity that the pool would have had.",
                "short",
                (
                    Query(
                        f"clamp_min({_USAGE} * {_TOKENS} - ({_TOKENS} - {_GAINED}), 0)",
                        "tokens",
                    ),
                ),
                width=12,
            ),
            Panel(
                "timeseries",
                "Share of the pool that was gained",
                "Tokens gained against the engine's capacity.",
                "percentunit",
                (
                    Query(
                        f"{_GAINED} / {_TOKENS}",
                        "share",
                    ),
                ),
                width=12,
            ),
        ),
    ),
)
"""The small dashboard that joins the engine's own metrics."""
