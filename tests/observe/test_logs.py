"""Log lines of a guest: in the host's handlers, or as JSON when asked for."""

from __future__ import annotations

import io
import json
import logging
from typing import TYPE_CHECKING

import pytest
import structlog

from memreclaim import events
from memreclaim.config import LogFormat
from memreclaim.journal import Journal
from memreclaim.observe import logs

if TYPE_CHECKING:
    from collections.abc import Iterator

pytestmark = pytest.mark.cpu


@pytest.fixture(autouse=True)
def _as_it_was() -> Iterator[None]:
    """Leave the package's logger as it was found."""
    logger = logging.getLogger("memreclaim")
    before = logger.handlers[:], logger.propagate, logger.level
    yield
    logger.handlers[:], logger.propagate = before[0], before[1]
    logger.setLevel(before[2])


def test_json_lines_keep_types_and_stay_one_line() -> None:
    """Numbers stay numbers, the rank is on each line, and a line break in a value makes no second line."""
    stream = io.StringIO()
    logs.use_json(stream, rank="TP1")
    events.emit("warning", "pool_refused", requested_bytes=12, detail="two\nlines")
    (line,) = stream.getvalue().splitlines()
    found = json.loads(line)
    assert (found["event"], found["requested_bytes"], found["rank"], found["level"]) == (
        "pool_refused",
        12,
        "TP1",
        "warning",
    )
    assert found["detail"] == "two\nlines"


def test_host_format_adds_no_handler() -> None:
    """``host`` leaves logging to the host process: no handler, no level, no propagation changed."""
    logger = logging.getLogger("memreclaim")
    before = logger.handlers[:], logger.propagate, logger.level
    assert logs.configure(LogFormat.HOST) is None
    assert (logger.handlers[:], logger.propagate, logger.level) == before


def test_asking_twice_writes_once() -> None:
    """The second handler takes the place of the first."""
    first, second = io.StringIO(), io.StringIO()
    logs.use_plain(first)
    logs.configure(LogFormat.JSON, second)
    events.emit("info", "weights_reclaimed", net_bytes=1)
    assert first.getvalue() == ""
    assert len(second.getvalue().splitlines()) == 1


def test_structlog_and_root_logger_stay_untouched() -> None:
    """Nothing is configured globally: the host owns structlog and the root logger."""
    root = logging.getLogger().handlers[:]
    logs.use_json(io.StringIO())
    events.emit("info", "weights_reclaimed", net_bytes=1)
    assert not structlog.is_configured()
    assert logging.getLogger().handlers == root


def test_record_carries_logfmt_and_fields(caplog: pytest.LogCaptureFixture) -> None:
    """The host's formatter gets one logfmt line, and the fields in one attribute."""
    with caplog.at_level(logging.INFO, logger="memreclaim"):
        events.emit("info", "pool_grown", grown_bytes=5, component="target")
    (record,) = caplog.records
    assert record.getMessage() == "pool_grown grown_bytes=5 component=target"
    assert record.memreclaim == {"event": "pool_grown", "grown_bytes": 5, "component": "target"}  # type: ignore[attr-defined]


def test_status_page_gets_events_whatever_the_host_logs() -> None:
    """A listener hears events below the host's log level, until it stops listening."""
    journal = Journal()
    stop = events.listen(journal.note)
    logging.getLogger("memreclaim").setLevel(logging.CRITICAL)
    events.emit("debug", "layer_reclaimed", layer="layers.0")
    stop()
    events.emit("debug", "layer_reclaimed", layer="layers.1")
    assert [event.fields["layer"] for event in journal.events()] == ["layers.0"]
