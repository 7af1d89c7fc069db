"""Settings under the names of an earlier patch set, ``DSV41_WO_A_*``, read with the meaning that they have there.

=========================== ======================================================================================
older name                  setting
=========================== ======================================================================================
``DSV41_WO_A_W8=1``         ``MEMRECLAIM=twin``; with ``_DROP=1`` it is ``MEMRECLAIM=on``
``DSV41_WO_A_W8_DROP``      see above; without ``W8=1`` it does nothing
``DSV41_WO_A_W8_MID``       nothing to set: rows 9 to 192 are always served from the twin, by ``MEMRECLAIM_NUMERICS``
``DSV41_WO_A_W8_DRAFT``     ``MEMRECLAIM_DRAFT=on`` or ``off``
=========================== ======================================================================================

``_DROP``, ``_MID`` and ``_DRAFT`` are also read without the ``_W8`` in front. A setting of memreclaim's own wins over
an older name.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from memreclaim import events
from memreclaim.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Mapping

_W8: Final = "DSV41_WO_A_W8"
_STEM: Final = "DSV41_WO_A"
_WORDS: Final = {"1": True, "on": True, "true": True, "0": False, "off": False, "false": False, "": False}


def translate(environ: Mapping[str, str]) -> dict[str, str]:
    """``environ`` with the settings that its older names stand for; one log line for each names the new setting.

    Raises :class:`ConfigError` for a value that is no switch.
    """
    translated = dict(environ)
    w8, drop = _switch(environ, _W8), _either(environ, "DROP")
    if w8 is not None:
        _set(translated, _W8, "MEMRECLAIM", "off" if not w8[1] else "on" if drop and drop[1] else "twin")
    if drop is not None:
        _set(translated, drop[0], "MEMRECLAIM", translated.get("MEMRECLAIM", "off"))
    mid, draft = _either(environ, "MID"), _either(environ, "DRAFT")
    if mid is not None:
        _set(translated, mid[0], "MEMRECLAIM_NUMERICS", translated.get("MEMRECLAIM_NUMERICS", "identical"))
    if draft is not None:
        _set(translated, draft[0], "MEMRECLAIM_DRAFT", "on" if draft[1] else "off")
    return translated


def _set(environ: dict[str, str], old: str, new: str, value: str) -> None:
    standing = environ.setdefault(new, value)
    events.emit("warning", "setting_renamed", old=old, new=f"{new}={standing}", ignored=standing != value)


def _either(environ: Mapping[str, str], name: str) -> tuple[str, bool] | None:
    return _switch(environ, f"{_W8}_{name}") or _switch(environ, f"{_STEM}_{name}")


def _switch(environ: Mapping[str, str], name: str) -> tuple[str, bool] | None:
    """Name and value of a switch, None when it is not set."""
    if name not in environ:
        return None
    value = _WORDS.get(environ[name].strip().lower())
    if value is None:
        raise ConfigError(name, f"{environ[name]!r} is none of 0, 1")
    return name, value
