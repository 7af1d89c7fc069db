"""Tuned tables: ``tuned/<gpu>.json`` in the package, overridden by ``~/.cache/memreclaim/tuned/*.json``.

A table is one JSON object::

    schema_version  1
    device          name (a part of the CUDA device name), capability [major, minor]
    status          "measured", or "published, not measured here"
    entries         list of objects, the first that matches a call wins:
        rows            [first, last] row count, inclusive
        groups          list of group counts, or null for any
        rank, depth     weight shape, or null for any
        numerics        "identical" or "fused"
        path            gemv, small, mid, large or dequant
        backend         triton or cuda
        order           chain, splits8, gemv or free
        config          object of integers: tile sizes and launch options of the kernel family
        date            ISO date of the measurement; null where figures were published without one
        versions        object of strings: torch, triton, cuda, driver, as known
        measurement     object: microseconds per layer of twin and stock where measured, and the source in words

A table that does not fit this is refused whole, with the file and the field named: a half-read table would send some
row counts to a path nobody measured.
"""

from __future__ import annotations

import json
from datetime import date
from functools import cache
from pathlib import Path
from typing import Any, Final, NamedTuple, NoReturn

SCHEMA_VERSION: Final = 1
PUBLISHED: Final = "published, not measured here"
_STATUSES: Final = ("measured", PUBLISHED)
_CHOICES: Final = {
    "numerics": ("identical", "fused"),
    "path": ("gemv", "small", "mid", "large", "dequant"),
    "backend": ("triton", "cuda"),
    "order": ("chain", "splits8", "gemv", "free"),
}
SHIPPED: Final = Path(__file__).parent / "tuned"


class TableError(ValueError):
    """A tuned table that is not valid; the message names file and field."""


class Entry(NamedTuple):
    """One row of a table: which calls it serves, and how."""

    rows: tuple[int, int]
    groups: tuple[int, ...] | None
    rank: int | None
    depth: int | None
    numerics: str
    path: str
    backend: str
    order: str
    config: tuple[tuple[str, int], ...]
    date: str | None
    versions: tuple[tuple[str, str], ...]
    measurement: tuple[tuple[str, float | str], ...]

    def matches(self, rows: int, groups: int, rank: int, depth: int, numerics: str) -> bool:
        """Whether this row is meant for such a call."""
        return (
            self.rows[0] <= rows <= self.rows[1]
            and self.numerics == numerics
            and (self.groups is None or groups in self.groups)
            and self.rank in {None, rank}
            and self.depth in {None, depth}
        )


class Table(NamedTuple):
    """What was measured, or published, for one GPU."""

    source: str
    """File name, and ``published`` where it was not measured here."""
    device: str
    capability: tuple[int, int]
    status: str
    entries: tuple[Entry, ...]


def user_folder() -> Path:
    """Where a user's own tables are looked for."""
    return Path.home() / ".cache" / "memreclaim" / "tuned"


@cache
def for_device(name: str, capability: tuple[int, int]) -> tuple[Table, ...]:
    """Tables of a GPU, the user's before the shipped ones. Raises :class:`TableError` for a table that is not valid."""
    files = [*sorted(user_folder().glob("*.json")), *sorted(SHIPPED.glob("*.json"))]
    tables = [load(file) for file in files]
    return tuple(table for table in tables if table.device in name and table.capability == capability)


def load(file: Path) -> Table:
    """Read and check one table."""
    try:
        return _table(file.name, json.loads(file.read_text(encoding="utf-8")))
    except (OSError, UnicodeDecodeError, json.JSONDecodeError) as error:
        message = f"{file}: {error}"
        raise TableError(message) from error


def _table(source: str, raw: object) -> Table:
    body = _fields(source, raw, {"schema_version", "device", "status", "entries"})
    if body["schema_version"] != SCHEMA_VERSION:
        _refuse(source, "schema_version", body["schema_version"], f"this version reads {SCHEMA_VERSION}")
    device = _fields(f"{source}: device", body["device"], {"name", "capability"})
    if not isinstance(device["name"], str) or not device["name"]:
        _refuse(source, "device.name", device["name"], "must be a name")
    if body["status"] not in _STATUSES:
        _refuse(source, "status", body["status"], f"must be one of {_STATUSES}")
    if not isinstance(body["entries"], list) or not body["entries"]:
        _refuse(source, "entries", body["entries"], "must be a list that is not empty")
    return Table(
        source=source if body["status"] == "measured" else f"{source} ({PUBLISHED})",
        device=device["name"],
        capability=_pair(source, "device.capability", device["capability"], 0),
        status=body["status"],
        entries=tuple(
            _entry(f"{source}: entries[{index}]", item, body["status"]) for index, item in enumerate(body["entries"])
        ),
    )


def _entry(where: str, raw: object, status: str) -> Entry:
    body = _fields(where, raw, set(Entry._fields))
    for name, allowed in _CHOICES.items():
        if body[name] not in allowed:
            _refuse(where, name, body[name], f"must be one of {allowed}")
    first, last = _pair(where, "rows", body["rows"], 1)
    if first > last:
        _refuse(where, "rows", body["rows"], "first is above last")
    if not (body["date"] is None and status == PUBLISHED):
        _check_date(where, body["date"])
    groups = body["groups"]
    if groups is not None and (not isinstance(groups, list) or not groups or not all(map(_is_count, groups))):
        _refuse(where, "groups", groups, "must be null or a list of positive integers")
    for name in ("rank", "depth"):
        if body[name] is not None and not _is_count(body[name]):
            _refuse(where, name, body[name], "must be null or a positive integer")
    return Entry(
        rows=(first, last),
        groups=None if groups is None else tuple(groups),
        rank=body["rank"],
        depth=body["depth"],
        **{name: body[name] for name in _CHOICES},
        config=_pairs(where, "config", body["config"], int),
        date=body["date"],
        versions=_pairs(where, "versions", body["versions"], str),
        measurement=_pairs(where, "measurement", body["measurement"], (int, float, str)),
    )


def _check_date(where: str, raw: object) -> None:
    try:
        date.fromisoformat(raw)  # type: ignore[arg-type]  # a TypeError is an answer too
    except (TypeError, ValueError):
        _refuse(where, "date", raw, "must be an ISO date")


def _fields(where: str, raw: object, names: set[str]) -> dict[str, Any]:
    """``raw`` as an object with exactly these fields."""
    if not isinstance(raw, dict):
        message = f"{where}: must be an object"
        raise TableError(message)
    if set(raw) != names:
        message = f"{where}: missing {sorted(names - set(raw))}, unknown {sorted(set(raw) - names)}"
        raise TableError(message)
    return raw


def _pairs(where: str, field: str, raw: object, kind: Any) -> tuple[tuple[str, Any], ...]:  # noqa: ANN401
    if not isinstance(raw, dict) or not all(isinstance(v, kind) and not isinstance(v, bool) for v in raw.values()):
        _refuse(where, field, raw, "has a value of the wrong type")
    return tuple(sorted(raw.items()))


def _pair(where: str, field: str, raw: object, least: int) -> tuple[int, int]:
    if not isinstance(raw, list) or [type(item) for item in raw] != [int, int] or min(raw) < least:
        _refuse(where, field, raw, f"must be two integers of at least {least}")
    first, second = raw
    return first, second


def _is_count(value: object) -> bool:
    return type(value) is int and value > 0


def _refuse(where: str, field: str, value: object, why: str) -> NoReturn:
    message = f"{where}: {field}={value!r} {why}"
    raise TableError(message)
