"""Asking services over HTTP, with time-outs, a cap on what is read, and no package beyond the standard library."""

from __future__ import annotations

import http.client
import json
import ssl
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final
from urllib.parse import urlsplit

from memreclaim.errors import ConfigError, MemreclaimError

if TYPE_CHECKING:
    from collections.abc import Mapping

TIMEOUT_SECONDS: Final = 3.0
LARGEST_ANSWER: Final = 16 * 1024 * 1024


class UnreachableError(MemreclaimError, OSError):
    """A service did not answer, or answered nonsense."""


@dataclass(frozen=True)
class Answer:
    """Status code and JSON body."""

    code: int
    body: dict[str, Any]

    @property
    def error(self) -> str:
        """What a refusal says."""
        return str(self.body.get("error", f"HTTP {self.code}"))


class Client:
    """Makes one connection per call; may be shared between threads."""

    def __init__(self, token: str | None = None, ca_file: str | None = None, timeout: float = TIMEOUT_SECONDS) -> None:
        """Send ``token``; trust ``ca_file`` instead of the system's authorities."""
        self._token, self._timeout = token, timeout
        try:
            self._tls = ssl.create_default_context(cafile=ca_file)
        except (OSError, ssl.SSLError) as error:
            raise ConfigError("--rank-ca", f"{ca_file} cannot be read: {error}") from error

    def get(self, url: str, path: str) -> Answer:
        """GET ``path`` of the service at ``url``. Raises :class:`UnreachableError`."""
        return self.call("GET", url, path)

    def call(
        self,
        method: str,
        url: str,
        path: str,
        body: Mapping[str, Any] | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> Answer:
        """One call. Raises :class:`UnreachableError` without an answer, :class:`ConfigError` for a bad URL."""
        parts = check_url(url)
        sent = dict(headers or {})
        if self._token is not None:
            sent["Authorization"] = f"Bearer {self._token}"
        content = None if body is None else json.dumps(body)
        if content is not None:
            sent["Content-Type"] = "application/json"
        connection = self._connection(parts.scheme, parts.hostname or "", parts.port)
        try:
            connection.request(method, parts.path.rstrip("/") + path, body=content, headers=sent)
            response = connection.getresponse()
            raw = response.read(LARGEST_ANSWER)
            parsed = json.loads(raw) if raw else {}
        except (OSError, http.client.HTTPException, ValueError) as error:
            message = f"{url}: {error or type(error).__name__}"
            raise UnreachableError(message) from error
        finally:
            connection.close()
        return Answer(response.status, parsed if isinstance(parsed, dict) else {"value": parsed})

    def _connection(self, scheme: str, host: str, port: int | None) -> http.client.HTTPConnection:
        if scheme == "https":
            return http.client.HTTPSConnection(host, port, timeout=self._timeout, context=self._tls)
        return http.client.HTTPConnection(host, port, timeout=self._timeout)


def check_url(url: str) -> Any:  # noqa: ANN401  urllib's own result type
    """Split a service's URL. Raises :class:`ConfigError` for what is none."""
    try:
        parts = urlsplit(url)
        port = parts.port
    except ValueError as error:
        raise ConfigError("URL", f"{url!r}: {error}") from error
    if parts.scheme not in ("http", "https") or not parts.hostname or parts.query or parts.fragment or port == 0:
        raise ConfigError("URL", f"{url!r} is not http://HOST:PORT")
    return parts
