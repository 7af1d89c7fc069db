"""Two ways for a rank's metrics into Prometheus, both fed by snapshots.

- :class:`Collector` reads a snapshot when it is scraped. It is the rule.
- :class:`Mirror` copies snapshots into metric objects. Engines that set ``PROMETHEUS_MULTIPROC_DIR`` merge files that
  only metric objects write, and ask no collector; the metrics then appear on the engine's own ``/metrics``.

``prometheus_client`` chooses its storage once, when it is imported, by that variable. SGLang loads plug-ins before it
sets it, so nothing here imports the package before a rank asks for its metrics.
"""

from __future__ import annotations

import os
import threading
import weakref
from typing import TYPE_CHECKING, Any, cast

from memreclaim.observe.families import ID_LABELS, SPECS, families
from memreclaim.rank import Rank

if TYPE_CHECKING:
    from collections.abc import Iterable

    from prometheus_client import CollectorRegistry
    from prometheus_client.metrics_core import Metric

    from memreclaim.observe.families import Family, Labels, Spec
    from memreclaim.rank_snapshot import RankSnapshot
    from memreclaim.reclaimer import Reclaimer

PREFIX = "memreclaim_"
_mirrors: weakref.WeakKeyDictionary[Reclaimer, Mirror] = weakref.WeakKeyDictionary()


def register(source: Reclaimer | Rank, registry: object) -> Collector | Mirror:
    """Export ``source`` in ``registry``, a ``prometheus_client.CollectorRegistry``.

    In multiprocess mode a :class:`Mirror` is made instead, whose ``update`` must be called; a rank's service does that.
    """
    rank = source if isinstance(source, Rank) else Rank(source)
    known = cast("CollectorRegistry", registry)
    if multiprocess():
        return mirror_of(rank, known)
    collector = Collector(rank)
    known.register(cast("Any", collector))
    return collector


def mirror_of(rank: Rank, registry: CollectorRegistry | None = None) -> Mirror:
    """The one mirror of a rank's reclaimer in this process: two would count everything twice in the same files."""
    known = _mirrors.get(rank.reclaimer)
    if known is not None:
        known.rank = rank
        return known
    from prometheus_client import CollectorRegistry

    made = _mirrors[rank.reclaimer] = Mirror(rank, CollectorRegistry() if registry is None else registry)
    return made


def multiprocess() -> bool:
    """Whether this process writes its metrics to files that another one merges."""
    return "PROMETHEUS_MULTIPROC_DIR" in os.environ


class Collector:
    """A ``prometheus_client`` collector."""

    def __init__(self, rank: Rank) -> None:
        """Read ``rank`` at each scrape."""
        self.rank = rank

    def collect(self) -> Iterable[Metric]:
        """All metrics, from one snapshot."""
        snapshot = self.rank.snapshot()
        identity = tuple(snapshot.identity.labels().values())
        return [_metric(family, identity) for family in families(snapshot)]

    def describe(self) -> Iterable[Metric]:
        """Names and types without values, so that registering takes no snapshot."""
        return [_empty(spec) for spec in SPECS.values()]


def _empty(spec: Spec) -> Metric:
    from prometheus_client import core

    kinds: dict[str, Any] = {
        "gauge": core.GaugeMetricFamily,
        "counter": core.CounterMetricFamily,
        "histogram": core.HistogramMetricFamily,
    }
    metric: Metric = kinds[spec.kind](PREFIX + spec.name, spec.help, labels=(*ID_LABELS, *spec.labels))
    return metric


def _metric(family: Family, identity: Labels) -> Metric:
    metric: Any = _empty(family.spec)
    for labels, value in family.numbers.items():
        metric.add_metric((*identity, *labels), value)
    for labels, histogram in family.histograms.items():
        running, cumulative = 0, []
        for bound, n in zip((*histogram.bounds, float("inf")), histogram.counts, strict=True):
            running += n
            cumulative.append(("+Inf" if bound == float("inf") else repr(bound), running))
        metric.add_metric((*identity, *labels), cumulative, histogram.total)
    return cast("Metric", metric)


class Mirror:
    """Copies snapshots of a rank into metric objects.

    Gauges use ``livemostrecent``: each rank has series of its own by its identity, without a ``pid`` label, and those
    of a process that is marked dead disappear. A gauge whose label value went away reads 0, since files cannot forget
    a series.
    """

    def __init__(self, rank: Rank, registry: CollectorRegistry) -> None:
        """Make one metric object per family in ``registry``."""
        self.rank = rank
        self._lock = threading.Lock()
        self._metrics = {name: _object(spec, registry) for name, spec in SPECS.items()}
        self._written: dict[tuple[str, Labels], Any] = {}

    def update(self) -> None:
        """Write what changed since the last call; costs about 1 ms for 43 layers."""
        snapshot = self.rank.snapshot()
        with self._lock:
            for family in families(snapshot):
                self._write(family, snapshot)

    def _write(self, family: Family, snapshot: RankSnapshot) -> None:
        name, identity = family.spec.name, tuple(snapshot.identity.labels().values())
        gone = {key[1] for key in self._written if key[0] == name} - set(family.numbers) - set(family.histograms)
        for labels in gone if family.spec.kind == "gauge" else ():
            self._set(name, identity, labels, 0.0)
        for labels, value in family.numbers.items():
            if family.spec.kind == "gauge":
                self._set(name, identity, labels, value)
            else:
                self._add(name, identity, labels, value)
        for labels, histogram in family.histograms.items():
            before = self._written.get((name, labels))
            child = self._metrics[name].labels(*identity, *labels)
            for index, n in enumerate(histogram.counts):
                child._buckets[index].inc(n - (before.counts[index] if before else 0))
            child._sum.inc(histogram.total - (before.total if before else 0.0))
            self._written[name, labels] = histogram

    def _set(self, name: str, identity: Labels, labels: Labels, value: float) -> None:
        if self._written.get((name, labels)) != value:
            self._metrics[name].labels(*identity, *labels).set(value)
            self._written[name, labels] = value

    def _add(self, name: str, identity: Labels, labels: Labels, value: float) -> None:
        before = self._written.get((name, labels))
        if before != value:
            self._metrics[name].labels(*identity, *labels).inc(value - (before or 0.0))
            self._written[name, labels] = value


def _object(spec: Spec, registry: CollectorRegistry) -> Any:  # noqa: ANN401  three classes without a common interface
    from prometheus_client import Counter, Gauge, Histogram

    from memreclaim.journal import BOUNDS

    labels = (*ID_LABELS, *spec.labels)
    if spec.kind == "gauge":
        return Gauge(PREFIX + spec.name, spec.help, labels, registry=registry, multiprocess_mode="livemostrecent")
    if spec.kind == "counter":
        return Counter(PREFIX + spec.name, spec.help, labels, registry=registry)
    return Histogram(PREFIX + spec.name, spec.help, labels, registry=registry, buckets=BOUNDS[spec.name])
