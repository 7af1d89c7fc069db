"""What is logged: one line per event, the same fields as a dict, nothing done to the host's logging."""

from __future__ import annotations

import logging
from typing import Any

import pytest
import torch
from core.models import Attention, Stack, reclaimer, stack

from memreclaim import Reason, events
from memreclaim.rank import Rank
from memreclaim.rank_snapshot import RankState

pytestmark = pytest.mark.cpu


def records(caplog: pytest.LogCaptureFixture) -> list[tuple[str, dict[str, Any]]]:
    """Level and fields of each record of memreclaim."""
    return [(record.levelname, record.memreclaim) for record in caplog.records if record.name == events.LOGGER]


def test_one_line_at_info_for_each_operation(caplog: pytest.LogCaptureFixture) -> None:
    """A reclaim and a restore each leave one INFO line with units in the field names."""
    model, rec = stack(2), reclaimer()
    with caplog.at_level(logging.INFO, events.LOGGER):
        rec.reclaim(model)
        rec.restore(model)
    told = records(caplog)
    assert [(level, fields["event"]) for level, fields in told] == [
        ("INFO", "weights_reclaimed"),
        ("INFO", "weights_restored"),
    ]
    assert (told[0][1]["reclaimed"], told[0][1]["gross_bytes"]) == (2, 2 * 24576)
    assert "weights_reclaimed layers=2 reclaimed=2 kept=0 gross_bytes=49152" in caplog.text


def test_a_mismatch_is_a_warning_and_policy_is_not(caplog: pytest.LogCaptureFixture) -> None:
    """Case 6: a layer that does not match warns with count and detail; other reasons stay at DEBUG."""
    model = Stack(Attention(torch.randn((128, 96)).to(torch.bfloat16)), Attention(torch.zeros((128, 96))))
    with caplog.at_level(logging.DEBUG, events.LOGGER):
        reclaimer().reclaim(model)
    kept = [
        (level, fields["reason"], fields["layer"])
        for level, fields in records(caplog)
        if fields["event"] == "layer_kept"
    ]
    assert kept == [("WARNING", "mismatch", "layers.0.wo_a"), ("DEBUG", "dtype", "layers.1.wo_a")]


@pytest.mark.parametrize("reason", Reason)
def test_log_report_and_rank_agree_on_what_a_mismatch_is(reason: Reason) -> None:
    """What is logged as a warning is a mismatch in the report, and degrades the rank; nothing else is."""
    heard: list[str] = []
    leave = events.listen(lambda level, event, _fields: heard.append(level) if event == "layer_kept" else None)
    rec = reclaimer()
    report = rec.reclaim(stack(1), refused={"layers.0.wo_a": reason})
    leave()
    rank = Rank(rec)
    rank.started = True
    expected = reason in (Reason.MISMATCH, Reason.NOT_FINITE)
    assert heard == ["warning" if expected else "debug"]
    assert report.mismatched is expected
    assert rank.snapshot().state is (RankState.DEGRADED if expected else RankState.READY)
    rank.close()


def test_nothing_is_rendered_below_the_hosts_level(caplog: pytest.LogCaptureFixture) -> None:
    """Levels are the host's: at ERROR a reclaim says nothing."""
    with caplog.at_level(logging.ERROR, events.LOGGER):
        reclaimer().reclaim(stack(1))
    assert records(caplog) == []


def test_listeners_hear_everything_until_they_leave() -> None:
    """A listener gets every event whatever the level, and none after it left."""
    heard: list[str] = []
    leave = events.listen(lambda _level, event, _fields: heard.append(event))
    reclaimer().reclaim(stack(1))
    leave()
    reclaimer().reclaim(stack(1))
    assert heard.count("weights_reclaimed") == 1


def test_values_with_blanks_are_quoted(caplog: pytest.LogCaptureFixture) -> None:
    """A line stays logfmt whatever a value holds."""
    with caplog.at_level(logging.WARNING, events.LOGGER):
        events.pool_refused("grow", 5, "no room = none")
    assert 'detail="no room = none"' in caplog.text


def test_hosts_logging_is_left_alone() -> None:
    """No handler is installed, neither on the root logger nor on memreclaim's."""
    before = list(logging.getLogger().handlers)
    reclaimer().reclaim(stack(1))
    assert (logging.getLogger().handlers, logging.getLogger(events.LOGGER).handlers) == (before, [])
