"""The parts of NCCL that are needed here: a thin layer over NVIDIA's ``nccl4py``, imported when it is first used.

``nccl4py`` uses stream 0 if none is given, and does not check memory layouts. So every call here passes CuPy's current
stream, and accepts only C-contiguous CuPy arrays.
"""

from __future__ import annotations

import functools
import importlib.util
import sys
import weakref
from contextlib import AbstractContextManager
from typing import Any

import numpy as np

from mn_comm.basis.guard import at_exit

__all__ = [
    "NcclCommunicator",
    "errors",
    "get_build_version",
    "get_unique_id",
    "get_version",
    "group",
    "require",
    "supports",
]

_available = all(importlib.util.find_spec(name) is not None for name in ("nccl", "cupy"))

_SUCCESS, _IN_PROGRESS = 0, 7  # of ncclResult_t
_INSTALL = "pip install 'mn-comm[cuda13]', or [cuda12] for a driver of CUDA 12"
_DTYPES = frozenset(
    ("int8", "uint8", "int32", "uint32", "int64", "uint64", "float16", "bfloat16", "float32", "float64")
)


def require() -> Any:
    """Import what NCCL needs, and return ``nccl.core``.

    Raises:
        RuntimeError: CuPy, ``nccl4py`` or NCCL itself is missing; the message names the extra to install.
    """
    if get_version() == 0:
        raise RuntimeError(f"expected libnccl.so.2, found none: {_INSTALL}")
    return _binding()


def errors() -> tuple[type[Exception], ...]:
    """Return the exceptions of ``nccl4py``: for errors that it detects itself, and for errors that NCCL reports."""
    from nccl.bindings.nccl import NCCLError

    return _binding().NcclInvalid, NCCLError


def get_version() -> int:
    """Return the version of the NCCL library that is loaded, as NCCL counts: 23203 for 2.32.3; 0 if there is none.

    Raises:
        RuntimeError: CuPy or ``nccl4py`` is missing.
    """
    found = _binding().get_version().libnccl
    return 0 if found is None else _number(found.version)


def get_build_version() -> int:
    """Return the version of NCCL that the binding was made for, as :func:`get_version`.

    Raises:
        RuntimeError: CuPy or ``nccl4py`` is missing.
    """
    return _number(_binding().get_version().nccl_bindings)


def get_unique_id() -> bytes:
    """Return an ID for a new communicator, which one rank creates and passes to all of its ranks."""
    return bytes(_binding().get_unique_id())


def supports(dtype: np.dtype[Any]) -> bool:
    """Return whether NCCL can add up values of a dtype."""
    return dtype.isnative and dtype.name in _DTYPES


def group() -> AbstractContextManager[None]:
    """Start the operations of a block together, when it ends."""
    together: AbstractContextManager[None] = _binding().group()
    return together


