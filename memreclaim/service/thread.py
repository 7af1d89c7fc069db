"""uvicorn in a daemon thread of a host process: no signal handlers, no logging, no peer that blocks another."""

from __future__ import annotations

import socket
import threading
from typing import TYPE_CHECKING, Any, Final

import uvicorn
from uvicorn.protocols.http.h11_impl import H11Protocol

from memreclaim.errors import MemreclaimError

if TYPE_CHECKING:
    import asyncio

    from starlette.types import ASGIApp

    from memreclaim.service.settings import ServiceSettings

SILENCE_SECONDS: Final = 10.0
"""A peer that has not sent a request by then is hung up on; uvicorn itself would wait for ever."""
MOST_CONNECTIONS: Final = 1024
_START_SECONDS: Final = 10.0


class ServiceError(MemreclaimError, OSError):
    """A service could not start."""


class Protocol(H11Protocol):
    """h11 with a limit on how long a new connection may be silent."""

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Start the clock."""
        super().connection_made(transport)
        self._silence = self.loop.call_later(SILENCE_SECONDS, self._hang_up)

    def connection_lost(self, exc: Exception | None) -> None:
        """Stop the clock."""
        self._silence.cancel()
        super().connection_lost(exc)

    def _hang_up(self) -> None:
        if self.cycle is None:  # no request has arrived yet
            self.transport.abort()


class HttpThread:
    """One application on one address."""

    def __init__(self, app: ASGIApp, settings: ServiceSettings, name: str = "memreclaim-http") -> None:
        """Bind at once: raises :class:`ServiceError` when the address is taken."""
        family = socket.AF_INET6 if ":" in settings.host else socket.AF_INET
        try:
            self._socket = socket.create_server((settings.host, settings.port), family=family, backlog=512)
        except OSError as error:
            message = f"cannot listen on {settings.host}:{settings.port}: {error.strerror or error}"
            raise ServiceError(message) from error
        self.host, self.port = settings.host, int(self._socket.getsockname()[1])
        options: dict[str, Any] = {"log_config": None, "access_log": False, "lifespan": "off", "ws": "none"}
        if settings.tls_cert is not None:
            options |= {"ssl_certfile": str(settings.tls_cert), "ssl_keyfile": str(settings.tls_key)}
        config = uvicorn.Config(
            app,
            http=Protocol,
            server_header=False,
            timeout_keep_alive=5,
            timeout_graceful_shutdown=2,
            limit_concurrency=MOST_CONNECTIONS,
            **options,
        )
        self._server = uvicorn.Server(config)
        self._thread = threading.Thread(target=self._serve, name=name, daemon=True)
        bracketed = f"[{self.host}]" if ":" in self.host else self.host
        self.url = f"{settings.scheme}://{bracketed}:{self.port}"

    def start(self) -> None:
        """Serve; returns when requests are answered. The socket accepts from the start, so nobody is turned away."""
        self._thread.start()

    def close(self) -> None:
        """Finish the requests that run, at most 2 s, and end the thread."""
        self._server.should_exit = True
        if self._thread.ident is not None:
            self._thread.join(_START_SECONDS)
        self._socket.close()

    def _serve(self) -> None:
        self._server.run(sockets=[self._socket])
