"""Whether an array is in host memory or on a device, and copies between the two.

CuPy is not imported here: if there is an array on a device, it has been imported already. Nothing of
:mod:`mn_comm.device` is imported before the first such array is seen.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np

from mn_comm.basis.device_backend import device_backend

__all__ = ["array_module", "at_rest", "deliver", "is_device_array", "make_room", "to_host", "zeros_beside"]

_Array = np.ndarray[Any, Any]


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
