"""What the tags of one weight stand for.

A backing is in one of four states, told by which of its two tensors it holds:

=========== ========= =======================================================================
twin        dense     state
=========== ========= =======================================================================
a twin      None      reclaimed: served from the twin, reads decode it
a twin      bf16      twin mode: served from the twin, reads and raw access go to the bf16 weight
None        None      moved out: restored or written, and the model has a parameter again
None        bf16      moved out where no tag stood in the model any more: the tags that are left own the weight
=========== ========= =======================================================================

Tags that outlive their backing's twin (a view that an engine cached, say) follow the model: they stand for whatever
parameter is there now, a plain one or the tag of a later twin, and so never hold a weight's bytes themselves. When that
parameter is no longer a bf16 weight of the same shape, their geometry means nothing and they are refused.
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

    def move_in(self, backing: Backing, dense: torch.Tensor) -> bool:
        """Put parameters over ``dense`` wherever tags of ``backing`` stand; if it raises, none is changed.

        False when none stands there: somebody took the weight out of the model, or put another in its place.
        """

    def current(self) -> torch.Tensor | None:
        """The parameter that stands there now, if one does."""


class Backing:
    """Twin or bf16 weight behind all tags of one layer, shared by every view of them."""

    __slots__ = ("__weakref__", "_dense", "_home", "_layout", "_twin", "layer", "lock", "numerics", "shape")

    def __init__(self, layer: str, twin: Twin, home: Home, numerics: Numerics = "identical") -> None:
        """Start reclaimed."""
        self.layer = layer
        self.numerics = numerics
        self.shape = twin.shape
        self.lock = threading.RLock()
        self._home = home
        self._layout = twin.layout
        self._twin: Twin | None = twin
        self._dense: torch.Tensor | None = None

    @property
    def twin(self) -> Twin | None:
        """The twin that serves, a later one after the layer was reclaimed again, or None."""
        own = self._twin is not None or self._dense is not None
        successor = self if own else self._successor()
        return None if successor is None else successor._twin

    @property
    def dense(self) -> torch.Tensor | None:
        """The bf16 weight in twin mode, or one that its tags own."""
        return self._dense

    @property
    def released(self) -> bool:
        """Whether the weight's bf16 bytes are gone."""
        if self._twin is not None:
            return self._dense is None
        successor = None if self._dense is not None else self._successor()
        return successor is not None and successor.released

    def _successor(self) -> Backing | None:
        """The backing of the tag that stands in the model now, if another one does."""
        current = self._home.current()
        backing = current.memreclaim_backing if isinstance(current, Tagged) else self
        return None if backing is self else backing

    def read(self, operation: str) -> torch.Tensor:
        """The exact bf16 weight for one reader: the weight itself, or a fresh copy that is counted by ``operation``."""
        twin, dense = self._twin, self._dense  # in this order: make_dense sets a weight before it lets the twin go
        if dense is None and twin is not None:
            counters.materializations.add(operation)
            return twin.dequantize()
        if dense is None:
            current, successor = self._home.current(), self._successor()
            dense = current if successor is None else successor.read(operation)
        return self._in_layout(dense, operation).detach().contiguous()

    def write(self, operation: str) -> torch.Tensor:
        """The bf16 weight, brought back for good, for one writer."""
        weight = self._in_layout(self.make_dense(), operation)
        if not weight.is_contiguous():
            self.refuse(operation)
        return weight.detach()

    def _in_layout(self, weight: torch.Tensor | None, operation: str) -> torch.Tensor:
        """Refuse what took the weight's place but is none of its kind: a converted or reshaped one, or nothing."""
        if (
            weight is None
            or isinstance(weight, Tagged)
            or weight.dtype != torch.bfloat16
            or tuple(weight.shape) != self._layout
        ):
            self.refuse(operation)
        return weight

    def keep(self, dense: torch.Tensor) -> None:
        """Enter twin mode: ``dense`` (contiguous bf16 of the weight's shape) stays beside the twin."""
        self._dense = dense

    def abandon(self) -> None:
        """The swap failed and the model has its own parameters again: tags that got out follow them."""
        self._twin = self._dense = None

    def make_dense(self) -> torch.Tensor:
        """Bring the bf16 weight back for good, because it is restored or about to be written; returns its parameter.

        A weight whose tag no longer stands in the model is owned by its tags from then on, and never written to what
        took its place. If it fails, for want of memory say, the error is raised and the twin goes on serving.
        """
        with self.lock:
            twin, dense = self._twin, self._dense
            if twin is not None or dense is not None:
                # A parameter made in inference mode could never be trained or written outside of it.
                with torch.inference_mode(mode=False):
                    weight = twin.dequantize() if dense is None and twin is not None else dense
                    assert weight is not None
                    placed = self._home.move_in(self, weight)
                self._dense = None if placed else weight
                self._twin = None
            if self._dense is not None:
                return self._dense
        current, successor = self._home.current(), self._successor()
        if successor is not None:
            return successor.make_dense()
        if current is None or isinstance(current, Tagged):
            self.refuse("a write")
        return current

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
