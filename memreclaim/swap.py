"""The swap of a weight for a tag, and back: each leaves either the bf16 parameter or a proven tag, whatever is raised.

Dropping goes through these steps; a failure in any of them puts the very same parameters back.

1. Tags are made, and put where the weight stood: from here on new readers are served by the twin.
2. The device is synchronised, so that no kernel in flight on another stream still reads the bf16 bytes.
3. memreclaim waits until it is the weight's only owner. A reader that began before step 1 finishes; anything that
   goes on holding the bytes (a cached copy, a loader's list) means that dropping would free nothing.
4. The twin is proven against the weight once more: as the only owner, nothing can have written since.
5. The last reference goes, and the storage must be gone with it. If it is not, it is taken back alive.
"""

from __future__ import annotations

import gc
import sys
import time
import weakref
from contextlib import contextmanager, nullcontext
from typing import TYPE_CHECKING, Any, Final

import torch
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef

from memreclaim import proof
from memreclaim.errors import SwapError
from memreclaim.tag import Tag, TagView, make_tag, parameter_like
from memreclaim.tagged import exact

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from memreclaim.backing import Backing
    from memreclaim.discover import Candidate, Site

DRAIN_SECONDS = 0.5
"""How long a reader that holds the weight may take to finish before the layer is kept. A forward pass of one layer
takes under a millisecond on a GPU and about 0.1 s on a CPU."""
_POLL_SECONDS = 0.002


class StillHeldError(SwapError):
    """Something else holds the weight's bytes."""


def drop(candidate: Candidate, backing: Backing) -> None:
    """Swap ``candidate``'s weight for tags of ``backing`` and release its bytes.

    Raises :class:`StillHeldError` when something else holds the storage and :class:`NotExact` when the weight was
    written after its twin was proven; whatever is raised, the model then has its own parameters again, the same
    objects.
    """
    with backing.lock:
        held = [site.get() for site in candidate.sites]
        with _or_put_back(candidate.sites, held, backing):
            _take(candidate.sites, held, backing)
            watch = StorageWeakRef(held[0].untyped_storage())  # type: ignore[no-untyped-call]
            rebuild = _rebuilders(held)
        _release(candidate.sites, held, backing, watch, rebuild)


def shadow(candidate: Candidate, backing: Backing) -> None:
    """Serve ``candidate`` from its twin while the bf16 weight stays (twin mode). Raises like :func:`drop`."""
    with backing.lock:
        held = [site.get() for site in candidate.sites]
        with _or_put_back(candidate.sites, held, backing):
            _take(candidate.sites, held, backing)
            backing.keep(held[0].detach())
            _put(candidate.sites, _tags(backing, held))


@contextmanager
def _or_put_back(sites: Sequence[Site], held: Sequence[nn.Parameter], backing: Backing) -> Iterator[None]:
    """Whatever is raised inside, the parameters ``held`` stand in the model again."""
    try:
        yield
    except BaseException:
        _put(sites, held)
        backing.abandon()
        raise


def _take(sites: Sequence[Site], held: list[nn.Parameter], backing: Backing) -> None:
    """Steps 1 to 4: tags stand in the weight's places, ``held`` is owned by nobody else, and it is proven."""
    twin = backing.twin
    assert twin is not None
    _put(sites, _tags(backing, held))
    _synchronize(held[0].device)
    _wait_for_sole_ownership(held)
    proof.demand(twin, held[0])


def _tags(backing: Backing, held: Sequence[nn.Parameter]) -> list[Tag]:
    """One tag for each distinct parameter, in the order of the sites."""
    made = {id(parameter): make_tag(backing, parameter) for parameter in held}
    return [made[id(parameter)] for parameter in held]


def _put(sites: Sequence[Site], parameters: Sequence[nn.Parameter]) -> None:
    for site, parameter in zip(sites, parameters, strict=True):
        site.set(parameter)
        if not isinstance(parameter, Tag):
            _unhook(site.module)
        elif _exact_state not in site.module._state_dict_hooks.values():
            site.module.register_state_dict_post_hook(_exact_state)  # type: ignore[no-untyped-call]


