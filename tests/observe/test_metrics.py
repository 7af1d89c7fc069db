"""What a scrape gets, and that both ways to it agree."""

from __future__ import annotations

import shutil
import subprocess
import sys
from dataclasses import replace

import pytest
from observed import Still, layer, snapshot
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.openmetrics.parser import text_string_to_metric_families as parse_openmetrics
from prometheus_client.parser import text_string_to_metric_families as parse_text

from memreclaim import Reclaimer
from memreclaim.observe.exposition import exposition
from memreclaim.observe.families import SPECS, families
from memreclaim.observe.metrics import Collector, register
from memreclaim.states import Reason, State

pytestmark = pytest.mark.cpu

CONTRACT = [
    "build_info",
    "state",
    "ranks_expected",
    "layers",
    "layer_mismatched_elements",
    "layer_reclaimed",
    "gross_bytes",
    "twin_bytes",
    "net_bytes",
    "freed_bytes",
    "peak_extra_bytes",
    "kv_pool_bytes",
    "kv_pool_tokens",
    "kv_pool_gained_tokens",
    "device_memory_bytes",
    "proofs_total",
    "proof_duration_seconds",
    "last_audit_timestamp_seconds",
    "audit_interval_seconds",
    "operations_total",
    "operation_duration_seconds",
    "kernel_duration_seconds",
    "kernel_baseline_seconds",
    "calls_total",
    "materializations_total",
    "tag_refusals_total",
    "http_requests_total",
    "http_request_duration_seconds",
    "internal_errors_total",
]


def values(text: str, name: str) -> dict[tuple[tuple[str, str], ...], float]:
    """Samples of one metric by their labels, those of the identity left out."""
    own = {"model_name", "engine_type", "tp_rank", "pp_rank", "dp_rank", "moe_ep_rank"}
    return {
        tuple(sorted((key, value) for key, value in sample.labels.items() if key not in own)): sample.value
        for family in parse_text(text)
        for sample in family.samples
        if sample.name == name
    }


def test_every_name_of_the_contract_is_exported() -> None:
    """No metric of the table is missing, and each has samples on a rank that did something."""
    text = exposition(snapshot())[0].decode()
    assert set(CONTRACT) <= set(SPECS)
    shown = {family.spec.name for family in families(snapshot()) if family.numbers or family.histograms}
    assert shown >= set(CONTRACT) - {"http_request_duration_seconds", "operation_duration_seconds"}
    assert all(f"# TYPE memreclaim_{name} " in text for name in CONTRACT)


def test_both_ways_to_a_scrape_agree() -> None:
    """Our text holds the samples, in any order, that prometheus_client makes of the collector."""
    rank = Still(snapshot(2, mismatch=11))
    registry = CollectorRegistry()
    registry.register(Collector(rank))  # type: ignore[arg-type]

    def samples(text: str) -> set[tuple[object, ...]]:
        return {
            (family.name, family.type, sample.name, tuple(sorted(sample.labels.items())), sample.value)
            for family in parse_text(text)
            for sample in family.samples
        }

    assert samples(exposition(rank.snapshot())[0].decode()) == samples(generate_latest(registry).decode())


def test_openmetrics_parser_accepts_it() -> None:
    """The strict parser of the newer format finds every family, and the end mark."""
    body, content_type = exposition(snapshot(), "application/openmetrics-text; version=1.0.0")
    assert content_type.startswith("application/openmetrics-text; version=1.0.0")
    assert len(list(parse_openmetrics(body.decode()))) == len(SPECS)


@pytest.mark.skipif(shutil.which("promtool") is None, reason="needs Debian's prometheus for promtool")
def test_promtool_finds_nothing_to_complain_about() -> None:
    """Names, units, types and help of every metric pass ``promtool check metrics``."""
    done = subprocess.run(
        ["promtool", "check", "metrics"], input=exposition(snapshot())[0], capture_output=True, check=False
    )
    assert (done.returncode, done.stdout + done.stderr) == (0, b"")


def test_counters_start_at_zero() -> None:
    """Label values that are known beforehand are there before anything happened."""
    text = exposition(replace(snapshot(), counts={}))[0].decode()
    assert set(values(text, "memreclaim_proofs_total").values()) == {0.0}
    assert (("operation", "audit"), ("result", "mismatch"), ("trigger", "timer")) in values(
        text, "memreclaim_operations_total"
    )
    assert (("operation", "data_ptr"),) in values(text, "memreclaim_tag_refusals_total")


def test_mismatch_shows_where_it_is() -> None:
    """The kept layer has its elements and is not reclaimed; a layer with an infinity counts at least one."""
    text = exposition(snapshot(mismatch=11))[0].decode()
    where = (("component", "target"), ("layer", "layers.11.attn.wo_a"))
    assert values(text, "memreclaim_layer_mismatched_elements")[where] == 3.0
    assert values(text, "memreclaim_layer_reclaimed")[where] == 0.0
    infinite = replace(snapshot(), layers=(layer(0, State.KEPT, Reason.NOT_FINITE),))
    assert set(values(exposition(infinite)[0].decode(), "memreclaim_layer_mismatched_elements").values()) == {1.0}


def test_bytes_of_components_add_up() -> None:
    """Net is gross minus twins in each component, to the byte."""
    text = exposition(snapshot())[0].decode()
    gross, twin, net = (values(text, f"memreclaim_{name}_bytes") for name in ("gross", "twin", "net"))
    assert net == {component: gross[component] - twin[component] for component in gross}
    assert sum(net.values()) == 360_357_888.0


