"""What SGLang tells memreclaim: one adapter per model runner, target or draft."""

from __future__ import annotations

import inspect
import sys
from contextlib import contextmanager, nullcontext
from typing import TYPE_CHECKING, Any, ClassVar

from memreclaim.engines.base import ModelPart, Reader, Role
from memreclaim.engines.sglang import hooks, setups
from memreclaim.engines.sglang.pool import SGLangPool
from memreclaim.errors import EngineError
from memreclaim.states import Phase

if TYPE_CHECKING:
    from collections.abc import Iterator
    from contextlib import AbstractContextManager

    from torch import nn
    from torch.distributed import ProcessGroup

    from memreclaim.engines.sglang.lines import Line
    from memreclaim.reclaimer import Reclaimer
    from memreclaim.snapshot import Report

_V4 = "sglang.srt.models.deepseek_v4"
_DRAFT = "sglang.srt.models.deepseek_v4_dspark"
_GIB = 1 << 30


class SGLangAdapter:
    """Implements :class:`memreclaim.engines.base.EngineAdapter` for one ``ModelRunner``."""

    name: ClassVar[str] = "sglang"

    def __init__(self, runner: Any, line: Line, *, captured: bool = False) -> None:  # noqa: ANN401
        """``runner`` has loaded its model. ``captured``: the engine has begun to capture CUDA graphs."""
        self.runner = runner
        self.line = line
        self.captured = captured
        self.booked = 0
        """Bytes by which the engine's book of weight memory was lowered so far."""

    @property
    def role(self) -> Role:
        """What the runner's model is for."""
        return Role.DRAFT if getattr(self.runner, "is_draft_worker", False) else Role.TARGET

    @property
    def component(self) -> str:
        """Name in reports; an engine may have several drafts of one kind."""
        index = getattr(self.runner, "draft_model_idx", None)
        return f"{self.role.value}{index}" if self.role is Role.DRAFT and index else self.role.value

    def models(self) -> tuple[ModelPart, ...]:
        """See the protocol."""
        model = getattr(self.runner, "model", None)
        if model is None:
            message = "the model runner has loaded no model"
            raise EngineError(message)
        return (ModelPart(self.role, model),)

    def readers(self, part: ModelPart, layer: str) -> tuple[Reader, ...]:
        """See the protocol. What concerns the whole model stands in front of each layer's own readers."""
        try:
            attention = part.root.get_submodule(layer.rpartition(".")[0])
        except AttributeError as error:
            message = f"{layer} is not in the model"
            raise EngineError(message) from error
        problems = [*self.model_problems(), *_attention_problems(attention, self.line)]
        unknown = [Reader(where, known=False, note=note) for where, note in problems]
        return (*unknown, *(Reader(where, known=True) for where in _readers_of(attention)))

    def model_problems(self) -> list[tuple[str, str]]:
        """Where something other than a layer's forward reads its weight, and what it is."""
        gone = hooks.missing(hook for hook in hooks.of_line(self.line.name) if hook.reads or hook.target == hooks.LOAD)
        problems = [(target, "the hook is not in place") for target in gone]
        return [*problems, *setups.problems(self.runner)]

    def phase_of(self, call: object, role: Role) -> Phase:
        """See the protocol; ``call`` is the engine's forward batch."""
        mode: Any = getattr(call, "forward_mode", None)
        if mode is None:
            message = f"{type(call).__name__} has no forward mode"
            raise EngineError(message)
        if role is Role.DRAFT and (mode.is_decode() or mode.is_target_verify() or mode.is_draft_extend_v2()):
            return Phase.DRAFT
        if mode.is_decode():
            return Phase.DECODE
        if mode.is_target_verify():
            return Phase.VERIFY
        if mode.is_extend():
            return Phase.PREFILL
        message = f"forward mode {mode} is not known"
        raise EngineError(message)

    def graphs_captured(self) -> bool:
        """See the protocol."""
        return self.captured

    def pool(self) -> SGLangPool | None:
        """See the protocol; None until the engine has sized its pool."""
        return None if getattr(self.runner, "token_to_kv_pool", None) is None else SGLangPool(self.runner)

    def safe_point(self) -> AbstractContextManager[None]:
        """Hooks run on the scheduler's own thread, between two steps."""
        return nullcontext()

    @contextmanager
    def allocations(self) -> Iterator[None]:
        """Twins live where weights live: in the memory saver's region, so that pausing frees them too."""
        saver = getattr(self.runner, "memory_saver_adapter", None)
        if saver is None:
            yield
            return
        names = ["enable_weights_cpu_backup", *(["enable_draft_weights_cpu_backup"] if self.role is Role.DRAFT else [])]
        backup = any(setups.setting(self.runner, "exec", f"features.{name}", default=False) for name in names)
        with saver.region("weights", enable_cpu_backup=backup):
            yield

    def group(self) -> ProcessGroup | None:
        """The tensor-parallel ranks, by the engine's CPU group; they hold the same layers."""
        group = setups.setting(self.runner, "parallel", "tp_group") or _older_group()
        return None if group is None or group.world_size == 1 else group.cpu_group

    def reclaim(self, reclaimer: Reclaimer, part: ModelPart) -> Report:
        """See the protocol: the way of the start, with reader check, guard, and the ranks' agreement."""
        from memreclaim.engines.sglang.session import session

        del reclaimer, part  # the session's own, and this runner's one model
        return session().reclaim(self)

    def released(self, n_bytes: int) -> None:
        """See the protocol; the engine keeps GiB."""
        self.booked += n_bytes
        used = getattr(self.runner, "weight_load_mem_usage", None)
        if isinstance(used, float):
            self.runner.weight_load_mem_usage = used - n_bytes / _GIB


def _older_group() -> Any:  # noqa: ANN401
    """The group of a line without a published configuration, None before it has one."""
    state = sys.modules.get("sglang.srt.distributed.parallel_state")
    return None if hasattr(state, "get_parallel") else getattr(state, "_TP", None)


def _attention_problems(attention: nn.Module, line: Line) -> list[tuple[str, str]]:
    """Why a layer's own code is not what was read: another class, or a forward of somebody else's."""
    where = type(attention).__qualname__
    if type(attention).__module__ not in (_V4, _DRAFT):
        return [(where, f"{type(attention).__module__} is not a module of the engine that was read")]
    if "forward" in attention.__dict__:
        return [(f"{where}.forward", "it was replaced on the instance")]
    file = inspect.getsourcefile(inspect.unwrap(type(attention).forward))
    if line.name == "released" and file != sys.modules[type(attention).__module__].__file__:
        return [(f"{where}.forward", f"it was replaced by {file}")]
    return []


def _readers_of(attention: nn.Module) -> list[str]:
    """Functions that read this layer's weight while the engine serves."""
    where = f"{type(attention).__module__}.{type(attention).__qualname__}"
    if getattr(attention, "use_mega_attention", False):
        # It made an fp8 copy of its own at load; the bf16 weight stays resident and is never read again.
        return [f"{where}.setup_mega_attention"]
    readers = [hooks.DISPATCH]
    if getattr(attention, "use_fused_wo_a", False):
        readers.append(hooks.FUSED)
    if getattr(attention, "_use_fast_kernel", True) is False:
        readers.append(f"{where}.forward: einsum on wo_a.float()")
    return readers
