"""Talking to services in tests."""

from __future__ import annotations

import http.client
import json
import time
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from observed import TOKEN

if TYPE_CHECKING:
    from collections.abc import Callable

JSON = {"Content-Type": "application/json"}
ADMIN = {"Authorization": f"Bearer {TOKEN}", **JSON}
WAIT = 60.0


def call(
    url: str, method: str, path: str, body: str | None = None, headers: dict[str, str] | None = None
) -> tuple[int, Any, http.client.HTTPMessage]:
    """One request: status code, body (parsed when it is JSON) and headers."""
    parts = urlsplit(url)
    connection = http.client.HTTPConnection(parts.hostname or "", parts.port, timeout=30)
    try:
        connection.request(method, path, body=body, headers=headers or {})
        answer = connection.getresponse()
        raw = answer.read()
    finally:
        connection.close()
    is_json = "json" in (answer.headers.get("Content-Type") or "")
    return answer.status, json.loads(raw) if is_json and raw else raw, answer.headers


def get(url: str, path: str, **headers: str) -> tuple[int, Any]:
    """GET without a body."""
    code, body, _ = call(url, "GET", path, headers=headers)
    return code, body


def post(url: str, path: str, body: str = "{}", headers: dict[str, str] | None = None) -> tuple[int, Any]:
    """POST with the admin token."""
    code, answer, _ = call(url, "POST", path, body, ADMIN if headers is None else headers)
    return code, answer


def until(condition: Callable[[], Any], seconds: float = WAIT) -> Any:
    """Ask again until ``condition`` is true; fails after a bounded time."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        found = condition()
        if found:
            return found
        time.sleep(0.02)
    message = f"nothing came of it within {seconds} s"
    raise AssertionError(message)


def finished(url: str, identifier: str) -> dict[str, Any]:
    """An operation once it is done or failed."""

    def look() -> dict[str, Any] | None:
        body: dict[str, Any] = get(url, f"/v1/operations/{identifier}", Authorization=f"Bearer {TOKEN}")[1]
        return body if body["status"] in ("done", "failed") else None

    found: dict[str, Any] = until(look)
    return found
