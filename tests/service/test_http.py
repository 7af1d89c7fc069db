"""A rank's service over real sockets: who may ask for what, and what happens to those who may not."""

from __future__ import annotations

import http.client
import socket
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

import pytest
from observed import QUIET, SCRAPE_TOKEN, TOKEN, Engine, engine, plant
from prometheus_client.parser import text_string_to_metric_families
from service_calls import ADMIN, JSON, call, finished, get, post, until

from memreclaim.service import guard, thread

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

pytestmark = pytest.mark.cpu

GUARDED = replace(QUIET, token=TOKEN, scrape_token=SCRAPE_TOKEN)


@pytest.fixture(scope="module")
def running(checkpoint: Path) -> Iterator[Engine]:
    """An engine with both tokens."""
    with engine(str(checkpoint), GUARDED) as made:
        yield made


@pytest.fixture(scope="module")
def url(running: Engine) -> str:
    """Where it is."""
    return running.service.url


def test_probes_and_page_are_open(url: str) -> None:
    """Liveness, readiness and the empty page need no token."""
    assert get(url, "/healthz") == (200, {"alive": True})
    assert get(url, "/readyz") == (200, {"ready": True, "state": "ready"})
    code, body, headers = call(url, "GET", "/")
    assert (code, body[:15]) == (200, b"<!doctype html>")
    assert "default-src 'none'" in headers["Content-Security-Policy"]
    assert headers["X-Content-Type-Options"] == "nosniff"


@pytest.mark.parametrize("path", ["/metrics", "/v1/report", "/v1/layers", "/openapi.json", "/v1/operations/x"])
def test_reading_needs_one_of_the_tokens(url: str, path: str) -> None:
    """None and a wrong one are 401; the scrape token and the admin token both read."""
    wanted = 404 if path.endswith("/x") else 200
    assert get(url, path)[0] == 401
    assert get(url, path, Authorization="Bearer wrong")[0] == 401
    assert get(url, path, Authorization=f"Basic {TOKEN}")[0] == 401
    assert get(url, path, Authorization=f"Bearer {SCRAPE_TOKEN}")[0] == wanted
    assert get(url, path, Authorization=f"Bearer {TOKEN}")[0] == wanted


@pytest.mark.parametrize("path", ["/v1/reclaim", "/v1/restore", "/v1/audit", "/v1/reservations"])
def test_acting_needs_the_admin_token(url: str, path: str) -> None:
    """No token, a wrong one and the scrape token are refused, and nothing is queued."""
    for headers in ({}, {"Authorization": "Bearer wrong"}, {"Authorization": f"Bearer {SCRAPE_TOKEN}"}):
        assert post(url, path, headers={**headers, **JSON})[0] == 401


def test_without_tokens_nobody_may_act(checkpoint: Path) -> None:
    """A service without an admin token shows everything to its own machine and does nothing."""
    with engine(str(checkpoint), reclaim=False) as made:
        assert get(made.service.url, "/v1/report")[0] == 200
        assert post(made.service.url, "/v1/reclaim")[0] == 403
        assert get(made.service.url, "/readyz") == (503, {"ready": False, "state": "starting"})


@pytest.mark.parametrize("host", ["evil.example", "evil.example:9411", "127.0.0.1.evil.example", "", "[::2]"])
def test_other_host_names_are_refused(url: str, host: str) -> None:
    """A name that DNS was made to point here is not ours."""
    assert get(url, "/healthz", Host=host)[0] == 421


@pytest.mark.parametrize("host", ["localhost", "LOCALHOST:1", "127.0.0.1:80", "[::1]:9411"])
def test_own_host_names_are_taken(url: str, host: str) -> None:
    """Loopback names, whatever the port, are ours."""
    assert get(url, "/healthz", Host=host)[0] == 200


def test_only_json_is_taken(url: str) -> None:
    """What a browser's form can send is refused."""
    for content_type in ("text/plain", "application/x-www-form-urlencoded", ""):
        assert post(url, "/v1/audit", headers={**ADMIN, "Content-Type": content_type})[0] == 415


