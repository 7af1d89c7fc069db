"""A rank's snapshot as JSON: what ``/v1/report`` answers, the status page draws, and the head node merges."""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING, Any, Final

from memreclaim.rank_snapshot import SCHEMA_VERSION

if TYPE_CHECKING:
    from memreclaim.rank_snapshot import RankSnapshot
    from memreclaim.snapshot import LayerReport

_ROWS: Final = ("1", "2..8", "9..192", ">192")


def report(rank: RankSnapshot) -> dict[str, Any]:
    """The whole snapshot, bytes as integers, times in seconds."""
    totals = rank.totals()
    gross, twin = sum(sums[0] for sums in totals.values()), sum(sums[1] for sums in totals.values())
    return {
        "schema_version": SCHEMA_VERSION,
        "kind": "rank",
        "version": rank.version,
        "taken_at": rank.taken_at,
        "identity": asdict(rank.identity),
        "build": asdict(rank.build),
        "mode": rank.mode,
        "numerics": rank.numerics,
        "state": rank.state.value,
        "ready": rank.ready,
        "running": rank.running,
        "ranks": rank.ranks,
        "gross_bytes": gross,
        "twin_bytes": twin,
        "net_bytes": gross - twin,
        "freed_bytes": asdict(rank.freed),
        "peak_extra_bytes": rank.peak_extra_bytes,
        "layers": layers(rank),
        "kv_pool": None if rank.pool is None else rank.pool.to_dict(),
        "memory": [figure.to_dict() for figure in rank.memory],
        "kernels": kernels(rank),
        "calls": _counted(rank, "calls_total", "path", "phase"),
        "materializations": _counted(rank, "materializations_total", "operation"),
        "tag_refusals": _counted(rank, "tag_refusals_total", "operation"),
        "operations": _counted(rank, "operations_total", "operation", "trigger", "result"),
        "proofs": _counted(rank, "proofs_total", "result"),
        "internal_errors": rank.total("internal_errors_total"),
        "audit": {
            "interval_seconds": rank.audit.interval_seconds,
            "last_timestamp": rank.audit.last_timestamp or None,
            "damaged": dict(rank.audit.damaged),
        },
        "events": [event.to_dict() for event in rank.events],
    }


def layers(rank: RankSnapshot) -> list[dict[str, Any]]:
    """Each layer with what is wrong with it, if anything is."""
    return [_layer(rank, layer) for layer in rank.layers]


def kernels(rank: RankSnapshot) -> list[dict[str, Any]]:
    """Per row bucket: stock and twin before the drop, mean of the samples since; None where nothing is known."""
    rows = []
    for bucket in _ROWS:
        samples = [h for key, h in rank.histograms.items() if key[0] == "kernel_duration_seconds" and key[2] == bucket]
        n = sum(sample.count for sample in samples)
        rows.append(
            {
                "rows": bucket,
                "stock_seconds": rank.baselines.seconds.get(("stock", bucket)),
                "twin_seconds": rank.baselines.seconds.get(("twin", bucket)),
                "sampled_seconds": sum(sample.total for sample in samples) / n if n else None,
                "samples": n,
            }
        )
    return rows


def _layer(rank: RankSnapshot, layer: LayerReport) -> dict[str, Any]:
    damage = rank.damage(layer)
    return {**layer.to_dict(), "mismatched_elements": rank.mismatched(layer), "damaged": bool(damage)}


def _counted(rank: RankSnapshot, metric: str, *labels: str) -> list[dict[str, Any]]:
    return [
        {**dict(zip(labels, key[1:], strict=True)), "count": n}
        for key, n in sorted(rank.counts.items())
        if key[0] == metric
    ]
