"""The functions for arrays on devices, which are loaded when the first such array is seen.

Code for arrays in host memory must not import CuPy, NCCL or what needs them. So this is the only way from there to the
code for devices. A higher layer, :mod:`mn_comm.communicator`, says how they are loaded.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, Protocol

import numpy as np

__all__ = ["DeviceBackend", "device_backend", "provide"]

_Array = np.ndarray[Any, Any]


class DeviceBackend(Protocol):
    """The functions of :mod:`mn_comm.device.backend`."""

    def require_nccl(self) -> Any:
        """Raise ``RuntimeError`` unless NCCL can be used."""

    def empty_pinned(self, shape: tuple[int, ...], dtype: np.dtype[Any]) -> _Array:
        """Return an array in pinned host memory."""

    def to_host(self, array: Any) -> _Array:
        """Return a copy of a device array, in C order in pinned memory."""

    def to_device(self, array: _Array) -> Any:
        """Return a copy of a host array on the current device."""

    def allreduce(self, ranks: Any, array: Any, total_dtype: np.dtype[Any], op: str = "sum") -> Any:
        """Combine arrays on devices over all ranks; collective."""

    def bcast(self, ranks: Any, array: Any, root: int) -> None:
        """Overwrite an array on every rank's device with the root's; collective."""

    def bcast_new(self, ranks: Any, shape: tuple[int, ...], dtype: np.dtype[Any], root: int) -> Any:
        """Return a new array on the current device with the root's elements; collective."""

    def lay_out(self, layout: Any, filled: Any, likes: Any) -> list[Any]:
        """Create the buckets for gradients on devices; collective."""


_loaders: list[Callable[[], DeviceBackend]] = []


def provide(load: Callable[[], DeviceBackend]) -> Callable[[], DeviceBackend]:
    """Say how the functions for arrays on devices are loaded; a decorator."""
    _loaders.append(load)
    return load


@functools.cache
def device_backend() -> DeviceBackend:
    """Return the functions for arrays on devices; the first call loads them."""
    return _loaders[-1]()