@pytest.mark.parametrize("body", ["[]", "{", "null", '{"what": 1}', '{"reservation": 5}', "[" * 2000])
def test_bodies_that_make_no_sense(url: str, body: str) -> None:
    """Neither a traceback nor an operation comes of them."""
    assert post(url, "/v1/audit", body)[0] == 400


def test_large_bodies_are_not_read(url: str) -> None:
    """Announced or chunked, a body over the cap is refused."""
    assert post(url, "/v1/audit", "x" * (guard.LARGEST_BODY + 1))[0] == 413
    parts = urlsplit(url)
    connection = http.client.HTTPConnection(parts.hostname or "", parts.port, timeout=30)
    connection.request(
        "POST", "/v1/audit", iter([b"x" * 3000] * 3), {**ADMIN, "Transfer-Encoding": "chunked"}, encode_chunked=True
    )
    assert connection.getresponse().status == 413
    connection.close()


def test_unknown_paths_and_methods(url: str) -> None:
    """They are 404 and 405 for those who may ask, and count as one route."""
    assert get(url, "/v1/nothing", Authorization=f"Bearer {TOKEN}")[0] == 404
    assert post(url, "/v1/report")[0] == 405
    text = get(url, "/metrics", Authorization=f"Bearer {TOKEN}")[1].decode()
    routes = {s.labels["route"] for f in text_string_to_metric_families(text) for s in f.samples if "route" in s.labels}
    assert "/v1/nothing" not in routes


def test_operations_run_at_a_safe_point_and_are_idempotent(running: Engine) -> None:
    """202 and an id; the same key gives the same operation; the work is done by the worker, not by the HTTP thread."""
    url = running.service.url
    headers = {**ADMIN, "Idempotency-Key": "once"}
    first = post(url, "/v1/restore", headers=headers)
    assert first[0] == 202
    done = finished(url, first[1]["id"])
    assert (done["status"], done["error"]) == ("done", None)
    assert post(url, "/v1/restore", headers=headers)[1]["id"] == first[1]["id"]
    assert {layer["state"] for layer in get(url, "/v1/layers", **ADMIN)[1]["layers"]} == {"restored"}
    again = finished(url, post(url, "/v1/reclaim")[1]["id"])
    assert again["result"]["gross_bytes"] == 3 * 32768
    running.reclaimer.check_integrity()


def test_second_operation_is_refused_while_one_waits(running: Engine) -> None:
    """While the engine is in a step the first waits; a second gets 409, and the first still runs afterwards."""
    with running.server.safe_point():
        first = post(running.service.url, "/v1/audit")
        second = post(running.service.url, "/v1/reclaim")
    assert (first[0], second[0]) == (202, 409)
    assert "audit" in second[1]["error"]
    assert finished(running.service.url, first[1]["id"])["result"]["damaged"] == {}


def test_reservation_keeps_others_away(running: Engine) -> None:
    """Only its holder may start something, and only once; released, anybody may."""
    url = running.service.url
    code, held = post(url, "/v1/reservations")
    assert code == 201
    assert post(url, "/v1/reservations")[0] == 409
    assert post(url, "/v1/audit")[0] == 409
    started = post(url, "/v1/audit", f'{{"reservation": "{held["reservation"]}"}}')
    assert started[0] == 202
    finished(url, started[1]["id"])
    assert post(url, "/v1/audit", f'{{"reservation": "{held["reservation"]}"}}')[0] == 409
    other = post(url, "/v1/reservations")[1]["reservation"]
    assert call(url, "DELETE", "/v1/reservations", headers={**ADMIN, "X-Reservation": other})[0] == 204
    assert call(url, "DELETE", "/v1/reservations", headers={**ADMIN, "X-Reservation": other})[0] == 404


