"""What runs and what it came to, as the journal tells it."""

from __future__ import annotations

import pytest
from core.models import reclaimer, stack

from memreclaim.journal import OPERATIONS, Journal
from memreclaim.rank import Rank
from memreclaim.rank_snapshot import RankState

pytestmark = pytest.mark.cpu


def test_audit_that_ends_during_a_reclaim_does_not_end_it() -> None:
    """The reclaim goes on as the running operation, and nothing runs after it."""
    journal = Journal()
    with journal.operation("reclaim"):
        with journal.operation("audit"):
            assert journal.running == "reclaim"
        assert journal.running == "reclaim"
    assert journal.running is None


def test_reclaim_that_ends_during_an_audit_leaves_the_audit_running() -> None:
    """Operations may end in any order, also by an error."""
    journal = Journal()
    audit = journal.operation("audit")
    audit.__enter__()
    with pytest.raises(ValueError, match="stop"), journal.operation("reclaim"):
        raise ValueError("stop")
    assert journal.running == "audit"
    audit.__exit__(None, None, None)
    assert journal.running is None


@pytest.mark.parametrize("name", OPERATIONS)
def test_each_operation_is_seen_while_it_runs(name: str) -> None:
    """No operation that is counted runs unseen."""
    journal = Journal()
    with journal.operation(name):
        assert journal.running == name


def test_rank_works_until_its_reclaim_ends() -> None:
    """An audit that ends first does not make the rank ready."""
    rec = reclaimer()
    rec.reclaim(stack(1))
    rank = Rank(rec)
    rank.started = True
    with rec.journal.operation("reclaim"):
        with rec.journal.operation("audit"):
            pass
        assert rank.snapshot().state is RankState.WORKING
    assert rank.snapshot().state is RankState.READY
    rank.close()
