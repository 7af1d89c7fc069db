"""Weights that change while the engine serves: its four ways of updating, and the weight checker's reset.

The engine writes through the tags, each of which brings its layer's bf16 weight back first. When the update is over,
every layer that came back is proven again and dropped again, into the memory of its old twin, since captured graphs
hold that address. An update that fails gets the old values back first, from the old twins.
"""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch

from memreclaim import events
from memreclaim.config import OnMismatch
from memreclaim.engines.base import Role
from memreclaim.engines.sglang.session import session, twins_of
from memreclaim.errors import EngineError
from memreclaim.journal import triggered_by

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from torch import nn

    from memreclaim.engines.sglang.adapter import SGLangAdapter
    from memreclaim.twin import Twin

_open: dict[int, Update] = {}
"""Updates between the engine's ``begin`` and ``end``, by ``id`` of their model."""


class Update:
    """One update of one model's weights."""

    def __init__(self, adapter: SGLangAdapter) -> None:
        """Before anything is written. The old twins are kept until the update is settled."""
        self.adapter = adapter
        self.model: nn.Module = adapter.models()[0].root
        self.twins: dict[str, Twin] = twins_of(self.model)
        self.failed = False
        session().may_write += 1

    def settle(self) -> None:
        """Prove and drop again what came back. Raises :class:`EngineError` when graphs would serve stale weights."""
        here = session()
        here.may_write -= 1
        tags = twins_of(self.model)
        came_back = {name: twin for name, twin in self.twins.items() if name not in tags}
        if not came_back and self.adapter.group() is None:
            here.book(self.adapter)
            return  # with several ranks, another one may have something to drop again, and waits for all to agree
        if self.failed:
            for name, twin in came_back.items():
                _write(self.model.get_submodule(name), twin)
        here.reclaim(self.adapter, storage=came_back)
        stale = sorted(came_back.keys() - twins_of(self.model).keys())
        if stale and here.captured:
            self._recapture(stale)

    def _recapture(self, stale: list[str]) -> None:
        """Have the engine capture its graphs again: they hold twins of layers that are bf16 now."""
        runner = self.adapter.runner
        own = getattr(runner, "decode_cuda_graph_runner", None)
        if self.adapter.role is Role.DRAFT and own in (None, getattr(runner, "eager_runner", None)):
            # The draft's graphs belong to its worker, which offers no way to capture them again.
            message = f"{', '.join(stale)}: the new weights have no exact twin, and the draft's graphs hold the old one"
            raise EngineError(message)
        events.emit("info", "graphs_recaptured", component=self.adapter.component, layers=len(stale))
        runner.recapture_decode_cuda_graph()


def _write(module: nn.Module, twin: Twin) -> None:
    """The old values, bit by bit, into a weight that came back."""
    weight = module.get_parameter("weight")
    with torch.no_grad():
        weight.copy_(twin.dequantize())


@contextmanager
def _updating(model: nn.Module) -> Iterator[Update | None]:
    """One update around the block, or the part of one that ``begin`` opened; None for a model that is not ours."""
    here = session()
    adapter = here.adapter_of(model)
    if adapter is None:
        yield None
        return
    opened = _open.get(id(model))
    update = Update(adapter) if opened is None else opened
    try:
        yield update
    except BaseException:
        update.failed = True
        raise
    finally:
        if opened is None:
            _settle(update)


def _settle(update: Update) -> None:
    try:
        with session().quiet(), triggered_by("api"), session().reclaimer.journal.operation("update"):
            update.settle()
    except EngineError:
        raise
    except Exception as error:
        if session().settings.on_mismatch is OnMismatch.ABORT or session().captured:
            raise
        events.emit("error", "update_not_settled", detail=f"{type(error).__name__}: {error}")


def around_load(stock: Callable[..., Any], updater: Any, *args: Any, **kwargs: Any) -> Any:  # noqa: ANN401
    """AROUND hook of the updates from tensors, from a process group, and over IPC."""
    with _updating(updater.get_model()) as update:
        result = stock(updater, *args, **kwargs)
        if update is not None and not result[0]:
            update.failed = True
    return result


def around_disk(stock: Callable[..., Any], updater: Any, *args: Any, **kwargs: Any) -> Any:  # noqa: ANN401
    """AROUND hook of the update from disk. Graphs are captured after our drop; the engine would do so before."""
    names = ("model_path", "load_format", "weight_name_filter", "recapture_cuda_graph")
    given = {**dict(zip(names, args, strict=False)), **kwargs}
    ours = session().adapter_of(updater.get_model()) is not None
    recapture = ours and bool(given.pop("recapture_cuda_graph", False))
    result = around_load(stock, updater, **given)
    if recapture and result[0] and session().captured:
        with session().quiet():
            updater.recapture_cuda_graph()
    return result


def before_begin(updater: Any, *_args: Any, **_kwargs: Any) -> None:  # noqa: ANN401
    """BEFORE hook of ``begin_weight_update``: a session of several loads starts."""
    model = updater.get_model()
    adapter = session().adapter_of(model)
    if adapter is not None and id(model) not in _open:
        _open[id(model)] = Update(adapter)


def around_end(stock: Callable[..., Any], updater: Any, *args: Any, **kwargs: Any) -> Any:  # noqa: ANN401
    """AROUND hook of ``end_weight_update``, which may transform weights itself."""
    update = _open.pop(id(updater.get_model()), None)
    if update is None:
        return stock(updater, *args, **kwargs)
    try:
        return stock(updater, *args, **kwargs)
    except BaseException:
        update.failed = True
        raise
    finally:
        _settle(update)


def around_reset(stock: Callable[..., Any], checker: Any, *args: Any, **kwargs: Any) -> Any:  # noqa: ANN401
    """AROUND hook of the weight checker's reset, which writes noise into every parameter."""
    with _updating(checker._get_model()):
        return stock(checker, *args, **kwargs)
