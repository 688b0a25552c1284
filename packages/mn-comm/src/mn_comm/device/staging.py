"""Pinned host memory, through which device arrays are copied to and from a library that cannot access devices.

Functions that copy return only when the copy is complete: the memory comes from CuPy's pool, which may reuse it as soon
as it is no longer referenced here.
"""

from __future__ import annotations

import logging
import threading
import weakref
from collections import Counter, deque
from typing import Any

import numpy as np

_Array = np.ndarray[Any, Any]
_logger = logging.getLogger(__name__)
_users: Counter[int] = Counter()  # by the address of pinned memory: how many arrays need it to be pinned
_kept: deque[tuple[Any, _Array]] = deque()  # what may still be copied, each with the event after its copy
_lock = threading.Lock()


def empty_pinned(shape: tuple[int, ...], dtype: np.dtype[Any]) -> _Array:
    """Return an array in pinned memory from CuPy's pool, to which it returns with the last array that uses it."""
    import cupy

    count = int(np.prod(shape, dtype=np.int64))
    memory = cupy.cuda.alloc_pinned_memory(max(1, count * dtype.itemsize))
    pinned: _Array = np.frombuffer(memory, np.uint8, count * dtype.itemsize).view(dtype).reshape(shape)
    return pinned


def keep_until(event: Any, pinned: _Array) -> None:
    """Keep pinned memory from being reused before an event; return immediately."""
    with _lock:
        while _kept and _kept[0][0].done:
            _kept.popleft()
        _kept.append((event, pinned))


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


def register(array: _Array, memory: _Array) -> None:
    """Pin existing memory for as long as an array in it exists; with several arrays, until the last one is gone.

    It is pinned with all the ``memory`` that it, and arrays that may overlap it, are views of: CUDA refuses to copy to
    a range of which only a part is pinned. If pinning fails, copies are only slower: the driver copies in small steps.
    """
    address = memory.ctypes.data
    if memory.nbytes and (address in _users or _pin(address, memory.nbytes)):
        _users[address] += 1
        weakref.finalize(array, _unregister, address, memory.base if memory is array else memory).atexit = False


def _pin(address: int, nbytes: int) -> bool:
    import cupy

    try:
        cupy.cuda.runtime.hostRegister(address, nbytes, 0)
    except cupy.cuda.runtime.CUDARuntimeError as error:
        _logger.info("%d bytes of host memory could not be pinned: %s", nbytes, error)
        return False
    return True


def _unregister(address: int, _memory: object) -> None:
    """Undo one :func:`register`; ``_memory`` keeps the address mapped until then."""
    import cupy

    _users[address] -= 1
    if not _users[address]:
        del _users[address]
        cupy.cuda.runtime.hostUnregister(address)