class _ExactState:
    """Hook of ``state_dict``: what it took for a detached weight becomes one, since savers read raw memory."""

    def __call__(self, module: nn.Module, state: dict[str, Any], prefix: str, _metadata: object) -> None:
        for name in module._parameters:
            value = state.get(prefix + name)
            if isinstance(value, TagView):
                state[prefix + name] = exact(value, "state_dict")

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle, as part of a module whose weights are plain there, as something of Python's own that does nothing.

        A saved module then loads where memreclaim is not installed.
        """
        return getattr, (nullcontext(), "__exit__")


_exact_state: Final = _ExactState()


def _synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _wait_for_sole_ownership(held: list[nn.Parameter]) -> None:
    control = _control(held)
    if _owners(held) == control:
        return
    gc.collect()
    deadline = time.monotonic() + DRAIN_SECONDS
    while _owners(held) != control:
        if time.monotonic() > deadline:
            message = f"the weight's storage has other owners ({_describe_owners(held)})"
            raise StillHeldError(message)
        time.sleep(_POLL_SECONDS)


def _owners(held: list[nn.Parameter]) -> list[tuple[int, int]]:
    """Python references and C++ references of each parameter, and owners of the storage, seen from this frame."""
    counts = [(sys.getrefcount(parameter), parameter._use_count()) for parameter in held]  # type: ignore[attr-defined]
    storage = held[0].untyped_storage()
    counts.append((torch._C._storage_Use_Count(storage._cdata), 0))
    return counts


def _control(held: list[nn.Parameter]) -> list[tuple[int, int]]:
    """What :func:`_owners` says of parameters like ``held`` that nobody else holds: counted, not assumed."""
    base = torch.empty(1)
    with torch.inference_mode(mode=False):
        distinct = {id(parameter): nn.Parameter(base, requires_grad=False) for parameter in held}
    stand_ins = [distinct[id(parameter)] for parameter in held]
    del base, distinct
    return _owners(stand_ins)


def _describe_owners(held: list[nn.Parameter]) -> str:
    kinds = sorted({type(owner).__name__ for owner in gc.get_referrers(held[0]) if owner is not held})
    return f"referred to by {', '.join(kinds)}" if kinds else "a view or a C++ owner"


def _release(
    sites: Sequence[Site],
    held: list[nn.Parameter],
    backing: Backing,
    watch: StorageWeakRef,
    rebuild: list[Callable[[torch.UntypedStorage], nn.Parameter]],
) -> None:
    """Step 5: let go of the last references, and take the storage back if somebody got hold of it meanwhile."""
    parameters = [weakref.ref(parameter) for parameter in held]
    held.clear()
    gone = watch.expired()  # type: ignore[no-untyped-call]
    storage = None if gone else torch.UntypedStorage._new_with_weak_ptr(watch.cdata)
    if storage is None:
        return
    restored = [reference() or make(storage) for reference, make in zip(parameters, rebuild, strict=True)]
    _put(sites, restored)
    backing.abandon()
    message = "the weight's storage outlived its last known owner"
    raise StillHeldError(message)


def _rebuilders(held: Sequence[nn.Parameter]) -> list[Callable[[torch.UntypedStorage], nn.Parameter]]:
    """For each parameter, how to make its like over its old storage."""

    def rebuilder(parameter: nn.Parameter) -> Callable[[torch.UntypedStorage], nn.Parameter]:
        cls, attributes, requires_grad = type(parameter), dict(parameter.__dict__), parameter.requires_grad
        dtype, device, size, stride = parameter.dtype, parameter.device, parameter.shape, parameter.stride()

        def make(storage: torch.UntypedStorage) -> nn.Parameter:
            values = torch.empty(0, dtype=dtype, device=device).set_(storage, 0, size, stride)
            result = torch.Tensor._make_subclass(cls, values, requires_grad)
            result.__dict__.update(attributes)
            return result

        return make

    return [rebuilder(parameter) for parameter in held]


def settle(model: nn.Module) -> None:
    """Replace tags that are moved out but stand where their weight was not: put there since, or written elsewhere."""
    for module in model.modules():
        for name, standing in module._parameters.items():
            if isinstance(standing, Tag):
                weight = standing.memreclaim_backing.make_dense()
                module._parameters[name] = (
                    weight if isinstance(weight, nn.Parameter) else parameter_like(standing, weight)
                )


class ModelHome:
    """The places in a model that one weight's tags stand at."""

    def __init__(self, sites: Sequence[Site], tell: Callable[[], None]) -> None:
        """``tell`` is called when the bf16 weight is back, before it is put in place."""
        self._sites = sites
        self._tell = tell

    def move_in(self, backing: Backing, dense: torch.Tensor) -> bool:
        """See :class:`memreclaim.backing.Home`."""
        standing = [(site, site.module._parameters.get(site.attribute)) for site in self._sites]
        ours = [(site, tag) for site, tag in standing if isinstance(tag, Tag) and tag.memreclaim_backing is backing]
        made = {id(tag): parameter_like(tag, dense) for _, tag in ours}
        self._tell()
        for site, tag in ours:
            site.set(made[id(tag)])
            _unhook(site.module)
        return bool(ours)

    def current(self) -> nn.Parameter | None:
        """See :class:`memreclaim.backing.Home`."""
        return self._sites[0].module._parameters.get(self._sites[0].attribute)


def _unhook(module: nn.Module) -> None:
    if not any(isinstance(parameter, Tag) for parameter in module._parameters.values()):
        for key in [key for key, hook in module._state_dict_hooks.items() if hook is _exact_state]:
            del module._state_dict_hooks[key]
