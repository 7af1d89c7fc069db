"""Settings: what the operator may say, and that everything else is refused by name."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

import memreclaim as mr
from memreclaim.config import LogFormat, Mode, Numerics, OnMismatch

pytestmark = pytest.mark.cpu


def test_defaults_of_the_environment() -> None:
    """An empty environment turns everything off."""
    assert mr.Settings.from_env({}) == mr.Settings(mode=Mode.OFF)


def test_every_setting() -> None:
    """Each variable reaches its field."""
    settings = mr.Settings.from_env({
        "MEMRECLAIM": "on", "MEMRECLAIM_NUMERICS": "fused",
        "MEMRECLAIM_TARGETS": "wo_a, kv_b", "MEMRECLAIM_DRAFT": "off",
        "MEMRECLAIM_ON_MISMATCH": "abort", "MEMRECLAIM_HTTP": "[::1]:8080",
        "MEMRECLAIM_LOG_FORMAT": "json", "PATH": "x",
    })  # fmt: skip
    assert settings == mr.Settings(
        Mode.ON, Numerics.FUSED, ("wo_a", "kv_b"), draft=False, on_mismatch=OnMismatch.ABORT, http=("::1", 8080),
        log_format=LogFormat.JSON,
    )  # fmt: skip


@pytest.mark.parametrize(
    ("variable", "value"),
    [
        ("MEMRECLAIM", "ON"), ("MEMRECLAIM", ""),
        ("MEMRECLAIM", "1"), ("MEMRECLAIM_NUMERICS", "exact"), ("MEMRECLAIM_TARGETS", ""),
        ("MEMRECLAIM_TARGETS", "wo_a,,b"), ("MEMRECLAIM_TARGETS", "wo-a"), ("MEMRECLAIM_DRAFT", "true"),
        ("MEMRECLAIM_ON_MISMATCH", "die"), ("MEMRECLAIM_HTTP", "8080"),
        ("MEMRECLAIM_HTTP", "host:"), ("MEMRECLAIM_HTTP", ":80"),
        ("MEMRECLAIM_HTTP", "host:65536"), ("MEMRECLAIM_HTTP", "host:-1"), ("MEMRECLAIM_HTTP", "host:" + "9" * 5000),
        ("MEMRECLAIM_HTTP", "host:٣"), ("MEMRECLAIM_LOG_FORMAT", "xml"),
        ("MEMRECLAIM_NUMERIC", "fused"), ("MEMRECLAIM_", "x"),
    ],
)  # fmt: skip
def test_bad_values_name_the_variable(variable: str, value: str) -> None:
    """A bad value, and a name that is no setting, raise and say which variable it was."""
    with pytest.raises(mr.ConfigError, match=variable) as caught:
        mr.Settings.from_env({variable: value})
    assert caught.value.variable == variable


@given(
    st.dictionaries(
        st.sampled_from(["MEMRECLAIM", "MEMRECLAIM_HTTP", "MEMRECLAIM_TARGETS", "MEMRECLAIM_X"]), st.text(max_size=12)
    )
)
def test_any_environment_is_read_or_refused(environ: dict[str, str]) -> None:
    """Whatever is in the variables, the answer is settings or a ``ConfigError`` that names one of them."""
    try:
        settings = mr.Settings.from_env(environ)
    except mr.ConfigError as error:
        assert error.variable in environ  # noqa: PT017
    else:
        assert isinstance(settings, mr.Settings)


@pytest.mark.parametrize(
    "bad", [{"mode": "maybe"}, {"numerics": "close"}, {"on_mismatch": "x"}, {"log_format": "x"}, {"targets": ()}]
)
def test_bad_arguments_are_refused(bad: dict[str, object]) -> None:
    """The constructor refuses what the environment does."""
    with pytest.raises(mr.ConfigError, match=next(iter(bad))):
        mr.Settings(**bad)


def test_words_and_members_are_the_same() -> None:
    """``mode="on"`` is ``Mode.ON``, and settings are frozen."""
    settings = mr.Settings(mode="twin")
    assert (settings.mode, settings == mr.Settings(mode=Mode.TWIN)) == (Mode.TWIN, True)
    with pytest.raises(AttributeError):
        settings.mode = Mode.ON


def test_fields_take_the_words_of_the_environment() -> None:
    """A field set from Python reads a word as its variable does: ``draft="off"`` is off, and one target is one name."""
    settings = mr.Settings(targets="wo_a, wo_b", draft="off", http="localhost:80")  # type: ignore[arg-type]
    assert (settings.targets, settings.draft, settings.http) == (("wo_a", "wo_b"), False, ("localhost", 80))
    assert mr.Settings(targets=["wo_a"], http="off") == mr.Settings()  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("targets", ()), ("targets", ("wo a",)), ("targets", (3,)), ("targets", None), ("targets", "wo-a"),
        ("draft", "no"), ("draft", 1), ("http", ("h", 65536)), ("http", ("h", "80")), ("http", ("", 80)),
        ("http", 80), ("mode", None),
    ],
)  # fmt: skip
def test_bad_fields_are_named(field: str, value: object) -> None:
    """A field set from Python to what it cannot be is refused by its name."""
    with pytest.raises(mr.ConfigError, match=field):
        mr.Settings(**{field: value})  # type: ignore[arg-type]
