"""Measuring memory: what the allocator holds, what the device has free, and the peak in between.

On a GPU these are torch's caching allocator and the driver. On a CPU the "allocator" is the process itself: its
anonymous resident memory, after the C library has given back what it can. A figure that cannot be had is None, never
a guess.
"""

from __future__ import annotations

import ctypes
import re
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

import torch

from memreclaim.snapshot import FreedBytes

if TYPE_CHECKING:
    from collections.abc import Callable

_PROC = Path("/proc/self")


class Meter(Protocol):
    """Memory figures of one device, in bytes."""

    def settle(self) -> None:
        """Give unused memory back, so that what is measured next is what is in use."""

    def reuse(self) -> None:
        """Between two layers: give back what the allocator would not hand to the next one by itself."""

    def allocated(self) -> int | None:
        """Bytes in live tensors (GPU), or in the process's anonymous memory (CPU)."""

    def free(self) -> int | None:
        """Bytes that the device's driver reports free; None on a CPU, where others' use drowns it."""

    def restart_peak(self) -> None:
        """Start a new peak. On a GPU this resets torch's own peak statistics of the device."""

    def peak(self) -> int | None:
        """Highest :meth:`allocated` since :meth:`restart_peak`."""


def meter_for(device: torch.device) -> Meter:
    """The meter of a device."""
    return CudaMeter(device) if device.type == "cuda" else ProcessMeter()


class CudaMeter:
    """torch's caching allocator, and the driver."""

    def __init__(self, device: torch.device) -> None:
        """Measure ``device``."""
        self._device = device

    def settle(self) -> None:
        """Return wholly free segments to the driver."""
        torch.cuda.synchronize(self._device)
        torch.cuda.empty_cache()

    def reuse(self) -> None:
        """Nothing: the caching allocator places the next layer's twin in the bytes that this one left."""

    def allocated(self) -> int | None:
        """Bytes in live tensors."""
        return torch.cuda.memory_allocated(self._device)

    def free(self) -> int | None:
        """Bytes that ``cudaMemGetInfo`` reports free."""
        return torch.cuda.mem_get_info(self._device)[0]

    def restart_peak(self) -> None:
        """Reset the allocator's peak."""
        torch.cuda.reset_peak_memory_stats(self._device)

    def peak(self) -> int | None:
        """The allocator's peak."""
        return torch.cuda.max_memory_allocated(self._device)


class ProcessMeter:
    """Anonymous resident memory of this process."""

    def __init__(self, proc: Path = _PROC) -> None:
        """Read the files below ``proc``."""
        self._proc = proc

    def settle(self) -> None:
        """Ask the C library to give free heap memory back; glibc keeps freed blocks of up to 32 MiB otherwise."""
        trim = _malloc_trim()
        if trim is not None:
            trim(0)

    def reuse(self) -> None:
        """As :meth:`settle`: glibc kept a freed weight resident beside the next twin, 13 MB more at the peak."""
        self.settle()

    def allocated(self) -> int | None:
        """Anonymous resident bytes. ``smaps_rollup`` is exact; ``status`` may be off by some pages per CPU."""
        exact = self._field("smaps_rollup", "Anonymous")
        return self._field("status", "RssAnon") if exact is None else exact

    def free(self) -> int | None:
        """None: other processes' use drowns it."""
        return None

    def restart_peak(self) -> None:
        """Reset the kernel's high-water mark of this process (``clear_refs`` 5), where it lets us."""
        try:
            (self._proc / "clear_refs").write_text("5")
        except OSError:
            return

    def peak(self) -> int | None:
        """High-water mark of resident memory, less what is file-backed now."""
        high, resident = self._field("status", "VmHWM"), self._field("status", "VmRSS")
        anonymous = self._field("status", "RssAnon")
        if high is None or resident is None or anonymous is None:
            return None
        return high - (resident - anonymous)

    def _field(self, file: str, name: str) -> int | None:
        """One figure of a ``/proc`` file, in bytes."""
        try:
            text = (self._proc / file).read_text()
        except OSError:
            return None
        found = re.search(rf"^{name}:\s+(\d+) kB$", text, re.MULTILINE)
        return int(found[1]) * 1024 if found else None


def _malloc_trim() -> Callable[[int], int] | None:
    """Glibc's ``malloc_trim``, or None with another C library."""
    try:
        trim: Callable[[int], int] = ctypes.CDLL(None).malloc_trim
    except (AttributeError, OSError):
        return None
    return trim


class Change:
    """What happened to a meter's figures since it was made; makes the starting point clean first."""

    def __init__(self, meter: Meter) -> None:
        """Settle, and take the starting figures."""
        meter.settle()
        self._meter = meter
        self._allocated, self._free = meter.allocated(), meter.free()
        meter.restart_peak()

    def peak_extra(self) -> int | None:
        """Most bytes above the starting point so far."""
        peak = self._meter.peak()
        return None if peak is None or self._allocated is None else max(0, peak - self._allocated)

    def freed(self, nominal: int, taken: int) -> FreedBytes:
        """Bytes given back by each measure, with ``taken`` (allocated meanwhile, and still there) added back."""
        self._meter.settle()
        allocated, free = self._meter.allocated(), self._meter.free()
        return FreedBytes(
            nominal=nominal,
            allocator=None if allocated is None or self._allocated is None else self._allocated - allocated + taken,
            device=None if free is None or self._free is None else free - self._free + taken,
        )
