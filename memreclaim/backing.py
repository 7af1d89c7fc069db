"""What the tags of one weight stand for.

A backing is in one of three states, told by which of its two tensors it holds:

=========== ========= =======================================================================
twin        dense     state
=========== ========= =======================================================================
a twin      None      reclaimed: served from the twin, reads decode it
a twin      bf16      twin mode: served from the twin, reads and raw access go to the bf16 weight
None        None      moved out: restored or written, and the model has a parameter again
=========== ========= =======================================================================

Tags that outlive their backing's twin (a view that an engine cached, say) follow the model: they stand for whatever
parameter is there now, a plain one or the tag of a later twin, and so never hold a weight's bytes themselves.
"""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Protocol

import torch

from memreclaim import counters
from memreclaim.errors import TagAccessError
from memreclaim.tagged import Tagged

if TYPE_CHECKING:
    from typing import NoReturn

    from memreclaim.twin import Twin
    from memreclaim_kernels.plan import Numerics


class Home(Protocol):
    """Where in the model a weight stands."""

    def move_in(self, backing: Backing, dense: torch.Tensor) -> None:
        """Put parameters over ``dense`` wherever tags of ``backing`` stand; if it raises, none is changed."""

    def current(self) -> torch.Tensor:
        """The parameter that stands there now."""


class Backing:
    """Twin or bf16 weight behind all tags of one layer, shared by every view of them."""

    __slots__ = ("__weakref__", "_dense", "_home", "_twin", "layer", "lock", "numerics", "shape")

    def __init__(self, layer: str, twin: Twin, home: Home, numerics: Numerics = "identical") -> None:
        """Start reclaimed."""
        self.layer = layer
        self.numerics = numerics
        self.shape = twin.shape
        self.lock = threading.RLock()
        self._home = home
        self._twin: Twin | None = twin
        self._dense: torch.Tensor | None = None

    @property
    def twin(self) -> Twin | None:
        """The twin that serves, a later one after the layer was reclaimed again, or None."""
        successor = self if self._twin is not None else self._successor()
        return None if successor is None else successor._twin

    @property
    def dense(self) -> torch.Tensor | None:
        """The bf16 weight in twin mode."""
        return self._dense

    @property
    def released(self) -> bool:
        """Whether the weight's bf16 bytes are gone."""
        if self._twin is not None:
            return self._dense is None
        successor = self._successor()
        return successor is not None and successor.released

    def _successor(self) -> Backing | None:
        """The backing of the tag that stands in the model now, if another one does."""
        current = self._home.current()
        backing = current.memreclaim_backing if isinstance(current, Tagged) else self
        return None if backing is self else backing

    def read(self, operation: str) -> torch.Tensor:
        """The exact bf16 weight for one reader: the weight itself, or a fresh copy that is counted by ``operation``."""
        dense, twin = self._dense, self._twin
        if dense is not None:
            return dense
        if twin is not None:
            counters.materializations.add(operation)
            return twin.dequantize()
        current = self._home.current()
        return current.memreclaim_backing.read(operation) if isinstance(current, Tagged) else current.detach()

    def keep(self, dense: torch.Tensor) -> None:
        """Enter twin mode: ``dense`` (contiguous bf16 of the weight's shape) stays beside the twin."""
        self._dense = dense

    def abandon(self) -> None:
        """The swap failed and the model has its own parameters again: tags that got out follow them."""
        self._twin = self._dense = None

    def make_dense(self) -> torch.Tensor:
        """Bring the bf16 weight back for good, because it is restored or about to be written; returns its parameter.

        If that fails, for want of memory say, the error is raised and the twin goes on serving.
        """
        with self.lock:
            twin, dense = self._twin, self._dense
            if twin is not None:
                # A parameter made in inference mode could never be trained or written outside of it.
                with torch.inference_mode(mode=False):
                    self._home.move_in(self, twin.dequantize() if dense is None else dense)
                self._twin = self._dense = None
        current = self._home.current()
        return current.memreclaim_backing.make_dense() if isinstance(current, Tagged) else current

    def replace_data(self, value: torch.Tensor) -> None:
        """``weight.data = value`` on a tag: the layer is restored, then its parameter takes ``value``."""
        self.make_dense().data = value

    def record_stream(self, stream: torch.Stream) -> None:
        """Tell the allocator that ``stream`` uses what serves this weight."""
        twin, dense = self._twin, self._dense
        parts = [] if twin is None else [twin.packed, twin.exponents]
        for part in parts if dense is None else [*parts, dense]:
            part.record_stream(stream)

    def refuse(self, operation: str) -> NoReturn:
        """Raise :class:`TagAccessError` for an access that no exact value can satisfy."""
        counters.refusals.add(operation)
        raise TagAccessError(self.layer, operation)
