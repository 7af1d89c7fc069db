"""What the program's exit codes mean; scripts rely on them."""

from __future__ import annotations

from enum import IntEnum


class ExitCode(IntEnum):
    """How a command ended."""

    OK = 0
    ERROR = 1
    USAGE = 2
    """argparse's own."""
    MISMATCH = 3
    NOT_READY = 4

    @property
    def meaning(self) -> str:
        """Words for help."""
        return _MEANINGS[self]


_MEANINGS = {
    ExitCode.OK: "ok",
    ExitCode.ERROR: "operational error",
    ExitCode.USAGE: "usage",
    ExitCode.MISMATCH: "a layer did not match",
    ExitCode.NOT_READY: "not ready or unreachable",
}
