"""The text that a scrape gets, written straight from a snapshot.

``prometheus_client`` can do it from the collector as well and takes 3 to 4 times as long, of which most is sorting
and checking labels sample by sample. The two are compared byte for byte (sorted) by tests.
"""

from __future__ import annotations

from functools import cache, lru_cache
from typing import TYPE_CHECKING, Final

from memreclaim.observe.families import families

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from memreclaim.journal import Histogram
    from memreclaim.observe.families import Family, Labels
    from memreclaim.rank_snapshot import RankSnapshot

PREFIX: Final = "memreclaim_"
TEXT: Final = "text/plain; version=0.0.4; charset=utf-8"
OPENMETRICS: Final = "application/openmetrics-text; version=1.0.0; charset=utf-8"


def exposition(snapshot: RankSnapshot, accept: str = "") -> tuple[bytes, str]:
    """One scrape of a rank and its content type; OpenMetrics when the header ``accept`` asks for it."""
    return render(families(snapshot), snapshot.identity.labels(), accept)


def render(found: Iterable[Family], identity: dict[str, str], accept: str = "") -> tuple[bytes, str]:
    """Text of ``found`` with the labels ``identity`` on each sample, and its content type."""
    openmetrics = "application/openmetrics-text" in accept
    own = ",".join(f'{name}="{_escaped(value)}"' for name, value in identity.items())
    lines = [line for family in found for line in _family(family, own, openmetrics=openmetrics)]
    if openmetrics:
        lines.append("# EOF")
    return ("\n".join(lines) + "\n").encode(), OPENMETRICS if openmetrics else TEXT


def _family(family: Family, own: str, *, openmetrics: bool) -> Iterator[str]:
    spec = family.spec
    name = PREFIX + spec.name
    described = name.removesuffix("_total") if openmetrics and spec.kind == "counter" else name
    text = spec.help.replace("\\", "\\\\").replace("\n", "\\n")
    yield f"# HELP {described} {text}"
    yield f"# TYPE {described} {spec.kind}"
    for labels, value in family.numbers.items():
        yield f"{name}{{{_labels(own, spec.labels, labels)}}} {_number(value)}"
    for labels, histogram in family.histograms.items():
        yield from _histogram(name, _labels(own, spec.labels, labels), histogram)


def _histogram(name: str, labels: str, histogram: Histogram) -> Iterator[str]:
    total = 0
    for bound, n in zip(_bounds(histogram.bounds), histogram.counts, strict=True):
        total += n
        yield f'{name}_bucket{{{labels},le="{bound}"}} {total}.0'
    yield f"{name}_count{{{labels}}} {total}.0"
    yield f"{name}_sum{{{labels}}} {_number(histogram.total)}"


@cache
def _bounds(bounds: tuple[float, ...]) -> tuple[str, ...]:
    return (*map(repr, bounds), "+Inf")


@lru_cache(4096)
def _labels(own: str, names: Labels, values: Labels) -> str:
    """Text of one label set; a rank has a few hundred that hardly change from scrape to scrape."""
    more = [f'{name}="{_escaped(value)}"' for name, value in zip(names, values, strict=True)]
    return ",".join([own, *more] if own else more)


def _escaped(value: str) -> str:
    return value.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n") if _special(value) else value


def _special(value: str) -> bool:
    return "\\" in value or '"' in value or "\n" in value


def _number(value: float) -> str:
    return repr(float(value))
