"""The OpenAPI description of a rank's service; a head node answers the same calls for all ranks."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from memreclaim._version import __version__

if TYPE_CHECKING:
    from collections.abc import Sequence

_READS: Final = {
    "/metrics": ("Metrics for Prometheus, as text or OpenMetrics", "text/plain"),
    "/v1/report": ("The whole snapshot", "application/json"),
    "/v1/layers": ("Every layer with its state", "application/json"),
}
_OPEN: Final = {
    "/": ("The status page", "text/html"),
    "/healthz": ("Whether the service lives", "application/json"),
    "/readyz": ("Whether this rank gives right answers; 503 when it does not", "application/json"),
    "/openapi.json": ("This document", "application/json"),
}
_PROBLEM: Final = {"application/json": {"schema": {"$ref": "#/components/schemas/Problem"}}}
_REFUSALS: Final = {
    "401": "no token, or a wrong one",
    "403": "no admin token is configured",
    "413": "the body is too large",
    "415": "the body is not application/json",
    "421": "the Host header names another host",
}


def document(kinds: Sequence[str], *, head: bool = False) -> dict[str, Any]:
    """OpenAPI 3.1 with an action for each of ``kinds``, of a rank or of a head node."""
    paths: dict[str, Any] = {}
    for path, (summary, content) in _OPEN.items():
        paths[path] = {"get": _get(summary, content, secured=path == "/openapi.json")}
    for path, (summary, content) in _READS.items():
        paths[path] = {"get": _get(summary, content, secured=True)}
    paths["/readyz"]["get"]["responses"]["503"] = {"description": "not ready", "content": {"application/json": {}}}
    for kind in kinds:
        paths[f"/v1/{kind}"] = {"post": _action(kind)}
    paths["/v1/operations/{id}"] = {"get": _operation()}
    if head:
        paths["/v1/targets"] = {"get": _get("The ranks, for Prometheus' http_sd", "application/json", secured=True)}
    else:
        paths["/v1/reservations"] = {"post": _reserve(), "delete": _release()}
    return {
        "openapi": "3.1.0",
        "info": {
            "title": "memreclaim",
            "version": __version__,
            "license": {"name": "Apache-2.0", "identifier": "Apache-2.0"},
        },
        "paths": paths,
        "components": {"schemas": _SCHEMAS, "securitySchemes": {"token": {"type": "http", "scheme": "bearer"}}},
    }


_SCHEMAS: Final[dict[str, Any]] = {
    "Problem": {
        "type": "object",
        "required": ["error", "code"],
        "properties": {"error": {"type": "string"}, "code": {"type": "integer"}},
    },
    "Operation": {
        "type": "object",
        "required": ["id", "kind", "status", "created"],
        "properties": {
            "id": {"type": "string"},
            "kind": {"type": "string"},
            "status": {"enum": ["queued", "running", "done", "failed"]},
            "created": {"type": "number"},
            "started": {"type": ["number", "null"]},
            "finished": {"type": ["number", "null"]},
            "result": {"type": ["object", "null"]},
            "error": {"type": ["string", "null"]},
        },
    },
    "Reservation": {
        "type": "object",
        "properties": {"reservation": {"type": "string"}},
        "additionalProperties": False,
    },
}


def _refusals(*codes: str, **more: str) -> dict[str, Any]:
    named = {code: _REFUSALS[code] for code in codes} | {code.removeprefix("c"): text for code, text in more.items()}
    return {code: {"description": text, "content": _PROBLEM} for code, text in named.items()}


def _get(summary: str, content: str, *, secured: bool) -> dict[str, Any]:
    codes = ("401", "421") if secured else ("421",)
    answer: dict[str, Any] = {
        "summary": summary,
        "responses": {"200": {"description": "ok", "content": {content: {}}}, **_refusals(*codes)},
    }
    return {**answer, "security": [{"token": []}]} if secured else answer


def _body(name: str) -> dict[str, Any]:
    return {"content": {"application/json": {"schema": {"$ref": f"#/components/schemas/{name}"}}}}


def _action(kind: str) -> dict[str, Any]:
    key = {"name": "Idempotency-Key", "in": "header", "schema": {"type": "string", "minLength": 1, "maxLength": 128}}
    accepted = {"description": "accepted; it runs at the engine's next safe point", **_body("Operation")}
    refused = _refusals(
        "401", "403", "413", "415", "421", c400="a bad body or key", c409="busy, or a lapsed reservation"
    )
    return {
        "summary": f"Ask for: {kind}",
        "parameters": [key],
        "requestBody": _body("Reservation"),
        "responses": {"202": accepted, **refused},
        "security": [{"token": []}],
    }


def _operation() -> dict[str, Any]:
    parameter = {"name": "id", "in": "path", "required": True, "schema": {"type": "string"}}
    found = {"description": "the operation as it is now", **_body("Operation")}
    return {
        "summary": "How an operation is getting on",
        "parameters": [parameter],
        "responses": {"200": found, **_refusals("401", "421", c404="unknown, or forgotten")},
        "security": [{"token": []}],
    }


def _reserve() -> dict[str, Any]:
    return {
        "summary": "Keep others away for some seconds, so that all ranks start or none",
        "responses": {
            "201": {"description": "reserved", **_body("Reservation")},
            **_refusals("401", "403", "413", "415", "421", c409="busy"),
        },
        "security": [{"token": []}],
    }


def _release() -> dict[str, Any]:
    parameter = {"name": "X-Reservation", "in": "header", "required": True, "schema": {"type": "string"}}
    return {
        "summary": "Give a reservation back",
        "parameters": [parameter],
        "responses": {"204": {"description": "released"}, **_refusals("401", "403", "421", c404="unknown, or lapsed")},
        "security": [{"token": []}],
    }
