"""Metrics and HTTP of one rank (``MEMRECLAIM_HTTP``), started after the first reclaim.

Several ranks of one host take consecutive ports from the one that the operator gave. Operations that are asked for
over HTTP run on the scheduler's own thread while it is idle: SGLang lets no other thread in between two of its steps.
"""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from memreclaim import events
from memreclaim.engines.sglang import readers_check, setups
from memreclaim.engines.sglang.adapter import SGLangAdapter
from memreclaim.errors import EngineError

if TYPE_CHECKING:
    from collections.abc import Iterator

    from memreclaim.engines.base import ModelPart, Reader
    from memreclaim.engines.sglang.session import Session
    from memreclaim.reclaimer import Reclaimer
    from memreclaim.service.rank import RankService
    from memreclaim.snapshot import Report


class WholeEngine(SGLangAdapter):
    """All models of a rank behind one adapter: the target's, which also speaks for the drafts."""

    def __init__(self, session: Session) -> None:
        """The session's models are looked up on each call, since drafts are loaded after the target."""
        super().__init__(session.adapters[0].runner, session.line, captured=session.captured)
        self._session = session

    def models(self) -> tuple[ModelPart, ...]:
        """Target first, then drafts."""
        return tuple(part for adapter in self._session.adapters for part in adapter.models())

    def readers(self, part: ModelPart, layer: str) -> tuple[Reader, ...]:
        """Asked of the adapter that the part belongs to."""
        return self._adapter_of(part).readers(part, layer)

    def reclaim(self, reclaimer: Reclaimer, part: ModelPart) -> Report:
        """By the adapter that the part belongs to."""
        return self._adapter_of(part).reclaim(reclaimer, part)

    def released(self, n_bytes: int) -> None:
        """Each runner has a book of its own, which follows the ledger."""
        del n_bytes
        for adapter in self._session.adapters:
            self._session.book(adapter)

    def _adapter_of(self, part: ModelPart) -> SGLangAdapter:
        found = self._session.adapter_of(part.root)
        if found is None:
            message = f"the {part.role.value} is none of the engine's models"
            raise EngineError(message)
        return found

    def graphs_captured(self) -> bool:
        """As the session knows it now."""
        return self._session.captured

    @contextmanager
    def safe_point(self) -> Iterator[None]:
        """Refuse: only :func:`after_idle` runs operations."""
        message = "SGLang has no safe point for another thread"
        raise EngineError(message)
        yield


def start(session: Session) -> RankService | None:
    """Start the service that the settings ask for; None when they ask for none, or when it cannot start."""
    if session.settings.http is None:
        return None
    from memreclaim.rank_snapshot import Identity
    from memreclaim.service.rank import start_rank_service
    from memreclaim.service.settings import ServiceSettings

    runner = session.adapters[0].runner
    host, port = session.settings.http
    address = (host, port + int(getattr(runner, "gpu_id", 0)) if port else 0)
    places = [_rank(runner, name) for name in ("tp_rank", "pp_rank", "dp_rank", "moe_ep_rank")]
    model = str(setups.setting(runner, "serving", "served_model_name", "unknown"))
    try:
        service = start_rank_service(
            session.reclaimer,
            WholeEngine(session),
            ServiceSettings.from_env(address),
            identity=Identity(model, "unified", *places),
            ranks=int(setups.setting(runner, "parallel", "launch_world_size", 1)),
            worker=False,
            stock=readers_check.stock(),
        )
    except (OSError, ValueError) as error:  # an address in use, an unsafe setting: serving goes on without metrics
        events.emit("error", "service_not_started", detail=str(error))
        return None
    service.rank.started = True
    return service


def _rank(runner: Any, name: str) -> int:  # noqa: ANN401
    value = setups.setting(runner, "parallel", name, 0)
    return value if isinstance(value, int) else 0


def after_idle(_result: object, *_args: Any, **_kwargs: Any) -> None:  # noqa: ANN401
    """AFTER hook of ``Scheduler.on_idle``: run what was asked for over HTTP, and a latency sample when one is due.

    An engine that has paused its weights idles too: then both wait until the memory is mapped again.
    """
    from memreclaim.engines.sglang.session import session

    here = session()
    if here.service is not None and not here.paused:
        here.service.poll()
