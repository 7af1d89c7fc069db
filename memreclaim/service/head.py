"""The head node: one report of all ranks, targets for Prometheus, and admin calls on all ranks or none.

It never exports the ranks' own series again: that would hide a dead rank behind a live exporter. Prometheus scrapes
each rank, found through ``/v1/targets`` (``http_sd``).
"""

from __future__ import annotations

import threading
import time
from collections import OrderedDict
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any, Final

from starlette.applications import Starlette
from starlette.concurrency import run_in_threadpool
from starlette.responses import HTMLResponse, JSONResponse, Response
from starlette.routing import Route

from memreclaim import events
from memreclaim.errors import ConfigError
from memreclaim.journal import Journal
from memreclaim.observe.exposition import render
from memreclaim.observe.families import SPECS, Family
from memreclaim.service import openapi, page
from memreclaim.service.client import UnreachableError, check_url
from memreclaim.service.fanout import Fanout, RefusedError
from memreclaim.service.guard import Guard, problem
from memreclaim.service.merge import Sight, merged
from memreclaim.service.thread import HttpThread

if TYPE_CHECKING:
    from collections.abc import Sequence

    from starlette.requests import Request

    from memreclaim.service.client import Client
    from memreclaim.service.fanout import Fanned
    from memreclaim.service.settings import ServiceSettings

POLL_SECONDS: Final = 2.0
ACTIONS: Final = ("reclaim", "restore", "audit")
_REMEMBERED: Final = 32


