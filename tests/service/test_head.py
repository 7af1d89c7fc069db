"""The head node: merged report, targets, missing and differing ranks, operations on all ranks or none."""

from __future__ import annotations

from contextlib import ExitStack, contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest
from observed import QUIET, SCRAPE_TOKEN, TOKEN, Engine, engine, plant
from service_calls import finished, get, post

from memreclaim.cli.exit_codes import ExitCode
from memreclaim.cli.status import verdict
from memreclaim.errors import ConfigError
from memreclaim.service.client import Client
from memreclaim.service.head import Head
from memreclaim.service.merge import diverged

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from pathlib import Path

pytestmark = pytest.mark.cpu

GUARDED = replace(QUIET, token=TOKEN, scrape_token=SCRAPE_TOKEN)


@contextmanager
def head_of(urls: Sequence[str], expected: int | None = None) -> Iterator[Head]:
    """A head node that looks only when told to."""
    head = Head(urls, GUARDED, expected=expected, client=Client(TOKEN), poll_seconds=3600)
    head.start()
    try:
        yield head
    finally:
        head.close()


@pytest.fixture
def ranks(checkpoint: Path) -> Iterator[list[Engine]]:
    """Two reclaimed ranks."""
    with ExitStack() as stack:
        yield [stack.enter_context(engine(str(checkpoint), GUARDED, tp_rank=rank)) for rank in range(2)]


def reclaimed(engines: Sequence[Engine]) -> list[int]:
    """Layers reclaimed on each rank."""
    return [sum(layer.gross_bytes > 0 for layer in made.reclaimer.ledger.layers()) for made in engines]


def report_of(head: Head) -> dict[str, Any]:
    """What it says over HTTP."""
    body: dict[str, Any] = get(head.url, "/v1/report", Authorization=f"Bearer {TOKEN}")[1]
    return body


def test_two_ranks_are_one_report(ranks: list[Engine]) -> None:
    """Bytes are summed, tokens are the least, and all is well."""
    with head_of([made.service.url for made in ranks]) as head:
        report = report_of(head)
        assert report["net_bytes"] == 2 * 3 * (32768 - 16400)
        assert report["kv_tokens"] == min(made.pool.capacity_tokens for made in ranks)
        assert (report["missing"], report["diverged"], report["ready"]) == ([], [], True)
        assert verdict(report) is ExitCode.OK
        assert get(head.url, "/readyz")[0] == 200


def test_targets_name_dead_ranks_too(ranks: list[Engine]) -> None:
    """Prometheus is told of every rank that was named, with scheme and path."""
    with head_of([ranks[0].service.url, "https://127.0.0.1:1/base"]) as head:
        targets = get(head.url, "/v1/targets", Authorization=f"Bearer {SCRAPE_TOKEN}")[1]
        assert targets == [
            {
                "targets": [ranks[0].service.url.removeprefix("http://")],
                "labels": {"__scheme__": "http", "__metrics_path__": "/metrics"},
            },
            {"targets": ["127.0.0.1:1"], "labels": {"__scheme__": "https", "__metrics_path__": "/base/metrics"}},
        ]


def test_head_exports_its_own_metrics_only(ranks: list[Engine]) -> None:
    """How many ranks there should be, and nothing that a rank exports: a dead rank must not look alive."""
    with head_of([made.service.url for made in ranks], expected=3) as head:
        text = get(head.url, "/metrics", Authorization=f"Bearer {SCRAPE_TOKEN}")[1].decode()
        assert 'memreclaim_ranks_expected{model_name="tiny",engine_type="unified"} 3.0' in text
        assert "memreclaim_layers" not in text
        assert "memreclaim_build_info" not in text


def test_dead_rank_is_missing(ranks: list[Engine]) -> None:
    """It is named, the head is not ready, and status ends with 4."""
    with head_of([made.service.url for made in ranks]) as head:
        ranks[1].service.close()
        head.look()
        report = report_of(head)
        assert report["missing"] == [ranks[1].service.url]
        assert get(head.url, "/readyz")[0] == 503
        assert verdict(report) is ExitCode.NOT_READY


