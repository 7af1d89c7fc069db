"""What memreclaim needs to know of an engine: the adapter protocol.

An adapter answers questions and changes nothing by itself. It is made in the process that holds the weights (a rank),
and all its methods are called there.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING, ClassVar, Protocol, runtime_checkable

from memreclaim.states import Phase, Reason

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from contextlib import AbstractContextManager

    from torch import nn
    from torch.distributed import ProcessGroup

    from memreclaim.kvpool import KVPool
    from memreclaim.reclaimer import Reclaimer
    from memreclaim.snapshot import Report


class Role(StrEnum):
    """What a model is for."""

    TARGET = "target"
    DRAFT = "draft"


@dataclass(frozen=True)
class ModelPart:
    """One module tree whose weights may be reclaimed."""

    role: Role
    root: nn.Module
    prefix: str = ""
    """Names of layers that belong to this part start so, since an engine may hold target and draft in one tree."""

    def layers(self, targets: Sequence[str] = ("wo_a",)) -> Iterator[str]:
        """Names of the target modules in this part, as ``root.named_modules()`` has them."""
        for name, _ in self.root.named_modules():
            if name.startswith(self.prefix) and name.rpartition(".")[2] in targets:
                yield name


@dataclass(frozen=True)
class Reader:
    """One place in the engine that reads a layer's weight."""

    where: str
    """Dotted name of the function."""
    known: bool
    """It reads through :func:`memreclaim.serve.grouped_projection`, or the adapter replaced it by what does."""
    note: str = ""
    """For an unknown reader: what the adapter saw instead of what it expected."""


@runtime_checkable
class EngineAdapter(Protocol):
    """What an engine tells memreclaim; made by the engine's side, one per rank."""

    name: ClassVar[str]
    """Key in the registry."""

    def models(self) -> tuple[ModelPart, ...]:
        """Where the weights are: the target first, then drafts, loaded on their device.

        No side effects. The roots are the live modules; the tuple is valid until the engine loads another model.
        Raises :class:`memreclaim.errors.EngineError` before the engine has loaded its weights.
        """

    def readers(self, part: ModelPart, layer: str) -> tuple[Reader, ...]:
        """Who reads the weight of ``layer``, a name from ``part.layers()``; every place, known or not.

        No side effects. Valid as long as nobody replaces code of the engine: ask again before each reclaim. A place
        that an adapter cannot judge is an unknown reader, not an error. Raises
        :class:`memreclaim.errors.EngineError` when the layer is not in the part.
        """

    def phase_of(self, call: object, role: Role) -> Phase:
        """What the engine is doing in ``call``, the object it hands to a model's forward (its forward batch).

        No side effects; holds for this call only. Raises :class:`memreclaim.errors.EngineError` for a mode that the
        adapter does not know: the caller then serves it as prefill, whose bits never differ.
        """

    def graphs_captured(self) -> bool:
        """Whether CUDA graphs already hold addresses of weights. Never turns false again while the engine runs."""

    def pool(self) -> KVPool | None:
        """The live KV pool, or None while the engine has yet to size it: it then finds the freed bytes by measuring.

        No side effects. Valid for the life of the engine once it is not None.
        """

    def safe_point(self) -> AbstractContextManager[None]:
        """Hold the engine between two steps: inside the block no forward runs and no kernel reads a weight.

        Blocks until the current step has finished. Requests in flight stay in flight. Not re-entrant: raises
        :class:`memreclaim.errors.EngineError` when asked for from inside a step. Before serving starts it does nothing.
        """

    def allocations(self) -> AbstractContextManager[None]:
        """Where twins must be allocated, such as the engine's own weight region; does nothing for most engines."""

    def group(self) -> ProcessGroup | None:
        """The ranks that must agree before any of them drops a weight, or None for one rank."""

    def reclaim(self, reclaimer: Reclaimer, part: ModelPart) -> Report:
        """Reclaim one part, the same way at start and on request: with all that the engine must add.

        Called at :meth:`safe_point`. :func:`memreclaim.engines.operate.reclaim_part` for an engine that adds nothing.
        """

    def released(self, n_bytes: int) -> None:
        """Correct the engine's own book of weight memory by what the ledger's net bytes grew by; negative on restore.

        Side effect: only that book. Called once per reclaim or restore, inside :meth:`safe_point`.
        """


def refusals(adapter: EngineAdapter, part: ModelPart, targets: Sequence[str] = ("wo_a",)) -> dict[str, Reason]:
    """Layers that must stay in bf16 whatever their values are, by name; asked before anything is dropped.

    A layer with a reader that the adapter does not know is ``unknown_reader``; after graph capture every layer is
    ``after_capture``.
    """
    captured = adapter.graphs_captured()
    refused = {}
    for layer in part.layers(targets):
        readers = adapter.readers(part, layer)
        if not readers or not all(reader.known for reader in readers):
            refused[layer] = Reason.UNKNOWN_READER
        elif captured:
            refused[layer] = Reason.AFTER_CAPTURE
    return refused
