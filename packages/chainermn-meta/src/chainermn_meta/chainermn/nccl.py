"""NCCL with the interface of CuPy's binding (addresses, counts and type constants), based on NVIDIA's ``nccl4py``.

CuPy and ``nccl4py`` are imported when they are first used; ``_available`` tells whether they are installed.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np

from mn_comm.device import nccl
from mn_comm.device.nccl import _available, get_build_version, get_unique_id, get_version

# The numbers of ncclRedOp_t and ncclDataType_t in nccl.h.
NCCL_SUM, NCCL_PROD, NCCL_MAX, NCCL_MIN = range(4)
NCCL_INT8, NCCL_UINT8, NCCL_INT32, NCCL_UINT32, NCCL_INT64, NCCL_UINT64 = range(6)
NCCL_FLOAT16, NCCL_FLOAT32, NCCL_FLOAT64 = range(6, 9)
NCCL_CHAR, NCCL_INT, NCCL_HALF, NCCL_FLOAT, NCCL_DOUBLE = 0, 2, 6, 7, 8

__all__ = ["NcclCommunicator", "NcclError", "_available", "get_build_version", "get_unique_id", "get_version"]
__all__ += [name for name in dir() if name.startswith("NCCL_")]

_REDUCTIONS = ("SUM", "PROD", "MAX", "MIN")
_DTYPES = ("i1", "u1", "i4", "u4", "i8", "u8", "f2", "f4", "f8")


class NcclError(RuntimeError):
    """An error that NCCL or its binding has reported; ``__cause__`` is the original exception.

    Attributes:
        status: The number of the error in ``ncclResult_t``, if NCCL reported it.
    """

    def __init__(self, error: Exception | str) -> None:
        super().__init__(str(error))
        self.status = getattr(error, "status", None)


class NcclCommunicator:
    """Ranks that exchange memory on devices, one device per rank; creating it is collective.

    Operations are put on a stream, and return immediately. They take addresses (``array.data.ptr``) of C-contiguous
    memory, which must stay valid until the stream has executed them.

    Args:
        ndev: How many ranks there are.
        commId: From :func:`get_unique_id` on one of them.
        rank: This one. Its device is CuPy's current one.

    Raises:
        RuntimeError: NCCL or CuPy is missing.
        NcclError: NCCL reports an error; every method raises that, too.
    """

    def __init__(self, ndev: int, commId: Iterable[int], rank: int) -> None:
        self._size, self._rank = ndev, rank
        with _translated():
            self._communicator = nccl.NcclCommunicator(ndev, bytes(commId), rank)

    def size(self) -> int:
        """Return how many ranks there are."""
        return self._size

    def rank_id(self) -> int:
        """Return this rank."""
        return self._rank

    def allReduce(self, sendbuf: int, recvbuf: int, count: int, datatype: int, op: int, stream: int) -> None:
        """Write the reduction of all ranks' elements to ``recvbuf``; collective.

        Args:
            sendbuf: The address of this rank's elements.
            recvbuf: Where the result goes; may be ``sendbuf``.
            count: How many elements.
            datatype: Their type, such as ``NCCL_FLOAT32``.
            op: The reduction, such as ``NCCL_SUM``.
            stream: The address of the stream, ``stream.ptr``.
        """
        with _translated() as binding:
            send, recv = _array(sendbuf, count, datatype), _array(recvbuf, count, datatype)
            self._communicator.core.allreduce(send, recv, getattr(binding, _REDUCTIONS[op]), stream=stream)

    def reduce(self, sendbuf: int, recvbuf: int, count: int, datatype: int, op: int, root: int, stream: int) -> None:
        """Write the reduction of all ranks' elements to the root's ``recvbuf``; collective. See :meth:`allReduce`."""
        with _translated() as binding:
            send = _array(sendbuf, count, datatype)
            recv = _array(recvbuf, count, datatype) if self._rank == root else send
            self._communicator.core.reduce(send, recv, getattr(binding, _REDUCTIONS[op]), root, stream=stream)

    def broadcast(self, sendbuf: int, recvbuf: int, count: int, datatype: int, root: int, stream: int) -> None:
        """Write the root's elements to every rank's ``recvbuf``; collective. See :meth:`allReduce`."""
        with _translated():
            recv = _array(recvbuf, count, datatype)
            send = _array(sendbuf, count, datatype) if self._rank == root else recv
            self._communicator.core.broadcast(send, recv, root, stream=stream)

    def bcast(self, buff: int, count: int, datatype: int, root: int, stream: int) -> None:
        """Overwrite every rank's elements with the root's; collective. See :meth:`allReduce`."""
        self.broadcast(buff, buff, count, datatype, root, stream)

    def reduceScatter(self, sendbuf: int, recvbuf: int, recvcount: int, datatype: int, op: int, stream: int) -> None:
        """Write this rank's share, of ``recvcount`` elements, of the reduction to ``recvbuf``; collective."""
        with _translated() as binding:
            send, recv = _array(sendbuf, recvcount * self._size, datatype), _array(recvbuf, recvcount, datatype)
            self._communicator.core.reduce_scatter(send, recv, getattr(binding, _REDUCTIONS[op]), stream=stream)

    def allGather(self, sendbuf: int, recvbuf: int, count: int, datatype: int, stream: int) -> None:
        """Write the ``count`` elements of each rank, one rank after the other, to ``recvbuf``; collective."""
        with _translated():
            send, recv = _array(sendbuf, count, datatype), _array(recvbuf, count * self._size, datatype)
            self._communicator.core.allgather(send, recv, stream=stream)

    def send(self, sendbuf: int, count: int, datatype: int, peer: int, stream: int) -> None:
        """Send elements to a rank that receives as many."""
        with _translated():
            self._communicator.core.send(_array(sendbuf, count, datatype), peer, stream=stream)

    def recv(self, recvbuf: int, count: int, datatype: int, peer: int, stream: int) -> None:
        """Receive elements from a rank that sends as many."""
        with _translated():
            self._communicator.core.recv(_array(recvbuf, count, datatype), peer, stream=stream)

    def check_async_error(self) -> None:
        """Raise if an operation that was put on a stream has failed."""
        with _translated():
            problem = self._communicator.problem()
        if problem is not None:
            raise NcclError(problem)

    def destroy(self) -> None:
        """Finish the pending operations and free all resources; collective. A second call does nothing."""
        with _translated():
            self._communicator.destroy()

    def abort(self) -> None:
        """Abort pending operations, whatever the other ranks do, and free all resources. A second call does nothing."""
        with _translated():
            self._communicator.abort()


@contextmanager
def _translated() -> Iterator[Any]:
    """Return a context, given the binding, in which its exceptions become :class:`NcclError`."""
    binding = nccl.require()
    try:
        yield binding
    except nccl.errors() as error:
        raise NcclError(error) from error


def _array(address: int, count: int, datatype: int) -> Any:
    """Return an array of elements at an address on the current device."""
    import cupy

    dtype = np.dtype(_DTYPES[datatype])
    memory = cupy.cuda.UnownedMemory(address, count * dtype.itemsize, None)
    return cupy.ndarray((count,), dtype, cupy.cuda.MemoryPointer(memory, 0))