def test_failed_operation_says_why_and_the_engine_lives(running: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    """An error is kept in the operation and counted; the next one runs."""

    def fail() -> None:
        message = "planted"
        raise RuntimeError(message)

    monkeypatch.setattr(running.service.auditor, "audit", fail)
    url = running.service.url
    failed = finished(url, post(url, "/v1/audit")[1]["id"])
    assert (failed["status"], failed["error"]) == ("failed", "RuntimeError: planted")
    monkeypatch.undo()
    assert finished(url, post(url, "/v1/audit")[1]["id"])["status"] == "done"


def test_200_scrapes_at_once_are_answered(url: str) -> None:
    """Every one gets the whole text."""

    def scrape(_: int) -> tuple[int, bool]:
        code, body = get(url, "/metrics", Authorization=f"Bearer {SCRAPE_TOKEN}")
        return code, b"memreclaim_internal_errors_total" in body

    with ThreadPoolExecutor(200) as pool:
        assert set(pool.map(scrape, range(200))) == {(200, True)}


def test_silent_peer_blocks_nobody_and_is_hung_up_on(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A peer that connects and sends nothing is cut off; others are answered meanwhile."""
    monkeypatch.setattr(thread, "SILENCE_SECONDS", 0.2)
    parts = urlsplit(url)
    with socket.create_connection((parts.hostname or "", parts.port or 0), timeout=30) as silent:
        assert get(url, "/healthz")[0] == 200
        assert silent.recv(1) == b""


def test_slow_body_is_given_up(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A body that never arrives ends in 408."""
    monkeypatch.setattr(guard, "BODY_SECONDS", 0.2)
    parts = urlsplit(url)
    with socket.create_connection((parts.hostname or "", parts.port or 0), timeout=30) as slow:
        head = f"POST /v1/audit HTTP/1.1\r\nHost: localhost\r\nAuthorization: Bearer {TOKEN}\r\n"
        slow.sendall(f"{head}Content-Type: application/json\r\nContent-Length: 5\r\n\r\n".encode())
        assert slow.recv(100).startswith(b"HTTP/1.1 408")


def test_port_can_be_taken_again_at_once(checkpoint: Path) -> None:
    """A service that restarts under scrapes gets its port back."""
    with engine(str(checkpoint), reclaim=False) as first:
        url = first.service.url
        port = urlsplit(url).port or 0
        assert get(url, "/metrics")[0] == 200
    with engine(str(checkpoint), replace(QUIET, port=port), reclaim=False):
        assert get(url, "/metrics")[0] == 200


def test_taken_port_is_an_error_that_says_so(checkpoint: Path, running: Engine) -> None:
    """Two services cannot share an address."""
    with pytest.raises(thread.ServiceError, match="cannot listen"):
        Engine(str(checkpoint), replace(QUIET, port=urlsplit(running.service.url).port or 0))


def test_openapi_document_names_every_route(running: Engine) -> None:
    """What the document promises is served: each path answers something other than 404 to the right method."""
    url = running.service.url
    document = get(url, "/openapi.json", **ADMIN)[1]
    assert document["openapi"] == "3.1.0"
    for path, methods in document["paths"].items():
        for method in methods:
            if method == "get" and "{" not in path:
                assert get(url, path, **ADMIN)[0] == 200, path
            elif method == "post":
                assert call(url, "POST", path, "nonsense", {"Host": "localhost"})[0] == 401, path


def test_planted_mismatch_is_reported_and_the_rank_serves_on(checkpoint: Path) -> None:
    """The layer is kept with its first element; the rank is degraded and ready."""
    with engine(str(checkpoint), reclaim=False) as made:
        plant(made.model)
        made.service.reclaim_at_start()
        report = get(made.service.url, "/v1/report")[1]
        assert (report["state"], report["ready"]) == ("degraded", True)
        (bad,) = [layer for layer in report["layers"] if layer["mismatched_elements"]]
        assert (bad["name"], bad["state"], bad["reason"]) == ("layers.1.attn.wo_a", "kept", "mismatch")
        assert bad["first_mismatch"]["coordinate"] == [0, 0]
        until(lambda: any(event["event"] == "layer_kept" for event in get(made.service.url, "/v1/report")[1]["events"]))
