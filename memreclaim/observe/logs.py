"""Log handlers for those who ask; by default memreclaim's records go wherever the host process sends them.

The lines themselves are made in :mod:`memreclaim.events`. Here are a JSON formatter for
``MEMRECLAIM_LOG_FORMAT=json`` and a plain one for programs of our own. Neither touches the root logger or structlog's
configuration.
"""

from __future__ import annotations

import json
import logging
import sys
import time
from typing import TYPE_CHECKING, Any

from memreclaim.config import LogFormat
from memreclaim.events import LOGGER

if TYPE_CHECKING:
    from typing import TextIO

_ATTRIBUTE = "memreclaim"


class JsonFormatter(logging.Formatter):
    """One JSON object a line: time, level, logger, event and the event's own fields, which keep their types."""

    def __init__(self, **always: str) -> None:
        """Add ``always`` to every line, such as the rank."""
        super().__init__()
        self._always = always

    def format(self, record: logging.LogRecord) -> str:
        """A line without a line break inside, whatever a message holds."""
        fields: dict[str, Any] = getattr(record, _ATTRIBUTE, None) or {"event": record.getMessage()}
        stamp = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created)) + f".{int(record.msecs):03d}Z"
        line = {"time": stamp, "level": record.levelname.lower(), "logger": record.name, **self._always, **fields}
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        return json.dumps(line, default=str)


def use_json(stream: TextIO | None = None, **always: str) -> logging.Handler:
    """Write this package's records as JSON lines to ``stream`` (stderr) and no longer to the host's handlers."""
    return _attach(JsonFormatter(**always), stream)


def use_plain(stream: TextIO | None = None) -> logging.Handler:
    """Write this package's records as ``time level line``; for programs of our own, which have no host."""
    return _attach(logging.Formatter("%(asctime)s %(levelname)-7s %(message)s"), stream)


def configure(log_format: LogFormat, stream: TextIO | None = None, **always: str) -> logging.Handler | None:
    """What ``MEMRECLAIM_LOG_FORMAT`` asks for: a handler for ``json``, nothing for ``host``."""
    return use_json(stream, **always) if log_format is LogFormat.JSON else None


def _attach(formatter: logging.Formatter, stream: TextIO | None) -> logging.Handler:
    logger = logging.getLogger(LOGGER)
    for old in [handler for handler in logger.handlers if isinstance(handler, _Own)]:
        logger.removeHandler(old)
    handler = _Own(sys.stderr if stream is None else stream)
    handler.setFormatter(formatter)
    logger.addHandler(handler)
    logger.propagate = False
    if logger.level == logging.NOTSET:
        logger.setLevel(logging.INFO)
    return handler


class _Own(logging.StreamHandler[Any]):
    """Marks handlers that were put here, so that asking twice does not write twice."""
