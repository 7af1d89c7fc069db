"""Where a service listens and whom it trusts; refused at start when that would be unsafe."""

from __future__ import annotations

import ipaddress
import os
import stat
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Final, Self

from memreclaim.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Mapping

DEFAULT_PORT: Final = 9411
_LOOPBACK_NAMES: Final = ("127.0.0.1", "localhost", "::1")
_SHORTEST_TOKEN: Final = 16
_DAY: Final = 86_400.0


@dataclass(frozen=True)
class ServiceSettings:
    """Address, tokens and rates. Raises :class:`ConfigError`, naming the variable, for what is unsafe."""

    host: str = "127.0.0.1"
    port: int = DEFAULT_PORT
    """0 takes a free one."""
    token: str | None = None
    """Admin token; without one nobody may reclaim, restore or audit over HTTP."""
    scrape_token: str | None = None
    """Second token, for reading only."""
    tls_cert: Path | None = None
    tls_key: Path | None = None
    hosts: tuple[str, ...] = ()
    """Further names that clients may use for this host; the address bound and the loopback names are always among
    them."""
    audit_seconds: float = 3600.0
    """Time between audits of all twins; 0 turns them off."""
    audit_bytes_per_second: int = 64 * 1024 * 1024
    """Cap of an audit in the background: 0.02 to 2 % of what memory can do, 6 s for the 361 MB of a TP4 rank."""
    probe_seconds: float = 30.0
    """Time between two latency samples; 0 turns them off."""

    def __post_init__(self) -> None:
        """Refuse to listen to others without token and TLS."""
        if (self.tls_cert is None) != (self.tls_key is None):
            raise ConfigError("MEMRECLAIM_HTTP_TLS_CERT", "certificate and key are needed, or neither")
        if not _is_loopback(self.host) and (self.token is None or self.tls_cert is None):
            raise ConfigError(
                "MEMRECLAIM_HTTP", f"{self.host} can be reached from outside: set a token file, TLS certificate and key"
            )
        for name, value in (("AUDIT_SECONDS", self.audit_seconds), ("PROBE_SECONDS", self.probe_seconds)):
            if not 0 <= value <= _DAY:
                raise ConfigError(f"MEMRECLAIM_{name}", f"{value} is not between 0 and {_DAY:.0f}")
        if self.audit_bytes_per_second < 1:
            raise ConfigError("MEMRECLAIM_AUDIT_BYTES_PER_SECOND", f"{self.audit_bytes_per_second} is less than 1")

    @classmethod
    def from_env(cls, address: tuple[str, int], environ: Mapping[str, str] | None = None) -> Self:
        """Read ``MEMRECLAIM_HTTP_*``, ``_AUDIT_*`` and ``_PROBE_SECONDS`` for a service at ``address``."""
        env = os.environ if environ is None else environ
        host, port = address
        return cls(
            host=host,
            port=port,
            token=read_token(env.get("MEMRECLAIM_HTTP_TOKEN_FILE"), "MEMRECLAIM_HTTP_TOKEN_FILE"),
            scrape_token=read_token(env.get("MEMRECLAIM_HTTP_SCRAPE_TOKEN_FILE"), "MEMRECLAIM_HTTP_SCRAPE_TOKEN_FILE"),
            tls_cert=_path(env, "MEMRECLAIM_HTTP_TLS_CERT"),
            tls_key=_path(env, "MEMRECLAIM_HTTP_TLS_KEY"),
            hosts=tuple(name.strip() for name in env.get("MEMRECLAIM_HTTP_HOSTS", "").split(",") if name.strip()),
            audit_seconds=_number(env, "MEMRECLAIM_AUDIT_SECONDS", cls.audit_seconds),
            audit_bytes_per_second=int(_number(env, "MEMRECLAIM_AUDIT_BYTES_PER_SECOND", cls.audit_bytes_per_second)),
            probe_seconds=_number(env, "MEMRECLAIM_PROBE_SECONDS", cls.probe_seconds),
        )

    @property
    def allowed_hosts(self) -> frozenset[str]:
        """Names, without port, that a Host header may have; browsers send others only when DNS was rebound."""
        names = (*_LOOPBACK_NAMES, self.host, *self.hosts) if _is_loopback(self.host) else (self.host, *self.hosts)
        return frozenset(name.lower().strip("[]") for name in names)

    @property
    def scheme(self) -> str:
        """``http`` or ``https``."""
        return "http" if self.tls_cert is None else "https"


def read_token(file: str | None, variable: str) -> str | None:
    """Token in ``file``; raises :class:`ConfigError` for one that others can read, or that is short."""
    if file is None:
        return None
    path = Path(file)
    try:
        mode = path.stat().st_mode
        token = path.read_text(encoding="utf-8").strip()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(variable, f"{file} cannot be read: {error}") from error
    if stat.S_IMODE(mode) & 0o077:
        raise ConfigError(variable, f"{file} can be read by others: chmod 600 it")
    if len(token) < _SHORTEST_TOKEN or not token.isascii() or not token.isprintable() or " " in token:
        raise ConfigError(variable, f"{file} holds no token of at least {_SHORTEST_TOKEN} visible ASCII characters")
    return token


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def _path(env: Mapping[str, str], variable: str) -> Path | None:
    value = env.get(variable)
    if value is None:
        return None
    if not Path(value).is_file():
        raise ConfigError(variable, f"there is no file {value}")
    return Path(value)


def _number(env: Mapping[str, str], variable: str, default: float) -> float:
    value = env.get(variable)
    if value is None:
        return default
    try:
        return float(value)
    except ValueError:
        raise ConfigError(variable, f"{value!r} is not a number") from None
