"""The older names of settings."""

from __future__ import annotations

import logging

import pytest

from memreclaim import ConfigError, Settings

pytestmark = pytest.mark.cpu


@pytest.mark.parametrize(
    ("environ", "mode"),
    [
        ({"DSV41_WO_A_W8": "1"}, "twin"),
        ({"DSV41_WO_A_W8": "1", "DSV41_WO_A_W8_DROP": "0"}, "twin"),
        ({"DSV41_WO_A_W8": "1", "DSV41_WO_A_W8_DROP": "1"}, "on"),
        ({"DSV41_WO_A_W8": "1", "DSV41_WO_A_DROP": "1"}, "on"),
        ({"DSV41_WO_A_W8": "0", "DSV41_WO_A_W8_DROP": "1"}, "off"),
        ({"DSV41_WO_A_W8_DROP": "1"}, "off"),
        ({"DSV41_WO_A_W8": "1", "MEMRECLAIM": "observe"}, "observe"),
        ({}, "off"),
    ],
    ids=str,
)
def test_w8_and_drop_choose_the_mode(environ: dict[str, str], mode: str) -> None:
    """Twins without drop are twin mode, and a setting of our own wins."""
    assert Settings.from_env(environ).mode == mode


@pytest.mark.parametrize(("value", "draft"), [("1", True), ("0", False)])
@pytest.mark.parametrize("name", ["DSV41_WO_A_W8_DRAFT", "DSV41_WO_A_DRAFT"])
def test_draft_is_a_switch(name: str, value: str, draft: bool) -> None:
    """The draft is left alone when it is 0."""
    assert Settings.from_env({"DSV41_WO_A_W8": "1", name: value}).draft is draft


def test_mid_changes_no_numerics() -> None:
    """Rows 9 to 192 are served either way, with the stock path's bits."""
    assert Settings.from_env({"DSV41_WO_A_W8": "1", "DSV41_WO_A_W8_MID": "1"}).numerics == "identical"


def test_each_older_name_leaves_one_line_that_names_the_new_setting(caplog: pytest.LogCaptureFixture) -> None:
    """Operators learn what to write instead."""
    names = {f"DSV41_WO_A_W8{end}": "1" for end in ("", "_DROP", "_MID", "_DRAFT")}
    with caplog.at_level(logging.WARNING, logger="memreclaim"):
        Settings.from_env(names)

    lines = [record.getMessage() for record in caplog.records]
    assert len(lines) == len(names)
    for name, new in zip(
        names, ("MEMRECLAIM=on",) * 2 + ("MEMRECLAIM_NUMERICS=identical", "MEMRECLAIM_DRAFT=on"), strict=True
    ):
        assert any(f"old={name} " in line and f'new="{new}"' in line for line in lines)


def test_a_value_that_is_no_switch_is_refused_by_name() -> None:
    """A typing error is not taken for off."""
    with pytest.raises(ConfigError, match="DSV41_WO_A_W8_DROP"):
        Settings.from_env({"DSV41_WO_A_W8": "1", "DSV41_WO_A_W8_DROP": "yes"})