class Head:
    """The service of a head node."""

    def __init__(
        self,
        urls: Sequence[str],
        settings: ServiceSettings,
        *,
        expected: int | None,
        client: Client,
        poll_seconds: float = POLL_SECONDS,
    ) -> None:
        """Watch ``urls``. Raises :class:`ConfigError` for URLs that are none, or named twice."""
        if not urls or len(set(urls)) != len(urls):
            raise ConfigError("--ranks", "name each rank once, and at least one")
        for url in urls:
            check_url(url)
        self._urls, self._client, self._poll_seconds = tuple(urls), client, poll_seconds
        self._expected = max(expected or 0, len(urls))
        self._fanout = Fanout(urls, client)
        self._fanning = threading.Lock()
        self._operations: OrderedDict[str, Fanned] = OrderedDict()
        self._sights = {url: Sight(url, None, "not asked yet", None) for url in urls}
        self._journal = Journal()
        self._stop = threading.Event()
        self._poller = threading.Thread(target=self._poll, name="memreclaim-head", daemon=True)
        routes = self._routes()
        app = Guard(Starlette(routes=routes), settings, self._journal, [route.path for route in routes])
        self._http = HttpThread(app, settings)

    @property
    def url(self) -> str:
        """Where it listens."""
        return self._http.url

    def start(self) -> None:
        """Look at every rank once, then serve and go on looking."""
        self.look()
        self._http.start()
        self._poller.start()
        events.emit("info", "head_started", url=self.url, ranks=len(self._urls))

    def close(self) -> None:
        """End all threads."""
        self._stop.set()
        if self._poller.ident is not None:
            self._poller.join()
        self._http.close()

    def look(self) -> None:
        """Ask every rank for its report, all at once; one that does not answer in 3 s is missing."""
        with ThreadPoolExecutor(min(32, len(self._urls))) as pool:
            for sight in pool.map(self._sight, self._urls):
                was = self._sights[sight.url]
                if (was.report is None) != (sight.report is None):
                    word = "rank_seen" if sight.report else "rank_lost"
                    events.emit("info" if sight.report else "warning", word, url=sight.url, why=sight.error or "")
                self._sights[sight.url] = sight

    def report(self) -> dict[str, Any]:
        """The merged report."""
        return merged(tuple(self._sights.values()), self._expected, time.time())

    def targets(self) -> list[dict[str, Any]]:
        """What Prometheus' ``http_sd`` wants: every rank that was named, dead ones too, or nobody would miss them."""
        found = []
        for url in self._urls:
            parts = check_url(url)
            port = parts.port or (443 if parts.scheme == "https" else 80)
            host = f"[{parts.hostname}]" if ":" in parts.hostname else parts.hostname
            labels = {"__scheme__": parts.scheme, "__metrics_path__": parts.path.rstrip("/") + "/metrics"}
            found.append({"targets": [f"{host}:{port}"], "labels": labels})
        return found

    def _sight(self, url: str) -> Sight:
        last = self._sights[url].seen_at
        try:
            answer = self._client.get(url, "/v1/report")
        except UnreachableError as error:
            return Sight(url, None, str(error), last)
        if answer.code != 200 or answer.body.get("kind") != "rank":  # noqa: PLR2004
            return Sight(url, None, answer.error if answer.code != 200 else "this is no rank's service", last)  # noqa: PLR2004
        return Sight(url, answer.body, None, time.time())

    def _poll(self) -> None:
        while not self._stop.wait(self._poll_seconds):
            try:
                self.look()
            except Exception as error:  # noqa: BLE001 - counted and logged; the next look may succeed
                self._journal.add("internal_errors_total", "poll")
                events.emit("error", "poll_failed", error=f"{type(error).__name__}: {error}")

    def _routes(self) -> list[Route]:
        return [
            Route("/", self._page),
            Route("/metrics", self._metrics),
            Route("/healthz", self._healthz),
            Route("/readyz", self._readyz),
            Route("/v1/report", self._report),
            Route("/v1/layers", self._layers),
            Route("/v1/targets", self._targets),
            Route("/v1/operations/{id}", self._operation),
            Route("/openapi.json", self._openapi),
            *[Route(f"/v1/{kind}", self._action, methods=["POST"]) for kind in ACTIONS],
        ]

    async def _page(self, _request: Request) -> Response:
        return HTMLResponse(page.HTML, headers={"Content-Security-Policy": page.POLICY})

    async def _metrics(self, request: Request) -> Response:
        live = [sight.report for sight in self._sights.values() if sight.report]
        identity = {name: str(live[0]["identity"][name]) for name in ("model_name", "engine_type")} if live else {}
        counts, histograms = self._journal.counts(), self._journal.histograms()
        found = [Family(SPECS["ranks_expected"], {(): self._expected}, {})]
        found += [
            Family(SPECS[name], {k[1:]: float(n) for k, n in counts.items() if k[0] == name}, {})
            for name in ("http_requests_total", "internal_errors_total")
        ]
        name = "http_request_duration_seconds"
        found.append(Family(SPECS[name], {}, {k[1:]: h for k, h in histograms.items() if k[0] == name}))
        body, content_type = render(found, identity, request.headers.get("accept", ""))
        return Response(body, headers={"Content-Type": content_type})

    async def _healthz(self, _request: Request) -> Response:
        return JSONResponse({"alive": True})

    async def _readyz(self, _request: Request) -> Response:
        report = self.report()
        body = {"ready": report["ready"], "missing": len(report["missing"])}
        return JSONResponse(body, status_code=200 if report["ready"] else 503)

    async def _report(self, _request: Request) -> Response:
        return JSONResponse(self.report())

    async def _layers(self, _request: Request) -> Response:
        live = [sight.report for sight in self._sights.values() if sight.report]
        return JSONResponse({"ranks": [{"identity": rank["identity"], "layers": rank["layers"]} for rank in live]})

    async def _targets(self, _request: Request) -> Response:
        return JSONResponse(self.targets())

    async def _openapi(self, _request: Request) -> Response:
        return JSONResponse(openapi.document(ACTIONS, head=True))

    async def _action(self, request: Request) -> Response:
        if (await request.body()).strip() not in (b"", b"{}"):
            return problem(400, "send a JSON object, {}")
        kind = request.url.path.rpartition("/")[2]
        if not self._fanning.acquire(blocking=False):
            return problem(409, "another operation is being started")
        try:
            fanned = await run_in_threadpool(self._fanout.start, kind)
        except RefusedError as error:
            return problem(409, f"not all ranks can: {error}")
        finally:
            self._fanning.release()
        self._operations[fanned.id] = fanned
        while len(self._operations) > _REMEMBERED:
            self._operations.popitem(last=False)
        body = {"id": fanned.id, "kind": kind, "ranks": fanned.operations, "failed": fanned.failed}
        return JSONResponse(body, status_code=202, headers={"Location": f"/v1/operations/{fanned.id}"})

    async def _operation(self, request: Request) -> Response:
        fanned = self._operations.get(request.path_params["id"])
        if fanned is None:
            return problem(404, "no such operation")
        return JSONResponse(await run_in_threadpool(self._fanout.state, fanned))
