"""Tuned tables: read whole or refused whole, with the file and the field named."""

from __future__ import annotations

import copy
import json
from typing import TYPE_CHECKING, Any

import pytest

from memreclaim_kernels import plan, tables

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

pytestmark = pytest.mark.cpu

GOOD: dict[str, Any] = {
    "schema_version": 1,
    "device": {"name": "H200", "capability": [9, 0]},
    "status": "measured",
    "entries": [
        {
            "rows": [9, 16],
            "groups": [2, 4],
            "rank": 1024,
            "depth": None,
            "numerics": "identical",
            "path": "mid",
            "backend": "triton",
            "order": "chain",
            "config": {"block_m": 16, "warps": 8},
            "date": "2026-01-31",
            "versions": {"torch": "2.11"},
            "measurement": {"twin_us": 7.5, "stock_us": 9, "source": "bench"},
        }
    ],
}


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A user folder of its own."""
    monkeypatch.setattr(tables, "user_folder", lambda: tmp_path)
    tables.for_device.cache_clear()
    plan.forget()
    yield tmp_path
    tables.for_device.cache_clear()
    plan.forget()


def write(folder: Path, table: object) -> Path:
    """Write a table as JSON."""
    file = folder / "mine.json"
    file.write_text(json.dumps(table), encoding="utf-8")
    return file


def test_good_table(folder: Path) -> None:
    """Every field comes through."""
    table = tables.load(write(folder, GOOD))
    assert table[:4] == ("mine.json", "H200", (9, 0), "measured")
    entry = table.entries[0]
    assert entry.config == (("block_m", 16), ("warps", 8))
    assert [
        entry.matches(9, 4, 1024, 7, "identical"),
        entry.matches(17, 4, 1024, 7, "identical"),
        entry.matches(9, 1, 1024, 7, "identical"),
        entry.matches(9, 4, 1024, 7, "fused"),
    ] == [True, False, False, False]


BAD = {
    "schema_version": 2,
    "device": {"name": "", "capability": [9, 0]},
    "device.name": {"name": "H200"},
    "device.capability": {"name": "H200", "capability": "9.0"},
    "status": "guessed",
    "entries": [],
}
BAD_ENTRY = {
    "rows": [[16, 9], [0, 4], [1], "1-8", [1.0, 2]],
    "groups": [[], [0], 2, ["2"]],
    "rank": [0, "1024", 1.5, True],
    "depth": [-32],
    "numerics": ["exact"],
    "path": ["fast", None],
    "backend": ["reference"],
    "order": ["random"],
    "config": [{"warps": "8"}, {"warps": 1.5}, {"warps": True}, []],
    "date": ["yesterday", None, 20260131],
    "versions": [{"torch": 2.11}],
    "measurement": [{"twin_us": None}, [7.5]],
}


@pytest.mark.parametrize(("field", "value"), BAD.items())
def test_bad_head_is_refused(folder: Path, field: str, value: object) -> None:
    """A wrong field of the head is named."""
    name = field.split(".", maxsplit=1)[0]
    with pytest.raises(tables.TableError, match=rf"mine\.json.*{name}"):
        tables.load(write(folder, GOOD | {name: value}))


@pytest.mark.parametrize(("field", "value"), [(name, value) for name, values in BAD_ENTRY.items() for value in values])
def test_bad_entry_is_refused(folder: Path, field: str, value: object) -> None:
    """A wrong field of an entry is named."""
    table = copy.deepcopy(GOOD)
    table["entries"][0][field] = value
    with pytest.raises(tables.TableError, match=rf"entries\[0\]: {field}"):
        tables.load(write(folder, table))


@pytest.mark.parametrize("field", GOOD["entries"][0])
def test_missing_and_unknown_fields_are_refused(folder: Path, field: str) -> None:
    """A misspelt field is not ignored."""
    table = copy.deepcopy(GOOD)
    table["entries"][0][field + "s"] = table["entries"][0].pop(field)
    with pytest.raises(tables.TableError, match=f"missing .*{field}.*unknown .*{field}s"):
        tables.load(write(folder, table))


@pytest.mark.parametrize("text", ["", "[", "null", "[]", "\x00", "{}"])
def test_files_that_are_no_table_are_refused(folder: Path, text: str) -> None:
    """Truncated and foreign files are refused by name."""
    file = folder / "mine.json"
    file.write_text(text, encoding="utf-8")
    with pytest.raises(tables.TableError, match=r"mine\.json"):
        tables.load(file)


def test_user_tables_come_first(folder: Path) -> None:
    """A user's table overrides the shipped one, for its device only."""
    table = copy.deepcopy(GOOD)
    table["device"] = {"name": "GB10", "capability": [12, 1]}
    write(folder, table)
    assert [found.source for found in tables.for_device("NVIDIA GB10", (12, 1))] == [
        "mine.json",
        "gb10.json (published, not measured here)",
    ]
    assert tables.for_device("NVIDIA GB10", (12, 0)) == ()
    device = plan.Device("NVIDIA GB10", (12, 1))
    assert plan.candidates(12, 2, 1024, 4096, device=device)[0].source == "mine.json"


def test_shipped_tables_are_valid() -> None:
    """Every table in the package can be read, and GB10's says that nobody measured it here."""
    shipped = {file.stem: tables.load(file) for file in sorted(tables.SHIPPED.glob("*.json"))}
    assert shipped["gb10"].status == tables.PUBLISHED
    for name, table in shipped.items():
        assert all(entry.date for entry in table.entries) or table.status == tables.PUBLISHED, name
