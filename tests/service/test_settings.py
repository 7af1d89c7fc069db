"""Unsafe settings are refused at start, naming the variable."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from memreclaim.errors import ConfigError
from memreclaim.service.settings import ServiceSettings

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = pytest.mark.cpu


@pytest.fixture
def token_file(tmp_path: Path) -> Path:
    """A token that only its owner can read."""
    path = tmp_path / "token"
    path.write_text("0123456789abcdef\n")
    path.chmod(0o600)
    return path


def test_default_is_loopback() -> None:
    """Without a word a service can only be reached from its own machine."""
    assert ServiceSettings().host == "127.0.0.1"


@pytest.mark.parametrize("host", ["0.0.0.0", "192.168.1.5", "::", "node7"])  # noqa: S104  what must be refused
def test_others_may_come_only_with_token_and_tls(host: str, tmp_path: Path) -> None:
    """A bind that others can reach needs both."""
    with pytest.raises(ConfigError, match="MEMRECLAIM_HTTP"):
        ServiceSettings(host=host)
    with pytest.raises(ConfigError, match="TLS"):
        ServiceSettings(host=host, token="0123456789abcdef")  # noqa: S106
    assert ServiceSettings(
        host=host,
        token="0123456789abcdef",  # noqa: S106
        tls_cert=tmp_path,
        tls_key=tmp_path,
    )


def test_token_is_read_from_its_file(token_file: Path) -> None:
    """The line break at its end is no part of it."""
    settings = ServiceSettings.from_env(("127.0.0.1", 0), {"MEMRECLAIM_HTTP_TOKEN_FILE": str(token_file)})
    assert settings.token == "0123456789abcdef"  # noqa: S105


def test_token_that_others_can_read_is_refused(token_file: Path) -> None:
    """Mode 0600 or nothing."""
    token_file.chmod(0o640)
    with pytest.raises(ConfigError, match=r"MEMRECLAIM_HTTP_TOKEN_FILE.*chmod 600"):
        ServiceSettings.from_env(("127.0.0.1", 0), {"MEMRECLAIM_HTTP_TOKEN_FILE": str(token_file)})


@pytest.mark.parametrize("text", ["", "short", "with a space in it", "0123456789abcdé"])
def test_bad_tokens_are_refused(token_file: Path, text: str) -> None:
    """Empty, short, spaced and non-ASCII tokens."""
    token_file.write_text(text)
    with pytest.raises(ConfigError, match="16 visible ASCII"):
        ServiceSettings.from_env(("127.0.0.1", 0), {"MEMRECLAIM_HTTP_TOKEN_FILE": str(token_file)})


@pytest.mark.parametrize(
    ("variable", "value"),
    [
        ("MEMRECLAIM_AUDIT_SECONDS", "often"),
        ("MEMRECLAIM_AUDIT_SECONDS", "-1"),
        ("MEMRECLAIM_AUDIT_SECONDS", "nan"),
        ("MEMRECLAIM_AUDIT_BYTES_PER_SECOND", "0"),
        ("MEMRECLAIM_PROBE_SECONDS", "1e9"),
        ("MEMRECLAIM_HTTP_TLS_CERT", "/nowhere/cert.pem"),
        ("MEMRECLAIM_HTTP_TOKEN_FILE", "/nowhere/token"),
    ],
)
def test_bad_values_name_their_variable(variable: str, value: str) -> None:
    """A setting that makes no sense is an error that says which one."""
    with pytest.raises(ConfigError, match=variable):
        ServiceSettings.from_env(("127.0.0.1", 0), {variable: value})
