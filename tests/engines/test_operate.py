"""What ranks compare before any of them drops a weight."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import torch

from memreclaim import Settings
from memreclaim.engines import operate
from memreclaim_kernels import plan

if TYPE_CHECKING:
    from collections.abc import Iterator

pytestmark = pytest.mark.cpu
CPU = torch.device("cpu")
SHAPE = (2, 64, 128)


@pytest.fixture(autouse=True)
def _nothing_judged() -> Iterator[None]:
    plan.forget()
    yield
    plan.forget()


def _judged(*, same: bool, difference: str = "") -> dict[str, str]:
    plan.forget()
    kernel = plan.default("small", plan.CPU)
    plan.record(kernel, 4, SHAPE, plan.CPU, plan.Verdict(same, (4,), 512, difference))
    return operate.fingerprint(Settings(), "engine", CPU)


def test_verdicts_on_kernels_are_part_of_the_fingerprint() -> None:
    """A rank on which a kernel was refused serves by another path than one on which it was not."""
    nothing = operate.fingerprint(Settings(), "engine", CPU)
    good, bad = _judged(same=True), _judged(same=False, difference="at 0: 1.0, not 2.0")

    assert len({one["kernels"] for one in (nothing, good, bad)}) == 3
    assert {**good, "kernels": ""} == {**nothing, "kernels": ""}
    assert bad == _judged(same=False, difference="at 7: 3.0, not 2.0")


def test_a_backend_that_was_disabled_is_part_of_the_fingerprint() -> None:
    """One rank may lack a compiler."""
    before = operate.fingerprint(Settings(), "engine", CPU)
    plan.disable("cuda", "no compiler")

    assert operate.fingerprint(Settings(), "engine", CPU)["kernels"] != before["kernels"]


@pytest.mark.parametrize(("changes", "differing"), [({"draft": False}, ["draft"]), ({"http": ("::1", 9)}, [])])
def test_each_setting_stands_by_its_own_name(changes: dict[str, Any], differing: list[str]) -> None:
    """Ranks that differ say in what; where each listens is its own affair."""
    one, other = (operate.fingerprint(Settings(**more), "engine", CPU) for more in ({}, changes))

    assert [name for name in one if one[name] != other[name]] == differing
