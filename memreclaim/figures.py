"""Memory of the device and of the machine as a snapshot shows it: every figure with its source, none added to another.

GB10's memory is shared by CPU and GPU: NVML has no figures there, and ``cudaMemGetInfo`` counts page cache as used,
so the kernel's own MemFree and MemAvailable are given beside it. A source that is absent gives no figure; nothing
fails.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

    from memreclaim.kvpool import KVPool

MEMINFO = Path("/proc/meminfo")
_KINDS = {"MemFree": "free", "MemAvailable": "available", "MemTotal": "total"}


@dataclass(frozen=True)
class MemoryFigure:
    """One reading."""

    kind: str
    """``free``, ``available``, ``total``, ``torch_allocated`` or ``torch_reserved``."""
    source: str
    """``cuda`` or ``meminfo``."""
    n_bytes: int

    def to_dict(self) -> dict[str, str | int]:
        """JSON-ready."""
        return {"kind": self.kind, "source": self.source, "bytes": self.n_bytes}


def memory(device: torch.device, meminfo: Path = MEMINFO) -> tuple[MemoryFigure, ...]:
    """All readings that can be had now. Opens no CUDA context: asks only where torch has one already."""
    return (*_cuda(device), *_machine(meminfo))


def pool_bytes(pool: KVPool) -> dict[str, int]:
    """Bytes of each part of a KV pool, summed from its tensors; else capacity times bytes a token."""
    measured = getattr(pool, "tensor_bytes", None)
    if callable(measured):
        return dict(measured())
    return {"kv": round(pool.capacity_tokens * pool.bytes_per_token)}


def _cuda(device: torch.device) -> tuple[MemoryFigure, ...]:
    import torch

    if device.type != "cuda" or not torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        return ()
    free, total = torch.cuda.mem_get_info(device)
    allocated, reserved = torch.cuda.memory_allocated(device), torch.cuda.memory_reserved(device)
    figures = {"free": free, "total": total, "torch_allocated": allocated, "torch_reserved": reserved}
    return tuple(MemoryFigure(kind, "cuda", n_bytes) for kind, n_bytes in figures.items())


def _machine(meminfo: Path) -> tuple[MemoryFigure, ...]:
    try:
        text = meminfo.read_text()
    except OSError:
        return ()
    # The three stand at the top; the whole file has 55 lines.
    found = re.findall(r"^(MemFree|MemAvailable|MemTotal):\s+(\d+) kB$", text[:256], re.MULTILINE)
    return tuple(MemoryFigure(_KINDS[name], "meminfo", int(kib) * 1024) for name, kib in found)
