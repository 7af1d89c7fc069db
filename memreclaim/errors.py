"""What can go wrong, as one tree.

::

    MemreclaimError
    ├── ConfigError          a setting has a bad value; names the variable
    ├── NotExact             a weight has no exact twin; carries reason and first mismatch
    ├── TagAccessError       raw memory of a dropped weight was asked for; names layer and operation
    ├── SwapError            a weight could not be swapped or restored; the model is as it was
    ├── IntegrityError       the ledger and the live tensors disagree
    ├── CheckpointError      a checkpoint cannot be read; names the file
    ├── PoolError            a KV pool refused to grow or shrink
    └── EngineError          an engine adapter met something that it does not know

A mismatch is not an error of the service: :class:`NotExact` is raised by :func:`memreclaim.build_twin`, while a
:class:`memreclaim.Reclaimer` turns it into a layer that is kept, with its reason.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from memreclaim.proof import Mismatch
    from memreclaim.states import Reason


class MemreclaimError(Exception):
    """Base of everything that memreclaim raises on purpose."""


class ConfigError(MemreclaimError, ValueError):
    """A setting has a value that it cannot have."""

    def __init__(self, variable: str, message: str) -> None:
        """Name the ``variable`` as the operator wrote it."""
        super().__init__(f"{variable}: {message}")
        self.variable = variable


class NotExact(MemreclaimError, ValueError):  # noqa: N818 - the name is part of the public contract
    """A weight cannot be held as fp8 codes and block exponents without changing a bit."""

    def __init__(self, reason: Reason, mismatched: int = 0, first_mismatch: Mismatch | None = None) -> None:
        """Say why, how many elements differ and where the first one stands."""
        where = f", {mismatched} elements differ, first {first_mismatch.describe()}" if first_mismatch else ""
        super().__init__(f"no exact twin: {reason.value}{where}")
        self.reason = reason
        self.mismatched = mismatched
        self.first_mismatch = first_mismatch


class TagAccessError(MemreclaimError, RuntimeError):
    """Something asked for the raw memory of a weight whose bf16 bytes are released."""

    def __init__(self, layer: str, operation: str) -> None:
        """Name the layer and what was tried."""
        super().__init__(
            f"{layer}: {operation} needs the raw memory of a weight that memreclaim has released; "
            "use memreclaim.grouped_projection, or read a copy with weight.clone()"
        )
        self.layer = layer
        self.operation = operation


class SwapError(MemreclaimError, RuntimeError):
    """A weight could not be swapped or restored; the model is as it was before."""


class IntegrityError(MemreclaimError, RuntimeError):
    """The ledger says something that the live tensors do not."""


class CheckpointError(MemreclaimError, OSError):
    """A checkpoint cannot be read."""

    def __init__(self, path: object, message: str) -> None:
        """Name the file or folder."""
        super().__init__(f"{path}: {message}")
        self.path = str(path)


class PoolError(MemreclaimError, RuntimeError):
    """A KV pool refused to grow or shrink."""


class EngineError(MemreclaimError, RuntimeError):
    """An engine adapter met a version, a reader or a state that it does not know."""
