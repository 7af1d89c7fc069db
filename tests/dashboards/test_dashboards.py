"""The committed dashboards are what the builder makes, and follow the rules of Grafana's dashboard linter, restated."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from memreclaim.observe.families import SPECS
from memreclaim.observe.panels import ROWS

pytestmark = pytest.mark.cpu

FOLDER = Path(__file__).parents[2] / "dashboards"
FILES = ("memreclaim.json", "memreclaim-sglang.json")


def board(file: str) -> dict[str, Any]:
    """A committed dashboard."""
    loaded: dict[str, Any] = json.loads((FOLDER / file).read_text())
    return loaded


def panels(file: str) -> list[dict[str, Any]]:
    """Its panels that are no rows."""
    return [panel for panel in board(file)["panels"] if panel["type"] != "row"]


def test_committed_dashboards_are_the_builders_to_the_byte() -> None:
    """``memreclaim dashboards export`` gives exactly what is committed."""
    pytest.importorskip("grafana_foundation_sdk", reason="needs grafana-foundation-sdk==0.0.21")
    from memreclaim.observe.dashboards import rendered

    assert rendered() == {file: (FOLDER / file).read_text() for file in FILES}


@pytest.mark.parametrize("file", FILES)
def test_schema_and_ids(file: str) -> None:
    """Schema 42, a uid, unique panel ids from 1 that are never null or 0."""
    loaded = board(file)
    identifiers = [panel["id"] for panel in loaded["panels"]]
    assert loaded["schemaVersion"] == 42
    assert loaded["uid"] == file.removesuffix(".json")
    assert identifiers == list(range(1, len(identifiers) + 1))


@pytest.mark.parametrize("file", FILES)
def test_every_panel_says_what_it_shows(file: str) -> None:
    """Title, description, unit and data source variable on each."""
    for panel in panels(file):
        assert panel["title"]
        assert panel["description"].endswith(".")
        assert panel["fieldConfig"]["defaults"]["unit"]
        assert panel["datasource"] == {"type": "prometheus", "uid": "$datasource"}
        assert panel["targets"]
        assert all(target["datasource"]["uid"] == "$datasource" for target in panel["targets"])
    titles = [panel["title"] for panel in panels(file)]
    assert len(set(titles)) == len(titles)


@pytest.mark.parametrize("file", FILES)
def test_panels_do_not_overlap(file: str) -> None:
    """Each square of the grid belongs to one panel, and none leaves the 24 columns."""
    taken: set[tuple[int, int]] = set()
    for panel in board(file)["panels"]:
        place = panel["gridPos"]
        assert place["x"] + place["w"] <= 24
        squares = {
            (x, y)
            for x in range(place["x"], place["x"] + place["w"])
            for y in range(place["y"], place["y"] + place["h"])
        }
        assert not squares & taken
        taken |= squares


@pytest.mark.parametrize("file", FILES)
def test_variables_are_those_of_the_contract(file: str) -> None:
    """The data source first; all others can be All and several."""
    variables = board(file)["templating"]["list"]
    assert [variable["name"] for variable in variables] == ["datasource", "job", "instance", "model_name", "tp_rank"]
    assert all(variable["includeAll"] and variable["multi"] for variable in variables[1:])


@pytest.mark.parametrize("file", FILES)
def test_queries_use_variables_and_the_rate_interval(file: str) -> None:
    """Selectors filter by the variables, ranges follow the scrape interval, and only exported metrics are asked for."""
    known = {f"memreclaim_{name}" for name in SPECS}
    for panel in panels(file):
        for target in panel["targets"]:
            expression = target["expr"]
            assert "$model_name" in expression, panel["title"]
            assert set(re.findall(r"\[([^\]]+)\]", expression)) <= {"$__rate_interval"}
            for name in re.findall(r"memreclaim_\w+", expression):
                assert name.removesuffix("_bucket").removesuffix("_sum").removesuffix("_count") in known, name


def test_rows_are_those_of_the_contract() -> None:
    """Seven rows, in order."""
    wanted = ["Summary", "Layers", "KV pool", "Device memory", "Kernels", "Operations", "Service"]
    assert [row.title for row in ROWS] == wanted
    assert [panel["title"] for panel in board(FILES[0])["panels"] if panel["type"] == "row"] == wanted


def test_every_metric_is_on_the_dashboard() -> None:
    """Nothing is exported that nobody can see."""
    text = (FOLDER / FILES[0]).read_text()
    assert [name for name in SPECS if f"memreclaim_{name}" not in text] == []
