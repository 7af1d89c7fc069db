"""Tensor maps: how the copy engine finds the boxes of an activation tensor."""

from __future__ import annotations

import ctypes
from functools import lru_cache
from typing import TYPE_CHECKING

from memreclaim_kernels.cuda._driver import check, driver

if TYPE_CHECKING:
    import torch

_BFLOAT16 = 9
_SWIZZLE_128 = 3
_PROMOTE_256 = 3
_MAP_BYTES = 128
_MAP_ALIGNMENT = 64


class TensorMap(ctypes.Structure):
    """The driver's ``CUtensorMap``, passed to a kernel by value."""

    _fields_ = (("opaque", ctypes.c_uint64 * 16),)


def activation_map(o: torch.Tensor, box_columns: int, box_tokens: int) -> TensorMap:
    """Map of ``o [T, G, D]`` in boxes of ``box_tokens`` x 1 group x ``box_columns``, 128-byte swizzle, zeros outside.

    With a group stride of 0 the map has one group: the kernel then steps by 0 groups.
    """
    tokens, groups, depth = o.shape
    group_stride = o.stride(1)
    if groups == 1 or group_stride == 0:
        groups, group_stride = 1, depth
    token_stride = o.stride(0) if tokens > 1 else groups * group_stride
    sizes, strides = (depth, groups, tokens), (group_stride * 2, token_stride * 2)
    return _encode(o.data_ptr(), sizes, strides, (box_columns, 1, box_tokens))


@lru_cache(maxsize=512)
def _encode(address: int, sizes: tuple[int, ...], strides: tuple[int, ...], box: tuple[int, ...]) -> TensorMap:
    # The driver wants 64-byte alignment, which ctypes does not promise.
    room = ctypes.create_string_buffer(_MAP_BYTES + _MAP_ALIGNMENT)
    start = -ctypes.addressof(room) % _MAP_ALIGNMENT
    aligned = ctypes.byref(room, start)
    status = driver().cuTensorMapEncodeTiled(
        aligned,
        _BFLOAT16,
        3,
        ctypes.c_void_p(address),
        (ctypes.c_uint64 * 3)(*sizes),
        (ctypes.c_uint64 * 2)(*strides),
        (ctypes.c_uint32 * 3)(*box),
        (ctypes.c_uint32 * 3)(1, 1, 1),
        0,
        _SWIZZLE_128,
        _PROMOTE_256,
        0,
    )
    check(status, "cuTensorMapEncodeTiled")
    return TensorMap.from_buffer_copy(room, start)
