"""Pinned host memory, through which device arrays are copied to and from a library that cannot access devices.

Every function here returns only when its copy is complete: the memory comes from CuPy's pool, which may reuse it as
soon as it is no longer referenced here.
"""

from __future__ import annotations

import logging
import weakref
from typing import Any

import numpy as np

__all__ = ["empty_pinned", "register", "to_device", "to_host"]

_Array = np.ndarray[Any, Any]
_logger = logging.getLogger(__name__)


def empty_pinned(shape: tuple[int, ...], dtype: np.dtype[Any]) -> _Array:
    """Return an array in pinned memory from CuPy's pool, to which it returns with the last array that uses it."""
    import cupy

    count = int(np.prod(shape, dtype=np.int64))
    memory = cupy.cuda.alloc_pinned_memory(max(1, count * dtype.itemsize))
    pinned: _Array = np.frombuffer(memory, np.uint8, count * dtype.itemsize).view(dtype).reshape(shape)
    return pinned


def to_host(array: Any) -> _Array:
    """Return a copy of a device array, of any memory layout, in C order in pinned memory."""
    pinned = empty_pinned(array.shape, array.dtype)
    if array.size:
        array.get(out=pinned)
    return pinned


def to_device(array: _Array) -> Any:
    """Return a copy of a host array on CuPy's current device."""
    import cupy

    copy = cupy.empty(array.shape, array.dtype)
    if array.size:
        copy.set(np.asarray(array, order="C"))
        cupy.cuda.get_current_stream().synchronize()
    return copy


def register(array: _Array) -> None:
    """Pin existing memory, for as long as the array exists.

    If this fails, copies are only slower: the driver copies such memory in small steps.
    """
    import cupy

    if not array.nbytes:
        return
    try:
        cupy.cuda.runtime.hostRegister(array.ctypes.data, array.nbytes, 0)
    except cupy.cuda.runtime.CUDARuntimeError as error:
        _logger.info("%d bytes of host memory could not be pinned: %s", array.nbytes, error)
        return
    weakref.finalize(array, _unregister, array.ctypes.data, array.base).atexit = False


def _unregister(address: int, _memory: object) -> None:
    """Undo :func:`register`; ``_memory`` keeps the address mapped until then."""
    import cupy

    cupy.cuda.runtime.hostUnregister(address)
