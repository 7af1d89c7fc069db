"""How the embedded engine answers memreclaim's questions."""

from __future__ import annotations

from contextlib import nullcontext
from typing import TYPE_CHECKING, ClassVar

from memreclaim.engines import operate
from memreclaim.engines.base import ModelPart, Reader, Role
from memreclaim.engines.reference.attention import Attention
from memreclaim.engines.reference.batch import Batch
from memreclaim.errors import EngineError
from memreclaim.states import Phase

if TYPE_CHECKING:
    from contextlib import AbstractContextManager

    from torch import nn
    from torch.distributed import ProcessGroup

    from memreclaim.engines.reference.model import ReferenceModel
    from memreclaim.engines.reference.pool import PagedPool
    from memreclaim.engines.reference.server import Server
    from memreclaim.reclaimer import Reclaimer
    from memreclaim.snapshot import Report

_READS = ("forward", "project", "combine")
_KNOWN = {name: getattr(Attention, name) for name in _READS}
"""The code that was looked at; whoever replaces one of these may read ``wo_a`` in another way."""


class ReferenceAdapter:
    """A :class:`memreclaim.engines.base.EngineAdapter`."""

    name: ClassVar[str] = "reference"

    def __init__(self, model: ReferenceModel, pool: PagedPool | None = None, server: Server | None = None) -> None:
        """Speak for ``model``; ``pool`` and ``server`` are None before there are any."""
        self._model, self._pool, self._server = model, pool, server
        self.released_bytes = 0

    def models(self) -> tuple[ModelPart, ...]:
        """Target and draft stand in one tree."""
        return (ModelPart(Role.TARGET, self._model, "layers."), ModelPart(Role.DRAFT, self._model, "mtp."))

    def readers(self, part: ModelPart, layer: str) -> tuple[Reader, ...]:
        """The attention module's ``project``, as long as module and code are the ones that were looked at."""
        try:
            owner = part.root.get_submodule(layer.rpartition(".")[0])
            weight = part.root.get_submodule(layer)
        except AttributeError as error:
            message = f"there is no layer {layer}"
            raise EngineError(message) from error
        kind = type(owner)
        where = f"{kind.__module__}.{kind.__qualname__}.project"
        surprise = _surprise(owner, weight)
        return (Reader(where, known=surprise is None, note=surprise or ""),)

    def phase_of(self, call: object, role: Role) -> Phase:
        """The batch says it; a draft block is only ever called to draft."""
        if not isinstance(call, Batch):
            message = f"the embedded engine is called with a Batch, not a {type(call).__name__}"
            raise EngineError(message)
        return Phase.DRAFT if role is Role.DRAFT else call.phase

    def graphs_captured(self) -> bool:
        """Never: this engine runs eagerly."""
        return False

    def pool(self) -> PagedPool | None:
        """The live pool."""
        return self._pool

    def safe_point(self) -> AbstractContextManager[None]:
        """Between two steps of the server."""
        return nullcontext() if self._server is None else self._server.safe_point()

    def allocations(self) -> AbstractContextManager[None]:
        """Twins may be allocated anywhere."""
        return nullcontext()

    def group(self) -> ProcessGroup | None:
        """The ranks that the model was built for."""
        return next((module.group for module in self._model.modules() if isinstance(module, Attention)), None)

    def reclaim(self, reclaimer: Reclaimer, part: ModelPart) -> Report:
        """Nothing is added."""
        return operate.reclaim_part(reclaimer, self, part)

    def released(self, n_bytes: int) -> None:
        """Keep the sum; the engine has no other book."""
        self.released_bytes += n_bytes


def _surprise(owner: nn.Module, weight: nn.Module) -> str | None:
    """What about a layer is not as the adapter knows it."""
    if type(owner) is not Attention:
        return f"the layer belongs to a {type(owner).__qualname__}"
    changed = [name for name in _READS if name in vars(owner) or getattr(Attention, name) is not _KNOWN[name]]
    if changed:
        return f"{', '.join(changed)} is not the engine's own"
    hooks = (vars(module)[kind] for module in (owner, weight) for kind in ("_forward_hooks", "_forward_pre_hooks"))
    return "forward hooks are registered on the layer" if any(hooks) else None


ADAPTER = ReferenceAdapter