def test_labels_with_odd_characters_survive() -> None:
    """Quotes, backslashes and line breaks in a layer's name are escaped, not passed on."""
    odd = 'layers."0"\\x\ny'
    text = exposition(replace(snapshot(), layers=(replace(layer(0), name=odd),)))[0].decode()
    (labels,) = values(text, "memreclaim_layer_reclaimed")
    assert dict(labels)["layer"] == odd


def test_absent_sources_give_no_samples() -> None:
    """Without a GPU, /proc/meminfo or a pool nothing fails and nothing is invented."""
    bare = replace(snapshot(), memory=(), pool=None, peak_extra_bytes=None)
    text = exposition(bare)[0].decode()
    for name in ("device_memory_bytes", "kv_pool_tokens", "peak_extra_bytes"):
        assert values(text, f"memreclaim_{name}") == {}


def test_registry_of_a_reclaimer_is_collected() -> None:
    """``Reclaimer(registry=...)`` exports without further ado."""
    registry = CollectorRegistry()
    Reclaimer(registry=registry)
    assert b"memreclaim_state{" in generate_latest(registry)


def test_prometheus_client_is_not_imported_early() -> None:
    """Importing memreclaim, its plug-in and everything that makes snapshots loads no prometheus_client."""
    modules = "memreclaim, memreclaim.rank, memreclaim.observe.metrics, memreclaim.observe.exposition, memreclaim.cli"
    code = f"import sys, {modules}; memreclaim.Reclaimer; assert 'prometheus_client' not in sys.modules"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_plug_in_does_not_import_prometheus_client() -> None:
    """Engines call the entry point before PROMETHEUS_MULTIPROC_DIR is set; an import there would lose all metrics."""
    code = "import sys; from memreclaim.engines.sglang import plugin; plugin.register();"
    code += "assert 'prometheus_client' not in sys.modules"
    environ = {"MEMRECLAIM": "on", "PYTHONPATH": ":".join(path for path in sys.path if path)}
    assert subprocess.run([sys.executable, "-c", code], env=environ, check=False).returncode == 0


MULTIPROCESS = """
import sys, os
sys.path[:0] = {path!r}
from dataclasses import replace
from observed import Still, snapshot
from memreclaim.observe.metrics import register, Mirror, Collector
from memreclaim.rank import Rank
assert "prometheus_client" not in sys.modules
os.environ["PROMETHEUS_MULTIPROC_DIR"] = {folder!r}
from prometheus_client import CollectorRegistry
rank = Still(snapshot(int(sys.argv[1]), mismatch=11))
mirror = Mirror(rank, CollectorRegistry())
mirror.update()
rank.shown = replace(rank.shown, counts={{**rank.shown.counts, ("proofs_total", "exact"): 50}})
rank.shown = replace(rank.shown, pool=replace(rank.shown.pool, limited_by="rank 1"))
mirror.update()
mirror.update()
"""


def test_multiprocess_mode_merges_ranks(tmp_path: object) -> None:
    """Two processes write files; merged, each rank has its own series, without pid, and counters did not double."""
    from prometheus_client.multiprocess import MultiProcessCollector

    code = MULTIPROCESS.format(path=[p for p in sys.path if p], folder=str(tmp_path))
    for tp_rank in ("0", "1"):
        assert subprocess.run([sys.executable, "-c", code, tp_rank], check=False).returncode == 0
    registry = CollectorRegistry()
    MultiProcessCollector(registry, path=str(tmp_path))  # type: ignore[no-untyped-call]
    found = {
        (sample.name, *sorted(sample.labels.items())): sample.value
        for family in registry.collect()
        for sample in family.samples
    }
    ours = {key: value for key, value in found.items() if dict(key[1:]).get("tp_rank") == "1"}
    proofs = {dict(key[1:])["result"]: value for key, value in ours.items() if key[0] == "memreclaim_proofs_total"}
    assert proofs == {"exact": 50.0, "mismatch": 0.0, "error": 0.0}
    gained = {dict(k[1:])["limited_by"]: v for k, v in ours.items() if k[0] == "memreclaim_kv_pool_gained_tokens"}
    assert gained == {"memory": 0.0, "rank 1": 215_700.0}
    counts = [v for k, v in ours.items() if k[0] == "memreclaim_proof_duration_seconds_count"]
    assert counts == [43.0]
    assert not any("pid" in dict(key[1:]) for key in found)


def test_two_askers_share_one_mirror(tmp_path: object) -> None:
    """A registry and a service on one reclaimer must not count everything twice."""
    code = "from memreclaim import Reclaimer; from prometheus_client import CollectorRegistry as C; r = Reclaimer();"
    code += "from memreclaim.observe.metrics import register, mirror_of; from memreclaim.rank import Rank;"
    code += "assert register(r, C()) is mirror_of(Rank(r))"
    environ = {"PROMETHEUS_MULTIPROC_DIR": str(tmp_path), "PYTHONPATH": ":".join(p for p in sys.path if p)}
    assert subprocess.run([sys.executable, "-c", code], env=environ, check=False).returncode == 0


def test_mirror_is_what_a_registry_gets_in_multiprocess_mode(tmp_path: object) -> None:
    """``register`` chooses by the variable, in a process where it was set before prometheus_client was imported."""
    code = "from memreclaim import Reclaimer; from prometheus_client import CollectorRegistry as C;"
    code += (
        "from memreclaim.observe.metrics import register, Mirror; assert isinstance(register(Reclaimer(), C()), Mirror)"
    )
    environ = {"PROMETHEUS_MULTIPROC_DIR": str(tmp_path), "PYTHONPATH": ":".join(p for p in sys.path if p)}
    assert subprocess.run([sys.executable, "-c", code], env=environ, check=False).returncode == 0
    assert not isinstance(register(Reclaimer(), CollectorRegistry()), str)