def test_mismatch_on_one_rank_is_named_and_ranks_differ(checkpoint: Path) -> None:
    """The layer and its rank are named, and that the ranks hold different layers; status ends with 3."""
    with ExitStack() as stack:
        made = [stack.enter_context(engine(str(checkpoint), GUARDED, reclaim=False, tp_rank=rank)) for rank in range(2)]
        plant(made[1].model)
        for one in made:
            one.service.reclaim_at_start()
        with head_of([one.service.url for one in made]) as head:
            report = report_of(head)
            assert [(found["rank"], found["layer"]) for found in report["mismatched"]] == [
                ("TP1", "layers.1.attn.wo_a")
            ]
            assert report["diverged"][0] == "layers reclaimed: 3 of 3 on TP0; 2 of 3 on TP1"
            assert verdict(report) is ExitCode.MISMATCH


def test_operation_runs_on_all_ranks(ranks: list[Engine]) -> None:
    """One call restores both ranks, and one id says how it went."""
    with head_of([made.service.url for made in ranks]) as head:
        code, body = post(head.url, "/v1/restore")
        assert (code, body["failed"]) == (202, {})
        assert finished(head.url, body["id"])["status"] == "done"
        assert reclaimed(ranks) == [0, 0]


def test_busy_rank_stops_all(ranks: list[Engine]) -> None:
    """One rank refuses: nothing happens anywhere, and the other is free again."""
    with head_of([made.service.url for made in ranks]) as head:
        post(ranks[1].service.url, "/v1/reservations")
        code, body = post(head.url, "/v1/restore")
        assert code == 409
        assert ranks[1].service.url in body["error"]
        assert reclaimed(ranks) == [3, 3]
        assert post(ranks[0].service.url, "/v1/audit")[0] == 202


def test_dead_rank_stops_all(ranks: list[Engine]) -> None:
    """A rank that does not answer: nothing happens on the others."""
    with head_of([made.service.url for made in ranks]) as head:
        ranks[1].service.close()
        assert post(head.url, "/v1/restore")[0] == 409
        assert reclaimed(ranks[:1]) == [3]


def test_wrong_token_for_ranks_is_seen(ranks: list[Engine]) -> None:
    """A head node that may not read has no ranks, and says why."""
    head = Head([ranks[0].service.url], GUARDED, expected=None, client=Client("not-the-right-token"))
    head.look()
    assert "token" in head.report()["ranks"][0]["error"]
    head.close()


def test_ranks_with_other_settings_differ(ranks: list[Engine]) -> None:
    """Settings that reached the head only: the report says which rank is off."""
    with head_of([made.service.url for made in ranks]) as head:
        reports = [sight["report"] for sight in report_of(head)["ranks"]]
        reports[1]["mode"] = "off"
        reports[1]["build"]["version"] = "9"
        assert diverged(reports)[:2] == ["mode: on on TP0; off on TP1", "version: 0.1.0 on TP0; 9 on TP1"]


def test_two_services_of_one_rank_are_noticed(ranks: list[Engine]) -> None:
    """The same identity twice is a mistake in somebody's start-up script."""
    with head_of([made.service.url for made in ranks]) as head:
        reports = [sight["report"] for sight in report_of(head)["ranks"]]
        reports[1]["identity"] = reports[0]["identity"]
        assert diverged(reports) == ["identity: more than one service is TP0"]


def test_openapi_document_of_a_head_node_names_what_it_serves(ranks: list[Engine]) -> None:
    """Each path that can be read without an id answers; there are no reservations here."""
    with head_of([ranks[0].service.url]) as head:
        paths = get(head.url, "/openapi.json", Authorization=f"Bearer {TOKEN}")[1]["paths"]
        assert "/v1/reservations" not in paths
        for path in (path for path, methods in paths.items() if "get" in methods and "{" not in path):
            assert get(head.url, path, Authorization=f"Bearer {TOKEN}")[0] == 200, path


@pytest.mark.parametrize("urls", [[], ["http://a:1", "http://a:1"], ["ftp://a"], ["http://"], ["http://a:x"], ["a:1"]])
def test_bad_lists_of_ranks_are_refused(urls: list[str]) -> None:
    """None, doubled and malformed URLs."""
    with pytest.raises(ConfigError):
        Head(urls, QUIET, expected=None, client=Client())
