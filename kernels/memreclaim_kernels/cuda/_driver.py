"""The CUDA driver calls that the kernels need: loading a cubin, and launching with attributes.

torch has no launch with programmatic dependent launch or clusters, so ``cuLaunchKernelEx`` is called through ctypes.
Launching allocates nothing on the device and may be captured in a CUDA graph.
"""

from __future__ import annotations

import ctypes
from functools import lru_cache
from typing import TypeAlias

import torch

from memreclaim_kernels.cuda import _nvrtc

_MAX_DYNAMIC_SHARED = 8
_ATTRIBUTE_CLUSTER = 4
_ATTRIBUTE_DEPENDENT = 6
_CAPTURE_RELAXED = 2
_STATIC_SHARED_LIMIT = 48 * 1024


Argument: TypeAlias = ctypes.c_void_p | ctypes.c_int | ctypes.c_int64 | ctypes.Structure
"""A kernel argument, by value."""


class DriverError(RuntimeError):
    """A CUDA driver call failed; the message holds the call and the driver's own text."""


class _Attribute(ctypes.Structure):
    _fields_ = (("id", ctypes.c_int), ("pad", ctypes.c_int), ("value", ctypes.c_uint * 16))


class _Config(ctypes.Structure):
    _fields_ = (
        ("grid", ctypes.c_uint * 3),
        ("block", ctypes.c_uint * 3),
        ("shared", ctypes.c_uint),
        ("stream", ctypes.c_void_p),
        ("attributes", ctypes.POINTER(_Attribute)),
        ("count", ctypes.c_uint),
    )


@lru_cache(maxsize=1)
def driver() -> ctypes.CDLL:
    """The CUDA driver library."""
    return ctypes.CDLL("libcuda.so.1")


def check(status: int, call: str) -> None:
    """Raise :class:`DriverError` unless a driver call succeeded."""
    if status != 0:
        text = ctypes.c_char_p()
        driver().cuGetErrorString(status, ctypes.byref(text))
        msg = f"{call}: {(text.value or b'unknown error').decode()} ({status})"
        raise DriverError(msg)


class Kernel:
    """One function of a compiled source on one device, with its block size, shared memory and launch attributes.

    ``cluster`` is the number of neighbouring blocks in x that form a cluster; ``dependent`` lets the kernel start
    before the one in front of it in the stream has finished (compute capability 9.0 and up).
    """

    def __init__(
        self,
        source: str,
        function: str,
        defines: tuple[tuple[str, int], ...],
        device: int,
        *,
        threads: int,
        shared: int = 0,
        cluster: int = 1,
        dependent: bool = True,
        generated: tuple[tuple[str, str], ...] = (),
    ) -> None:
        """Compile and load; ``shared`` is dynamic shared memory in bytes. Raises ``CompileError``, ``DriverError``."""
        capability = torch.cuda.get_device_capability(device)
        image = _nvrtc.compile_source(source, defines, capability, generated)
        module, self._function = ctypes.c_void_p(), ctypes.c_void_p()
        mode = ctypes.c_int(_CAPTURE_RELAXED)
        # Loading is legal while another thread or this one captures a graph, once this thread says it knows.
        driver().cuThreadExchangeStreamCaptureMode(ctypes.byref(mode))
        try:
            with torch.cuda.device(device):
                torch.cuda.current_stream()
                check(driver().cuModuleLoadData(ctypes.byref(module), image), "cuModuleLoadData")
                name = function.encode()
                status = driver().cuModuleGetFunction(ctypes.byref(self._function), module, name)
                check(status, "cuModuleGetFunction")
                if shared > _STATIC_SHARED_LIMIT:
                    check(
                        driver().cuFuncSetAttribute(self._function, _MAX_DYNAMIC_SHARED, shared), "cuFuncSetAttribute"
                    )
        finally:
            driver().cuThreadExchangeStreamCaptureMode(ctypes.byref(mode))
        self._threads, self._shared, self._device = threads, shared, device
        self._attributes = self._build_attributes(cluster, dependent=dependent and capability[0] >= 9)  # noqa: PLR2004

    @staticmethod
    def _build_attributes(cluster: int, *, dependent: bool) -> ctypes.Array[_Attribute]:
        chosen = []
        if cluster > 1:
            chosen.append(_Attribute(_ATTRIBUTE_CLUSTER, 0, (ctypes.c_uint * 16)(cluster, 1, 1)))
        if dependent:
            chosen.append(_Attribute(_ATTRIBUTE_DEPENDENT, 0, (ctypes.c_uint * 16)(1)))
        return (_Attribute * len(chosen))(*chosen)

    def launch(self, grid: tuple[int, int, int], *args: Argument) -> None:
        """Launch on torch's current stream of the kernel's device; ``args`` are ctypes values in the kernel's order."""
        pointers = (ctypes.c_void_p * len(args))(*(ctypes.addressof(arg) for arg in args))
        stream = torch.cuda.current_stream(self._device).cuda_stream
        count = len(self._attributes)
        config = _Config(
            (ctypes.c_uint * 3)(*grid),
            (ctypes.c_uint * 3)(self._threads, 1, 1),
            self._shared,
            stream,
            ctypes.cast(self._attributes, ctypes.POINTER(_Attribute)),
            count,
        )
        if torch.cuda.current_device() == self._device:
            status = driver().cuLaunchKernelEx(ctypes.byref(config), self._function, pointers, None)
        else:
            with torch.cuda.device(self._device):
                status = driver().cuLaunchKernelEx(ctypes.byref(config), self._function, pointers, None)
        check(status, "cuLaunchKernelEx")
