"""The embedded engine under a steady, light load: what ``memreclaim serve --engine reference`` runs."""

from __future__ import annotations

import threading
from itertools import count
from typing import TYPE_CHECKING

from memreclaim.engines import reference

if TYPE_CHECKING:
    import torch

_NEW_TOKENS = 4
_PROMPT_TOKENS = 8


class SteadyLoad:
    """Submits a short request every so often until it is closed; never more than one waits."""

    def __init__(self, server: reference.Server, interval_seconds: float) -> None:
        """One request per ``interval_seconds``; 0 means none."""
        self._server, self._interval = server, interval_seconds
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="memreclaim-load", daemon=True)

    def start(self) -> None:
        """Start submitting."""
        if self._interval > 0:
            self._thread.start()

    def close(self) -> None:
        """Stop submitting; what is in flight is the server's."""
        self._stop.set()
        if self._thread.ident is not None:
            self._thread.join()

    def _run(self) -> None:
        config = self._server.model.config
        for seed in count():
            if self._server.waiting == 0:
                (prompt,) = reference.burst(config, 1, seed=seed, length=_PROMPT_TOKENS)
                self._server.submit(prompt, _NEW_TOKENS)
            if self._stop.wait(self._interval):
                return


def first_weight(model: reference.ReferenceModel) -> tuple[torch.Tensor, int]:
    """A target weight to measure baselines on, and its groups."""
    from memreclaim.discover import discover

    candidate = discover(model)[0]
    return candidate.sites[0].get(), candidate.groups
