"""Python objects of any size, pickled once.

An object is pickled before anything is sent: if that fails, every rank raises, and no rank hangs. The result is a list
of *frames*: the pickle, and the buffers of arrays, which are not copied into it (PEP 574). Short frames are sent in one
message, a *parcel*; of long ones, it has the lengths, and they follow in pieces.

Nothing here creates a communicator, as ``mpi4py.util.pkl5`` does: if a rank is lost, an elastic communicator revokes
all communicators that it knows, so that no rank waits for another rank that has given up.
"""

from __future__ import annotations

import pickle
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from mn_comm.basis import wire
from mn_comm.basis.mpi import MPI
from mn_comm.collectives import pieces
from mn_comm.collectives.header import same_root
from mn_comm.ranks import agreement

if TYPE_CHECKING:
    from mn_comm.ranks.intracomm import Ranks

_SHORT_BYTES = 1 << 16

_Array = Any  # of uint8; the buffers that pickle and NumPy take have no common type
_Frames = list[_Array]
_Parcel = list[bytes] | list[int]  # frames or, if they are long, their lengths


class _Failed(NamedTuple):
    """Sent instead of an object: which exception was raised, and on which rank."""

    rank: int
    kind: str
    message: str


class _Long(NamedTuple):
    """Sent instead of an object that is too long for one message: the length of its pickle, which follows in pieces."""

    nbytes: int


def send_obj(ranks: Ranks, obj: Any, dest: int, tag: int = 0) -> None:
    """Send an object to one rank; see :meth:`mn_comm.CommunicatorBase.send_obj`."""
    dest = wire.check_rank(dest, ranks.size, "dest")
    tag = wire.check_tag(tag)
    try:
        pickled = pickle.dumps(obj, pickle.HIGHEST_PROTOCOL)
    except Exception as error:
        ranks.send(_Failed(ranks.rank, *agreement.describe(error)), dest, tag)  # the receiver is waiting, or will be
        raise
    content = np.frombuffer(pickled, np.uint8)
    if content.size <= pieces.PIECE_BYTES:
        ranks.Send(content, dest, tag)  # as ``send`` of mpi4py would, so that its ``recv`` understands it
    else:
        ranks.send(_Long(content.size), dest, tag)
        ranks.wait_all(pieces.isend(ranks, content, dest, tag))


def recv_obj(ranks: Ranks, source: int, tag: int, status: MPI.Status | None) -> Any:
    """Receive an object; see :meth:`mn_comm.CommunicatorBase.recv_obj`."""
    source = source if source == MPI.ANY_SOURCE else wire.check_rank(source, ranks.size, "source")
    tag = tag if tag == MPI.ANY_TAG else wire.check_tag(tag)
    status = MPI.Status() if status is None else status
    message = ranks.Mprobe(source, tag, status)
    content = np.empty(status.Get_count(MPI.BYTE), np.uint8)
    ranks.wait_for(message.Recv, [content, MPI.BYTE])
    try:
        received = pickle.loads(content.data)
    except pickle.UnpicklingError:
        raise RuntimeError(
            f"recv_obj: expected an object, got another message of {content.size} bytes from rank {status.source} with "
            f"tag {status.tag}: arrays sent by send() must be received by recv()"
        ) from None
    if isinstance(received, _Long):
        content = np.empty(received.nbytes, np.uint8)
        ranks.wait_all(pieces.irecv(ranks, content, status.source, status.tag))
        received = pickle.loads(content.data)
    if isinstance(received, _Failed):
        raise agreement.remote_error(*received)
    return received


def bcast_obj(ranks: Ranks, obj: Any, max_buf_len: int, root: int = 0) -> Any:
    """Broadcast an object; see :meth:`mn_comm.CommunicatorBase.bcast_obj`."""
    frames: _Frames = []

    def prepare(root: int) -> None:
        limit = wire.as_index(max_buf_len, "max_buf_len")
        if limit < 1:
            raise ValueError(f"expected max_buf_len of at least 1 byte, got {limit}")
        if ranks.rank == root:
            frames.extend(_dump(obj))

    root = same_root(ranks, root, prepare)
    # The root's limit: other ranks may have left out the argument, and pieces have to be of the same size.
    limit, lengths = ranks.bcast((wire.as_index(max_buf_len, "max_buf_len"), [frame.size for frame in frames]), root)
    if ranks.rank != root:
        frames = _begun(lengths)
    for piece in _pieces(frames, limit):
        ranks.Bcast(piece, root)
    return obj if ranks.rank == root else _load(frames)


def gather_obj(ranks: Ranks, obj: Any, root: int = 0) -> list[Any] | None:
    """Gather objects on one rank; see :meth:`mn_comm.CommunicatorBase.gather_obj`."""
    frames: _Frames = []
    root = same_root(ranks, root, lambda root: frames.extend(_dump(obj)))
    parcels = ranks.gather(_parcel(frames), root)
    if parcels is None:
        _send_long(ranks, frames, root)
        return None
    found = [_from(ranks, parcel, source, frames) for source, parcel in enumerate(parcels)]
    return [_load(each) for each in found]  # not earlier: if this raises, no rank waits for this one any more


