"""Settings: frozen, read from the environment once, and refused when a value makes no sense."""

from __future__ import annotations

import os
from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING, Self, TypeVar

from memreclaim import aliases
from memreclaim.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Mapping

_PREFIX = "MEMRECLAIM_"
_MAX_PORT = 65535


class Mode(StrEnum):
    """How far memreclaim goes."""

    OFF = "off"
    OBSERVE = "observe"
    """Prove and report, keep nothing."""
    TWIN = "twin"
    """Serve from twins while the bf16 weights stay."""
    ON = "on"
    """Drop the bf16 weights."""


class Numerics(StrEnum):
    """Which bits a served projection has."""

    IDENTICAL = "identical"
    """Those of the stock path, at every row count."""
    FUSED = "fused"
    """In decode, verify and draft possibly those of another fp32 order of sums; never in prefill."""


class OnMismatch(StrEnum):
    """What a layer without an exact twin means."""

    KEEP = "keep"
    ABORT = "abort"


class LogFormat(StrEnum):
    """How log lines are written."""

    HOST = "host"
    JSON = "json"


_Choice = TypeVar("_Choice", bound=StrEnum)


@dataclass(frozen=True)
class Settings:
    """What the operator asked for; the README lists the variables."""

    mode: Mode = Mode.ON
    numerics: Numerics = Numerics.IDENTICAL
    targets: tuple[str, ...] = ("wo_a",)
    draft: bool = True
    on_mismatch: OnMismatch = OnMismatch.KEEP
    http: tuple[str, int] | None = None
    log_format: LogFormat = LogFormat.HOST

    def __post_init__(self) -> None:
        """Take the words of the environment too (``mode="on"``), and refuse what is none of them."""
        for name, kind in (
            ("mode", Mode),
            ("numerics", Numerics),
            ("on_mismatch", OnMismatch),
            ("log_format", LogFormat),
        ):
            object.__setattr__(self, name, _choice(kind, name, getattr(self, name)))
        words = {"targets": (_targets, self.targets), "draft": (_switch, self.draft), "http": (_address, self.http)}
        for name, (read, value) in words.items():
            if isinstance(value, str):
                object.__setattr__(self, name, read(name, value))
        object.__setattr__(self, "targets", _names("targets", self.targets))
        if not isinstance(self.draft, bool):
            raise ConfigError("draft", f"{self.draft!r} is neither True nor False")
        if self.http is not None and not _is_address(self.http):
            raise ConfigError("http", f"{self.http!r} is neither None nor host and port")

    @classmethod
    def from_env(cls, environ: Mapping[str, str] | None = None) -> Self:
        """Read ``MEMRECLAIM`` and ``MEMRECLAIM_*``; ``MEMRECLAIM`` unset means off.

        Older names are translated by :mod:`memreclaim.aliases`.
        Raises :class:`ConfigError` for a bad value and for a ``MEMRECLAIM_`` name that is no setting, since a misspelt
        one would otherwise be ignored in silence.
        """
        env = aliases.translate(os.environ if environ is None else environ)
        unknown = sorted(name for name in env if name.startswith(_PREFIX) and name not in _VARIABLES)
        if unknown:
            raise ConfigError(unknown[0], f"no such setting; there are MEMRECLAIM, {', '.join(sorted(_VARIABLES))}")
        return cls(
            mode=_choice(Mode, "MEMRECLAIM", env.get("MEMRECLAIM", Mode.OFF)),
            numerics=_choice(Numerics, "MEMRECLAIM_NUMERICS", env.get("MEMRECLAIM_NUMERICS", Numerics.IDENTICAL)),
            targets=_targets("MEMRECLAIM_TARGETS", env.get("MEMRECLAIM_TARGETS", "wo_a")),
            draft=_switch("MEMRECLAIM_DRAFT", env.get("MEMRECLAIM_DRAFT", "on")),
            on_mismatch=_choice(
                OnMismatch, "MEMRECLAIM_ON_MISMATCH", env.get("MEMRECLAIM_ON_MISMATCH", OnMismatch.KEEP)
            ),
            http=_address("MEMRECLAIM_HTTP", env.get("MEMRECLAIM_HTTP", "off")),
            log_format=_choice(LogFormat, "MEMRECLAIM_LOG_FORMAT", env.get("MEMRECLAIM_LOG_FORMAT", LogFormat.HOST)),
        )


_OWN = ("NUMERICS", "TARGETS", "DRAFT", "ON_MISMATCH", "HTTP", "LOG_FORMAT")
_SERVICE = (
    "HTTP_TOKEN_FILE",
    "HTTP_SCRAPE_TOKEN_FILE",
    "HTTP_TLS_CERT",
    "HTTP_TLS_KEY",
    "HTTP_HOSTS",
    "AUDIT_SECONDS",
    "AUDIT_BYTES_PER_SECOND",
    "PROBE_SECONDS",
)
"""Read by :mod:`memreclaim.service.settings`."""
_KERNELS = ("CACHE_DIR",)
"""Read by :mod:`memreclaim_kernels.cuda`: where compiled kernels are kept."""
_VARIABLES = frozenset(_PREFIX + name for name in (*_OWN, *_SERVICE, *_KERNELS))


def _choice(kind: type[_Choice], variable: str, value: str) -> _Choice:
    try:
        return kind(value)
    except ValueError:
        raise ConfigError(variable, f"{value!r} is none of {', '.join(kind)}") from None


def _switch(variable: str, value: str) -> bool:
    if value not in ("on", "off"):
        raise ConfigError(variable, f"{value!r} is none of on, off")
    return value == "on"


def _targets(variable: str, value: str) -> tuple[str, ...]:
    names = tuple(name.strip() for name in value.split(","))
    if not all(name.isidentifier() for name in names):
        raise ConfigError(variable, f"{value!r} is not a comma-separated list of module names")
    return names


def _names(variable: str, value: object) -> tuple[str, ...]:
    names = tuple(value) if isinstance(value, (tuple, list)) else ()
    if not names or not all(isinstance(name, str) and name.isidentifier() for name in names):
        raise ConfigError(variable, f"{value!r} holds no module names, or something else")
    return names


def _address(variable: str, value: str) -> tuple[str, int] | None:
    if value == "off":
        return None
    host, colon, port = value.rpartition(":")
    digits = port.isascii() and port.isdigit() and len(port) <= len(str(_MAX_PORT))
    if not colon or not host or not digits or int(port) > _MAX_PORT:
        raise ConfigError(variable, f"{value!r} is neither off nor host:port")
    return host.strip("[]"), int(port)


def _is_address(value: object) -> bool:
    if not isinstance(value, tuple) or len(value) != 2:  # noqa: PLR2004
        return False
    host, port = value
    return isinstance(host, str) and bool(host) and type(port) is int and 0 <= port <= _MAX_PORT