class NcclCommunicator:
    """Ranks that exchange arrays on devices, one device each; creating it is collective.

    Operations are put on CuPy's current stream, and work in place. Errors show when the stream is synchronised. A
    communicator that still exists when Python ends is aborted.

    Args:
        size: How many ranks there are.
        unique_id: The result of :func:`get_unique_id` on one of the ranks.
        rank: The number of this rank. Its device is CuPy's current one.

    Attributes:
        core: NVIDIA's communicator, for operations that the methods here do not offer.

    Raises:
        RuntimeError: NCCL or CuPy is missing.
        Exception: An error that NCCL reports, as ``nccl4py`` raises it.
    """

    def __init__(self, size: int, unique_id: bytes, rank: int) -> None:
        core = _binding()
        self._sum, self._avg = core.SUM, core.AVG
        self._rank = rank
        self.core = core.Communicator.init(size, rank, core.UniqueId.from_bytes(unique_id))
        _alive.add(self)
        _see_to_the_end()

    def all_reduce(self, array: Any, *, mean: bool = False) -> None:
        """Overwrite an array, of equal length and dtype on every rank, with its sum or mean; collective."""
        self.core.allreduce(_checked(array), array, self._avg if mean else self._sum, stream=_stream())

    def reduce(self, array: Any, root: int, *, mean: bool = False) -> None:
        """Overwrite the root's array with the sum or mean over all ranks; collective. Other arrays stay."""
        self.core.reduce(_checked(array), array, self._avg if mean else self._sum, root, stream=_stream())

    def broadcast(self, array: Any, root: int) -> None:
        """Overwrite every rank's array with the root's; collective."""
        self.core.broadcast(_checked(array), array, root, stream=_stream())

    def reduce_scatter(self, array: Any, *, mean: bool = False) -> Any:
        """Add up this rank's share of an array over all ranks, or average it; collective.

        Args:
            array: One-dimensional, its length a multiple of the number of ranks.
            mean: Whether it is averaged.

        Returns:
            The share, a view; the rest of the array is lost.
        """
        share = self._share(array)
        self.core.reduce_scatter(_checked(array), share, self._avg if mean else self._sum, stream=_stream())
        return share

    def all_gather(self, array: Any) -> None:
        """Give every rank the shares of all; collective. The array has one share for each rank."""
        self.core.allgather(self._share(_checked(array)), array, stream=_stream())

    def send(self, array: Any, peer: int) -> None:
        """Send an array to another rank, which must be receiving one of the same length and dtype."""
        self.core.send(_checked(array), peer, stream=_stream())

    def recv(self, array: Any, peer: int) -> None:
        """Receive an array from another rank, which must be sending one."""
        self.core.recv(_checked(array), peer, stream=_stream())

    def problem(self) -> str | None:
        """Return the error of an operation that was put on a stream; ``None`` if there is none yet."""
        result = int(self.core.get_async_error())
        return None if result in (_SUCCESS, _IN_PROGRESS) else f"{_name_of(result)}: {self.core.get_last_error()}"

    def destroy(self) -> None:
        """Finish all operations, and free the communicator; collective. A second call does nothing."""
        _alive.discard(self)
        self.core.destroy()

    def abort(self) -> None:
        """End all operations, whatever the other ranks do, and free the communicator. A second call does nothing."""
        _alive.discard(self)
        self.core.abort()

    def _share(self, array: Any) -> Any:
        count = array.size // int(self.core.nranks)
        return array[self._rank * count : (self._rank + 1) * count]


_alive: weakref.WeakSet[NcclCommunicator] = weakref.WeakSet()


def _abort_all() -> None:
    """Abort the remaining communicators: destroying them would wait for other ranks, which may have failed."""
    if not _alive:
        return
    if not hasattr(sys, "last_type"):  # set when an exception has ended the program
        import cupy

        cupy.cuda.Device().synchronize()  # other ranks may be waiting for operations that this rank has started
    for communicator in list(_alive):
        communicator.abort()


@functools.cache
def _see_to_the_end() -> None:
    at_exit(_abort_all)


def _binding() -> Any:
    """Import ``nccl4py`` with CuPy."""
    try:
        import cupy  # noqa: F401
        from nccl import core
    except ImportError as error:
        raise RuntimeError(f"expected CuPy and nccl4py, which NCCL needs: {error}: {_INSTALL}") from None
    return core


def _name_of(result: int) -> str:
    """Return the name of an ncclResult_t, of which ``nccl4py`` 0.6 returns only the number."""
    from nccl.bindings.nccl import Result

    return next((each.name for each in Result if each == result), f"error {result}")


def _number(version: Any) -> int:
    return int(version.major) * 10000 + int(version.minor) * 100 + int(version.micro)


def _stream() -> int:
    import cupy

    return int(cupy.cuda.get_current_stream().ptr)


def _checked(array: Any) -> Any:
    """Return an array if it is C-contiguous: NCCL gets only its address and length."""
    if not array.flags.c_contiguous:
        raise ValueError(f"expected a C-contiguous array, got strides {array.strides} for shape {array.shape}")
    return array
