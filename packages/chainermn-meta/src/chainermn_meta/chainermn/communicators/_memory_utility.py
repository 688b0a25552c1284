"""Helpers for communicators that scripts define: memory on devices, and packing of parameters into it.

Our own communicators do not use it. CuPy is imported when it is needed.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import Any

import numpy as np

__all__ = [
    "DeviceMemory",
    "HostPinnedMemory",
    "array_to_buffer_object",
    "count_grad_elements",
    "extract_params_set_data",
    "extract_params_set_grad",
    "get_device_memory_pointer",
    "pack_params",
    "unpack_params",
]


class HostPinnedMemory:
    """Pinned host memory, which a device reads and writes quickly; it can grow.

    Attributes:
        size: How many bytes there are.
        memory: CuPy's object for them, or ``None``.

    Raises:
        RuntimeError: CuPy is missing.
    """

    def __init__(self) -> None:
        self._cupy = _require_cupy(type(self).__name__)
        self.size = 0
        self.memory: Any = None

    def assign(self, size: int) -> None:
        """Make room for at least this number of bytes; the contents are lost if it grows."""
        if size > self.size:
            self.memory = self._allocate(size)
            self.size = size

    def ptr(self, offset: int = 0) -> Any:
        """Return the address of a byte."""
        return ctypes.c_void_p(self.memory.ptr + offset)

    def buffer(self, size: int) -> Any:
        """Return the first bytes as an object that mpi4py accepts."""
        return (ctypes.c_ubyte * size).from_address(self.memory.ptr)

    def array(self, count: int, offset: int = 0, dtype: Any = np.float32) -> Any:
        """Return a part as an array.

        Args:
            count: How many elements.
            offset: Where they begin, in bytes.
            dtype: Their dtype.

        Raises:
            TypeError: ``dtype`` is ``None``.
        """
        return np.frombuffer(self.memory, _checked(dtype), count, offset)

    def _allocate(self, size: int) -> Any:
        return self._cupy.cuda.alloc_pinned_memory(size)


class DeviceMemory(HostPinnedMemory):
    """Memory on the current device, with the same methods."""

    def ptr(self) -> int:  # type: ignore[override]  # so it was
        """Return the address."""
        return int(self.memory.ptr)

    def array(self, shape: Any, offset: int = 0, dtype: Any = np.float32) -> Any:
        """Return a part of the memory as a CuPy array of any shape."""
        return self._cupy.ndarray(shape, _checked(dtype), self.memory + offset)

    def from_device(self, src: Any, size: int, offset: int = 0, stream: Any = None) -> None:
        """Copy bytes of a C-contiguous CuPy array to here.

        Args:
            src: The array.
            size: How many bytes.
            offset: Where they go.
            stream: The stream on which to copy; ``None`` for the null stream, and to wait.
        """
        _copy(self.memory + offset, src.data, size, stream)

    def to_device(self, dst: Any, size: int, offset: int = 0, stream: Any = None) -> None:
        """Copy bytes from here to a C-contiguous CuPy array; as :meth:`from_device`."""
        _copy(dst.data, self.memory + offset, size, stream)

    def _allocate(self, size: int) -> Any:
        return self._cupy.cuda.alloc(size)


def extract_params_set_data(model: Any) -> list[Any]:
    """Return the initialised parameters of a model, sorted by name."""
    return [param for _, param in sorted(model.namedparams()) if param.data is not None]


def extract_params_set_grad(model: Any, zero_fill: bool = False) -> list[Any]:
    """Return the initialised parameters that have a gradient, or with ``zero_fill`` all that are initialised."""
    return [param for param in extract_params_set_data(model) if zero_fill or param.grad is not None]


def count_grad_elements(params: Sequence[Any], zero_fill: bool = False) -> int:
    """Return how many elements the gradients of parameters have, or with ``zero_fill`` are going to have."""
    return sum(int((param.data if zero_fill else param.grad).size) for param in params)


def pack_params(
    params: Sequence[Any],
    attr_name: str,
    buffer: DeviceMemory,
    transfer_dtype: Any,
    zero_fill: bool,
    stream: Any = None,
) -> None:
    """Copy arrays of parameters on a device into a buffer, one after the other.

    Args:
        params: The parameters.
        attr_name: ``"data"`` or ``"grad"``.
        buffer: Large enough for all of them.
        transfer_dtype: The dtype that they have there.
        zero_fill: Whether a missing gradient counts as zeros.
        stream: The stream on which to copy; ``None`` for the null stream.
    """
    offset = 0
    for param in params:
        array = _array_of(param, attr_name, zero_fill)
        packed = _require_cupy("pack_params").ascontiguousarray(array.astype(transfer_dtype, copy=False))
        if packed.size:
            buffer.from_device(packed, packed.nbytes, offset, stream)
        offset += packed.nbytes


def unpack_params(
    params: Sequence[Any],
    attr_name: str,
    buffer: DeviceMemory,
    transfer_dtype: Any,
    zero_fill: bool,
    stream: Any = None,
) -> None:
    """Copy a buffer back to where :func:`pack_params` took it from; the arguments are the same."""
    offset = 0
    for param in params:
        array = _array_of(param, attr_name, zero_fill)
        if getattr(param, attr_name) is None:
            setattr(param, attr_name, array)
        # Into an array of that layout first: the parameter's own may have any.
        packed = array.astype(transfer_dtype, order="C", copy=True)
        if packed.size:
            buffer.to_device(packed, packed.nbytes, offset, stream)
            array[...] = packed.astype(array.dtype, copy=False)
        offset += packed.nbytes


def array_to_buffer_object(array: Any, mpi_dtype: Any = None) -> Any:
    """Return a buffer specification of an array for mpi4py.

    Args:
        array: A NumPy or CuPy array; one that is not C-contiguous is copied.
        mpi_dtype: The MPI datatype of the elements of a CuPy array; by default ``MPI.FLOAT``.
    """
    if isinstance(array, np.ndarray):
        return np.ascontiguousarray(array)
    if mpi_dtype is None:
        from mpi4py import MPI

        mpi_dtype = MPI.FLOAT
    return get_device_memory_pointer(array), mpi_dtype


def get_device_memory_pointer(array: Any) -> Any:
    """Return the memory of an array: a NumPy array itself, that of a CuPy array as bytes for a CUDA-aware MPI."""
    if isinstance(array, np.ndarray):
        return np.ascontiguousarray(array)
    contiguous = _require_cupy("a device array").ascontiguousarray(array)
    memory = (ctypes.c_ubyte * contiguous.nbytes).from_address(contiguous.data.ptr)
    memory.owner = contiguous
    return memory


def _array_of(param: Any, attr_name: str, zero_fill: bool) -> Any:
    array = getattr(param, attr_name)
    if array is None and zero_fill:
        array = _require_cupy("zero_fill").zeros(param.data.shape, param.data.dtype)
    return array


def _copy(destination: Any, source: Any, size: int, stream: Any) -> None:
    if stream is None:
        destination.copy_from_device(source, size)
    else:
        destination.copy_from_device_async(source, size, stream)


def _checked(dtype: Any) -> np.dtype[Any]:
    if dtype is None:
        raise TypeError("expected a dtype, got None")
    checked: np.dtype[Any] = np.dtype(dtype)
    return checked


def _require_cupy(what: str) -> Any:
    try:
        import cupy
    except ImportError as error:
        raise RuntimeError(f"{what} needs CuPy: {error}") from None
    return cupy
