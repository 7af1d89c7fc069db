"""One report of many ranks: sums, minima where the weakest decides, and what differs that should not."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from memreclaim.rank_snapshot import SCHEMA_VERSION

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

BAD: Final = frozenset({"mismatch", "not_finite"})


@dataclass(frozen=True)
class Sight:
    """What the head node knows of one rank."""

    url: str
    report: dict[str, Any] | None
    """The rank's own report, None when it does not answer."""
    error: str | None
    seen_at: float | None
    """When it last answered, seconds since the epoch."""

    def to_dict(self) -> dict[str, Any]:
        """JSON-ready."""
        return dict(vars(self))


def merged(sights: Sequence[Sight], expected: int, now: float) -> dict[str, Any]:
    """Report of all ranks; what is missing or differs is named, never averaged away."""
    live = [sight.report for sight in sights if sight.report is not None]
    pools = [report["kv_pool"] for report in live if report["kv_pool"]]
    unnamed = expected - len(sights)
    missing = [sight.url for sight in sights if sight.report is None]
    missing += [f"{unnamed} more, not named to this head node"] if unnamed > 0 else []
    return {
        "schema_version": SCHEMA_VERSION,
        "kind": "head",
        "taken_at": now,
        "ranks_expected": expected,
        "missing": missing,
        "diverged": diverged(live),
        "mismatched": mismatched(live),
        "ready": not missing and all(report["ready"] for report in live),
        "gross_bytes": sum(report["gross_bytes"] for report in live),
        "twin_bytes": sum(report["twin_bytes"] for report in live),
        "net_bytes": sum(report["net_bytes"] for report in live),
        "kv_tokens": min((pool["tokens"] for pool in pools), default=None),
        "kv_tokens_gained": min((pool["gained_tokens"] for pool in pools), default=None),
        "ranks": [sight.to_dict() for sight in sights],
    }


def mismatched(reports: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Layers without an exact twin, and served twins that changed, each with its rank."""
    return [
        {"rank": name_of(report), "layer": layer["name"], "component": layer["component"], "damaged": layer["damaged"]}
        for report in reports
        for layer in report["layers"]
        if layer["reason"] in BAD or layer["damaged"]
    ]


def diverged(reports: Sequence[dict[str, Any]]) -> list[str]:
    """One sentence per property that should be the same on all ranks and is not, saying which rank has what."""
    stages: dict[Any, list[dict[str, Any]]] = defaultdict(list)
    for report in reports:
        stages[report["identity"]["pp_rank"]].append(report)
    sentences = [_differs(what, reports, of) for what, of in _EVERYWHERE.items()]
    # Ranks of one pipeline stage hold the same layers; stages differ by design.
    sentences += [_differs(what, stage, of) for stage in stages.values() for what, of in _IN_A_STAGE.items()]
    return [sentence for sentence in sentences if sentence] + _doubles(reports)


def name_of(report: dict[str, Any]) -> str:
    """``TP1``, with other ranks where they are not 0."""
    identity = report["identity"]
    others = [f"{name[:2].upper()}{identity[name]}" for name in ("pp_rank", "dp_rank") if identity[name]]
    return " ".join([f"TP{identity['tp_rank']}", *others])


def _reclaimed(report: dict[str, Any]) -> str:
    names = [layer["name"] for layer in report["layers"] if layer["state"] == "reclaimed"]
    return f"{len(names)} of {len(report['layers'])}"


_EVERYWHERE: Final[dict[str, Callable[[dict[str, Any]], object]]] = {
    "mode": lambda report: report["mode"],
    "numerics": lambda report: report["numerics"],
    "version": lambda report: report["build"]["version"],
    "model": lambda report: report["identity"]["model_name"],
    "torch": lambda report: report["build"]["torch_version"],
}
_IN_A_STAGE: Final[dict[str, Callable[[dict[str, Any]], object]]] = {
    "layers reclaimed": _reclaimed,
    "net bytes": lambda report: report["net_bytes"],
}


def _differs(what: str, reports: Sequence[dict[str, Any]], of: Callable[[dict[str, Any]], object]) -> str | None:
    by_value: dict[object, list[str]] = defaultdict(list)
    for report in reports:
        by_value[of(report)].append(name_of(report))
    if len(by_value) < 2:  # noqa: PLR2004
        return None
    return f"{what}: " + "; ".join(f"{value} on {', '.join(names)}" for value, names in by_value.items())


def _doubles(reports: Sequence[dict[str, Any]]) -> list[str]:
    """Two services that say they are the same rank."""
    names = [str(sorted(report["identity"].items())) for report in reports]
    twice = sorted({name_of(report) for report, name in zip(reports, names, strict=True) if names.count(name) > 1})
    return [f"identity: more than one service is {name}" for name in twice]