def allgather_obj(ranks: Ranks, obj: Any) -> list[Any]:
    """Gather objects on every rank; see :meth:`mn_comm.CommunicatorBase.allgather_obj`."""
    with agreement.raise_on_all(ranks):
        mine = _dump(obj)
    parcels = ranks.allgather(_parcel(mine))
    found = [[each.copy() for each in mine] if root == ranks.rank else _begun(p) for root, p in enumerate(parcels)]
    for root, parcel in enumerate(parcels):
        if isinstance(parcel[0], int):
            for piece in _pieces(found[root]):
                ranks.Bcast(piece, root)
    return [_load(frames) for frames in found]  # not earlier, as in gather_obj


def scatter_obj(ranks: Ranks, objs: Any, root: int = 0) -> Any:
    """Scatter objects; see :meth:`mn_comm.CommunicatorBase.scatter_obj`."""
    dumped: list[_Frames] = []

    def prepare(root: int) -> None:
        if ranks.rank == root:
            if len(objs) != ranks.size:
                raise ValueError(f"scatter_obj: expected {ranks.size} objects, one for each rank, got {len(objs)}")
            dumped.extend(_dump(obj) for obj in objs)

    root = same_root(ranks, root, prepare)
    parcel = ranks.scatter([_parcel(frames) for frames in dumped] if ranks.rank == root else None, root)
    for dest, frames in enumerate(dumped):
        if dest != root:
            _send_long(ranks, frames, dest)
    return _load(_from(ranks, parcel, root, dumped[root] if ranks.rank == root else []))


def allreduce_obj(ranks: Ranks, obj: Any) -> Any:
    """Add up objects along a binomial tree; see :meth:`mn_comm.CommunicatorBase.allreduce_obj`."""
    total, failure = obj, None
    step = 1
    while step < ranks.size and not ranks.rank & step:
        other = ranks.rank + step
        if other < ranks.size:
            try:
                total = total + recv_obj(ranks, other, 0, None)
            except Exception as error:
                failure = failure or error
        step *= 2
    if ranks.rank:
        failure = _pass_on(ranks, total, failure, ranks.rank - step)
    with agreement.raise_on_all(ranks):
        if failure is not None and not hasattr(failure, "raised_on_rank"):  # that rank raises it
            raise failure
    return bcast_obj(ranks, total, pieces.PIECE_BYTES)


def _pass_on(ranks: Ranks, total: Any, failure: Exception | None, dest: int) -> Exception | None:
    """Send a partial sum, or an exception that was raised while computing it; return the exception."""
    if failure is not None:
        ranks.send(_Failed(ranks.rank, *agreement.describe(failure)), dest)
        return failure
    try:
        send_obj(ranks, total, dest)
    except Exception as error:  # it cannot be pickled, and send_obj has informed the other rank
        return error
    return None


def _dump(obj: Any) -> _Frames:
    """Return the frames of an object's pickle; all but the first are views of its arrays."""
    buffers: list[pickle.PickleBuffer] = []
    head = pickle.dumps(obj, protocol=5, buffer_callback=buffers.append)
    views: list[Any] = [head, *(buffer.raw() for buffer in buffers)]
    return [np.frombuffer(view, np.uint8) for view in views]


def _load(frames: _Frames) -> Any:
    head, *buffers = frames
    return pickle.loads(head, buffers=buffers)


def _parcel(frames: _Frames) -> _Parcel:
    return [frame.size for frame in frames] if _are_long(frames) else [frame.tobytes() for frame in frames]


def _are_long(frames: _Frames) -> bool:
    return sum(len(frame) for frame in frames) > _SHORT_BYTES


def _begun(parcel: _Parcel) -> _Frames:
    """Return the frames in a parcel, or room for them; they are writable, unlike bytes."""
    return [
        np.empty(each, np.uint8) if isinstance(each, int) else np.frombuffer(bytearray(each), np.uint8)
        for each in parcel
    ]


def _pieces(frames: _Frames, nbytes: int = pieces.PIECE_BYTES) -> Iterator[_Array]:
    return (piece for frame in frames for piece in pieces.pieces(frame, min(nbytes, pieces.PIECE_BYTES)))


def _send_long(ranks: Ranks, frames: _Frames, dest: int) -> None:
    """Send frames that are not in their parcel."""
    if _are_long(frames):
        for piece in _pieces(frames):
            ranks.Send(piece, dest)


def _from(ranks: Ranks, parcel: _Parcel, source: int, mine: _Frames) -> _Frames:
    """Return the frames of a rank, whose parcel was received; ``mine`` are those of this rank."""
    if source == ranks.rank:
        return [frame.copy() for frame in mine]
    frames = _begun(parcel)
    if isinstance(parcel[0], int):
        for piece in _pieces(frames):
            ranks.Recv(piece, source, 0)
    return frames
