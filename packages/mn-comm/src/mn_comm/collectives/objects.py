"""Python objects: pickled once, with large buffers kept out of the pickle (PEP 574), of any size.

Pickling is tried before anything is sent, so that an object which cannot be pickled is an error on every rank instead
of a hang.
"""

from __future__ import annotations

import functools
import operator
import pickle
from typing import Any, NamedTuple

import numpy as np
from mpi4py import MPI
from mpi4py.util import pkl5

from mn_comm import agreement, wire
from mn_comm.collectives import pieces

__all__ = ["allgather_obj", "allreduce_obj", "bcast_obj", "gather_obj", "recv_obj", "scatter_obj", "send_obj"]


class _Sealed:
    """A pickled object on its way: pickling it again moves its frames without copying them."""

    __slots__ = ("frames",)

    def __init__(self, frames: list[Any]) -> None:
        self.frames = frames

    def __reduce__(self) -> tuple[Any, ...]:
        return _Sealed, ([pickle.PickleBuffer(frame) for frame in self.frames],)


class _Failed(NamedTuple):
    """Instead of an object: the sender could not pickle it."""

    kind: str
    message: str


def _seal(obj: Any) -> _Sealed:
    buffers: list[pickle.PickleBuffer] = []
    head = pickle.dumps(obj, protocol=5, buffer_callback=buffers.append)
    return _Sealed([head, *(buffer.raw() for buffer in buffers)])


def _unseal(sealed: _Sealed) -> Any:
    head, *buffers = sealed.frames
    return pickle.loads(head, buffers=buffers)


def send_obj(mpi_comm: MPI.Intracomm, obj: Any, dest: int, tag: int = 0) -> None:
    """Send an object to one rank; see :meth:`mn_comm.CommunicatorBase.send_obj`."""
    dest = wire.check_rank(dest, mpi_comm.size, "dest")
    tag = wire.check_tag(tag)
    try:
        sealed: _Sealed | _Failed = _seal(obj)
    except Exception as error:
        # The receiver is waiting already, or will be: it must hear of it.
        pkl5.Intracomm(mpi_comm).send(_Failed(type(error).__name__, str(error)), dest, tag)
        raise
    pkl5.Intracomm(mpi_comm).send(sealed, dest, tag)


def recv_obj(mpi_comm: MPI.Intracomm, source: int, tag: int, status: MPI.Status | None) -> Any:
    """Receive an object; see :meth:`mn_comm.CommunicatorBase.recv_obj`."""
    if source != MPI.ANY_SOURCE:
        source = wire.check_rank(source, mpi_comm.size, "source")
    if tag != MPI.ANY_TAG:
        tag = wire.check_tag(tag)
    status = MPI.Status() if status is None else status
    received = pkl5.Intracomm(mpi_comm).recv(source=source, tag=tag, status=status)
    if isinstance(received, _Failed):
        raise agreement.remote_error(status.source, received.kind, received.message)
    if not isinstance(received, _Sealed):
        raise TypeError(
            f"recv_obj: expected an object sent by send_obj(), got one of type {type(received).__name__} that rank "
            f"{status.source} sent by other means (tag {status.tag})"
        )
    return _unseal(received)


def bcast_obj(mpi_comm: MPI.Intracomm, obj: Any, max_buf_len: int, root: int = 0) -> Any:
    """Broadcast an object; see :meth:`mn_comm.CommunicatorBase.bcast_obj`."""
    root = wire.check_rank(root, mpi_comm.size, "root")
    frames: list[Any] = []
    with agreement.together(mpi_comm):
        limit = wire.as_index(max_buf_len, "max_buf_len")
        if limit < 1:
            raise ValueError(f"expected max_buf_len of at least 1 byte, got {limit}")
        if mpi_comm.rank == root:
            frames = [np.frombuffer(frame, dtype=np.uint8) for frame in _seal(obj).frames]
    lengths = mpi_comm.bcast([frame.size for frame in frames], root)
    if mpi_comm.rank != root:
        frames = [np.empty(length, dtype=np.uint8) for length in lengths]
    for frame in frames:
        for piece in pieces.pieces(frame, min(limit, pieces.PIECE_BYTES)):
            mpi_comm.Bcast(piece, root)
    return obj if mpi_comm.rank == root else _unseal(_Sealed(frames))


def gather_obj(mpi_comm: MPI.Intracomm, obj: Any, root: int = 0) -> list[Any] | None:
    """Gather objects at one rank; see :meth:`mn_comm.CommunicatorBase.gather_obj`."""
    root = wire.check_rank(root, mpi_comm.size, "root")
    with agreement.together(mpi_comm):
        sealed = _seal(obj)
    gathered = pkl5.Intracomm(mpi_comm).gather(sealed, root)
    return None if gathered is None else [_unseal(other) for other in gathered]


def allgather_obj(mpi_comm: MPI.Intracomm, obj: Any) -> list[Any]:
    """Gather objects at every rank; see :meth:`mn_comm.CommunicatorBase.allgather_obj`."""
    with agreement.together(mpi_comm):
        sealed = _seal(obj)
    return [_unseal(other) for other in pkl5.Intracomm(mpi_comm).allgather(sealed)]


def scatter_obj(mpi_comm: MPI.Intracomm, objs: Any, root: int = 0) -> Any:
    """Scatter objects; see :meth:`mn_comm.CommunicatorBase.scatter_obj`."""
    root = wire.check_rank(root, mpi_comm.size, "root")
    sealed = None
    with agreement.together(mpi_comm):
        if mpi_comm.rank == root:
            if len(objs) != mpi_comm.size:
                raise ValueError(f"scatter_obj: expected {mpi_comm.size} objects, one for each rank, got {len(objs)}")
            sealed = [_seal(obj) for obj in objs]
    return _unseal(pkl5.Intracomm(mpi_comm).scatter(sealed, root))


def allreduce_obj(mpi_comm: MPI.Intracomm, obj: Any) -> Any:
    """Add up objects of all ranks; see :meth:`mn_comm.CommunicatorBase.allreduce_obj`."""
    return functools.reduce(operator.add, allgather_obj(mpi_comm, obj))
