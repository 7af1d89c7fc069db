"""The door of every service: who may ask, by which name, and how much they may send.

Checked in this order, before any handler runs: Host header (421), token (401, 403), method's content type (415), body
size (413), body speed (408). Every answer is counted by route, method and code.
"""

from __future__ import annotations

import asyncio
import hmac
import time
from typing import TYPE_CHECKING, Final, cast

from starlette.datastructures import Headers
from starlette.responses import JSONResponse

from memreclaim import events

if TYPE_CHECKING:
    from collections.abc import Collection

    from starlette.types import ASGIApp, Message, Receive, Scope, Send

    from memreclaim.journal import Journal
    from memreclaim.service.settings import ServiceSettings

LARGEST_BODY: Final = 4096
"""Bytes; the largest request that makes sense has about 200."""
BODY_SECONDS: Final = 5.0
OPEN: Final = frozenset({"/", "/healthz", "/readyz"})
"""Without a token: probes, and the page, which holds no data before its script has asked for some."""
_METHODS: Final = frozenset({"GET", "HEAD", "POST", "DELETE", "OPTIONS", "PUT", "PATCH"})


class Guard:
    """ASGI middleware."""

    def __init__(self, app: ASGIApp, settings: ServiceSettings, journal: Journal, routes: Collection[str]) -> None:
        """Let through to ``app`` what ``settings`` allow; ``routes`` are the paths that metrics may name."""
        self._app, self._settings, self._journal, self._routes = app, settings, journal, frozenset(routes)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """One request."""
        if scope["type"] != "http":
            return
        started, code = time.perf_counter(), [500]

        async def noting(message: Message) -> None:
            if message["type"] == "http.response.start":
                code[0] = message["status"]
                message["headers"] = [*message.get("headers", []), *_HEADERS]
            await send(message)

        try:
            refusal = self._refusal(scope)
            body = b"" if refusal else await _read(scope, receive)
            if refusal is None and not isinstance(body, bytes):
                refusal = body
            if refusal is None:
                await self._app(scope, _replay(cast("bytes", body)), noting)
            else:
                await refusal(scope, receive, noting)
        except Exception as error:  # noqa: BLE001 - counted, logged and answered; the engine around us must live on
            self._journal.add("internal_errors_total", "http")
            events.emit("error", "request_failed", path=scope["path"], error=f"{type(error).__name__}: {error}")
            if code[0] == 500:  # noqa: PLR2004  nothing was sent yet
                await problem(500, "internal error")(scope, receive, noting)
        finally:
            self._count(scope, code[0], time.perf_counter() - started)

    def _refusal(self, scope: Scope) -> JSONResponse | None:
        headers = Headers(scope=scope)
        if _hostname(headers.get("host", "")) not in self._settings.allowed_hosts:
            return problem(421, "this service is not known by that Host; see MEMRECLAIM_HTTP_HOSTS")
        reading = scope["method"] in ("GET", "HEAD")
        refusal = self._unauthorised(headers, scope["path"], reading=reading)
        if refusal is not None or reading or scope["method"] == "DELETE":
            return refusal
        if headers.get("content-type", "").partition(";")[0].strip().lower() != "application/json":
            return problem(415, "send application/json")
        return None

    def _unauthorised(self, headers: Headers, path: str, *, reading: bool) -> JSONResponse | None:
        settings = self._settings
        if reading and (path in OPEN or (settings.token is None and settings.scrape_token is None)):
            return None
        if not reading and settings.token is None:
            return problem(403, "no admin token is configured; see MEMRECLAIM_HTTP_TOKEN_FILE")
        scheme, _, given = headers.get("authorization", "").partition(" ")
        accepted = [settings.token, settings.scrape_token] if reading else [settings.token]
        # Every token is compared, so that the time says nothing about which one was close.
        matches = [hmac.compare_digest(given.strip().encode(), token.encode()) for token in accepted if token]
        if scheme.lower() == "bearer" and any(matches):
            return None
        return problem(401, "a token is needed: Authorization: Bearer TOKEN", {"WWW-Authenticate": "Bearer"})

    def _count(self, scope: Scope, code: int, seconds: float) -> None:
        route = "/v1/operations/{id}" if scope["path"].startswith("/v1/operations/") else scope["path"]
        route = route if route in self._routes else "other"
        method = scope["method"] if scope["method"] in _METHODS else "other"
        self._journal.add("http_requests_total", method, route, str(code))
        self._journal.observe("http_request_duration_seconds", seconds, method, route, str(code))


_HEADERS: Final = (
    (b"x-content-type-options", b"nosniff"),
    (b"referrer-policy", b"no-referrer"),
    (b"x-frame-options", b"DENY"),
)


def problem(code: int, detail: str, headers: dict[str, str] | None = None) -> JSONResponse:
    """An error as JSON."""
    return JSONResponse({"error": detail, "code": code}, status_code=code, headers=headers)


def _hostname(host: str) -> str:
    """Name in a Host header, without port and brackets."""
    name = host[: host.find("]") + 1] if host.startswith("[") else host.partition(":")[0]
    return name.strip("[]").lower()


async def _read(scope: Scope, receive: Receive) -> bytes | JSONResponse:
    """The whole body, or why it was refused."""
    announced = Headers(scope=scope).get("content-length", "0")
    if not announced.isdigit() or int(announced) > LARGEST_BODY:
        return problem(413, f"at most {LARGEST_BODY} bytes")
    parts: list[bytes] = []
    try:
        async with asyncio.timeout(BODY_SECONDS):
            while True:
                message = await receive()
                parts.append(message.get("body", b""))
                if sum(map(len, parts)) > LARGEST_BODY:
                    return problem(413, f"at most {LARGEST_BODY} bytes")
                if not message.get("more_body"):
                    return b"".join(parts)
    except TimeoutError:
        return problem(408, "the body did not arrive in time")


def _replay(body: bytes) -> Receive:
    """``receive`` for a handler: the body that was read, then nothing more."""
    messages = iter([{"type": "http.request", "body": body, "more_body": False}])

    async def receive() -> Message:
        return next(messages, {"type": "http.disconnect"})

    return receive
