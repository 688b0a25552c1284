"""Whether an array is in host memory or on a device, and copies between the two.

CuPy is not imported here: if there is an array on a device, it has been imported already. :func:`device_backend` is the
only way from code for arrays in host memory to :mod:`mn_comm.device`, of which nothing is imported before the first
array on a device is seen. A higher layer, :mod:`mn_comm.communicator`, says how it is loaded.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Protocol

import numpy as np

_Array = np.ndarray[Any, Any]


class DeviceBackend(Protocol):
    """The functions of :mod:`mn_comm.device.backend`, which are described where they are defined."""

    def require_nccl(self) -> Any: ...
    def empty_pinned(self, shape: tuple[int, ...], dtype: np.dtype[Any]) -> _Array: ...
    def to_host(self, array: Any) -> _Array: ...
    def to_device(self, array: _Array) -> Any: ...
    def allreduce(self, ranks: Any, array: Any, total_dtype: np.dtype[Any], op: str = "sum") -> Any: ...
    def bcast(self, ranks: Any, array: Any, root: int) -> None: ...
    def bcast_new(self, ranks: Any, shape: tuple[int, ...], dtype: np.dtype[Any], root: int) -> Any: ...
    def lay_out(self, layout: Any, filled: Any, likes: Any) -> list[Any]: ...


_loaders: list[Callable[[], DeviceBackend]] = []


def provide(load: Callable[[], DeviceBackend]) -> Callable[[], DeviceBackend]:
    """Say how the functions for arrays on devices are loaded; a decorator."""
    _loaders.append(load)
    return load


@functools.cache
def device_backend() -> DeviceBackend:
    """Return the functions for arrays on devices; the first call loads them."""
    return _loaders[-1]()


def is_device_array(array: Any) -> bool:
    """Return whether an object is a CuPy array."""
    if type(array) is np.ndarray:  # nearly always true, and called often
        return False
    cupy = sys.modules.get("cupy")
    return cupy is not None and isinstance(array, cupy.ndarray)


def array_module(array: Any) -> Any:
    """Return the module of functions for an array: ``cupy`` or ``numpy``."""
    return sys.modules["cupy"] if is_device_array(array) else np


@contextmanager
def at_rest(array: Any) -> Iterator[None]:
    """Within the block, no other operation runs on an array, whichever stream uses it before or after."""
    if not is_device_array(array):
        yield
        return
    with array.device:
        array.device.synchronize()
        yield
        array.device.synchronize()


def to_host(array: Any) -> _Array:
    """Return the elements of a NumPy or CuPy array in C order in host memory, without a copy if possible."""
    if is_device_array(array):
        return device_backend().to_host(array)
    return np.asarray(array, order="C")


def make_room(shape: tuple[int, ...], dtype: np.dtype[Any], on_device: bool) -> _Array:
    """Return host memory for receiving an array, which :func:`deliver` then copies to its place."""
    if on_device:
        return device_backend().empty_pinned(shape, dtype)
    return np.empty(shape, dtype)


def deliver(received: _Array, on_device: bool) -> Any:
    """Return an array that has been received: the array itself, or a CuPy copy on the current device."""
    if on_device:
        return device_backend().to_device(received)
    return received


def zeros_beside(like: Any, shape: tuple[int, ...], dtype: np.dtype[Any]) -> Any:
    """Return an array of zeros in the same kind of memory as another array."""
    if is_device_array(like):
        import cupy

        with like.device:
            return cupy.zeros(shape, dtype)
    return np.zeros(shape, dtype)
