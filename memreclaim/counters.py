"""Counts of what happened to tags, kept where it happens and read by snapshots."""

from __future__ import annotations

import threading
from collections import Counter


class Tally:
    """A thread-safe counter by key; an addition costs about 0.2 us."""

    def __init__(self) -> None:
        """Start at nothing."""
        self._lock = threading.Lock()
        self._counts: Counter[tuple[str, ...]] = Counter()

    def add(self, *key: str) -> None:
        """Count one more of ``key``."""
        with self._lock:
            self._counts[key] += 1

    def snapshot(self) -> dict[tuple[str, ...], int]:
        """All counts so far, a copy."""
        with self._lock:
            return dict(self._counts)


materializations = Tally()
"""Exact bf16 copies handed to a reader, by operation."""
refusals = Tally()
""":class:`~memreclaim.errors.TagAccessError` raised, by operation."""
calls = Tally()
"""Projections routed from Python, by path and phase."""
