"""The HTTP application of one rank.

Handlers read a snapshot or leave work on the desk; none touches the device. They run on the service's own thread, in
turn, so a snapshot is taken by one request at a time; scrapes that arrive within the same half second share one.
"""

from __future__ import annotations

import json
import time
from typing import TYPE_CHECKING, Any, Final

from starlette.applications import Starlette
from starlette.responses import HTMLResponse, JSONResponse, Response
from starlette.routing import Route

from memreclaim import events
from memreclaim.observe.exposition import exposition
from memreclaim.service import openapi, page, view
from memreclaim.service.desk import BusyError, UnknownReservationError
from memreclaim.service.guard import Guard, problem

if TYPE_CHECKING:
    from starlette.requests import Request
    from starlette.types import ASGIApp

    from memreclaim.rank import Rank
    from memreclaim.rank_snapshot import RankSnapshot
    from memreclaim.service.desk import Desk
    from memreclaim.service.settings import ServiceSettings

SHARED_SECONDS: Final = 0.5
"""200 scrapes at once are one snapshot; nobody scrapes one target faster than this on purpose."""
_LONGEST_KEY: Final = 128


class RankApp:
    """Routes of one rank."""

    def __init__(self, rank: Rank, desk: Desk, settings: ServiceSettings) -> None:
        """Show ``rank``, leave work on ``desk``."""
        self._rank, self._desk = rank, desk
        self._shared: tuple[float, int, RankSnapshot] | None = None
        self._scraped: dict[str, tuple[int, tuple[bytes, str]]] = {}
        actions = [Route(f"/v1/{kind}", self._action, methods=["POST"]) for kind in desk.kinds]
        routes = [
            Route("/", self._page),
            Route("/metrics", self._metrics),
            Route("/healthz", self._healthz),
            Route("/readyz", self._readyz),
            Route("/v1/report", self._report),
            Route("/v1/layers", self._layers),
            Route("/v1/operations/{id}", self._operation),
            Route("/v1/reservations", self._reserve, methods=["POST"]),
            Route("/v1/reservations", self._release, methods=["DELETE"]),
            Route("/openapi.json", self._openapi),
            *actions,
        ]
        names = [route.path for route in routes]
        self.asgi: ASGIApp = Guard(Starlette(routes=routes), settings, rank.journal, names)

    def snapshot(self) -> RankSnapshot:
        """A snapshot at most :data:`SHARED_SECONDS` old, and younger than the last operation."""
        now, finished = time.monotonic(), self._desk.finished
        shared = self._shared
        if shared is None or now - shared[0] > SHARED_SECONDS or shared[1] != finished:
            shared = self._shared = (now, finished, self._rank.snapshot())
        return shared[2]

    async def _page(self, _request: Request) -> Response:
        return HTMLResponse(page.HTML, headers={"Content-Security-Policy": page.POLICY})

    async def _metrics(self, request: Request) -> Response:
        accept = "openmetrics" if "application/openmetrics-text" in request.headers.get("accept", "") else ""
        snapshot = self.snapshot()
        known = self._scraped.get(accept)
        if known is None or known[0] != snapshot.version:
            known = (snapshot.version, exposition(snapshot, request.headers.get("accept", "")))
            self._scraped[accept] = known
        body, content_type = known[1]
        return Response(body, headers={"Content-Type": content_type})

    async def _healthz(self, _request: Request) -> Response:
        return JSONResponse({"alive": True})

    async def _readyz(self, _request: Request) -> Response:
        snapshot = self._rank.snapshot()
        body = {"ready": snapshot.ready, "state": snapshot.state.value}
        return JSONResponse(body, status_code=200 if snapshot.ready else 503)

    async def _report(self, _request: Request) -> Response:
        return JSONResponse(view.report(self.snapshot()))

    async def _layers(self, _request: Request) -> Response:
        snapshot = self.snapshot()
        return JSONResponse({"version": snapshot.version, "layers": view.layers(snapshot)})

    async def _openapi(self, _request: Request) -> Response:
        return JSONResponse(openapi.document(self._desk.kinds))

    async def _operation(self, request: Request) -> Response:
        found = self._desk.find(request.path_params["id"])
        return problem(404, "no such operation") if found is None else JSONResponse(found.to_dict())

    async def _reserve(self, _request: Request) -> Response:
        try:
            return JSONResponse({"reservation": self._desk.reserve()}, status_code=201)
        except BusyError as error:
            return problem(409, str(error))

    async def _release(self, request: Request) -> Response:
        try:
            self._desk.release(request.headers.get("x-reservation", ""))
        except UnknownReservationError as error:
            return problem(404, str(error))
        return Response(status_code=204)

    async def _action(self, request: Request) -> Response:
        body = await _object(request)
        key = request.headers.get("idempotency-key")
        if body is None or set(body) - {"reservation"} or not isinstance(body.get("reservation", ""), str):
            return problem(400, 'send a JSON object, {} or {"reservation": "..."}')
        if key is not None and not 0 < len(key) <= _LONGEST_KEY:
            return problem(400, f"an Idempotency-Key has 1 to {_LONGEST_KEY} characters")
        kind = request.url.path.rpartition("/")[2]
        try:
            operation = self._desk.submit(kind, key=key, reservation=body.get("reservation"))
        except (BusyError, UnknownReservationError) as error:
            return problem(409, str(error))
        events.emit("info", "operation_accepted", operation=kind, id=operation.id)
        location = f"/v1/operations/{operation.id}"
        return JSONResponse(operation.to_dict(), status_code=202, headers={"Location": location})


async def _object(request: Request) -> dict[str, Any] | None:
    """The body as a JSON object; an empty body is an empty object."""
    raw = await request.body()
    try:
        parsed = json.loads(raw) if raw else {}
    except (ValueError, RecursionError):
        return None
    return parsed if isinstance(parsed, dict) else None
