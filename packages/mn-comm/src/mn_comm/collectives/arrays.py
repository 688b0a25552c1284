"""The collectives that move arrays, and the messages from one rank to another."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from mn_comm.basis import placement, wire
from mn_comm.basis.mpi import MPI
from mn_comm.collectives import header, pieces
from mn_comm.collectives.header import Header, same_root
from mn_comm.ranks import agreement

if TYPE_CHECKING:
    from mn_comm.ranks.intracomm import Ranks

_Array = np.ndarray[Any, Any]


def send(ranks: Ranks, data: Any, dest: int, tag: int = 0) -> None:
    """Send an array or a tuple of arrays to one rank; see :meth:`mn_comm.CommunicatorBase.send`."""
    dest = wire.check_rank(dest, ranks.size, "dest")
    tag = wire.check_tag(tag)
    if dest == ranks.rank:
        raise ValueError(f"send: expected a rank other than this one for dest, got {dest}")
    is_tuple = isinstance(data, (tuple, list))
    arrays = list(data) if is_tuple else [data]
    # The receiver must be informed of an error, too: it is already waiting, or will be.
    announced, error = header.attempt(lambda: header.describe([wire.check_array(a, "send") for a in arrays], is_tuple))
    header.send(ranks, announced, dest, tag)
    header.raise_failure(announced, ranks.rank, error)
    for array in arrays:
        ranks.wait_all(pieces.isend(ranks, placement.to_host(array), dest, tag))


def recv(ranks: Ranks, source: int, tag: int = 0) -> _Array | tuple[_Array, ...]:
    """Receive what :func:`send` sent; see :meth:`mn_comm.CommunicatorBase.recv`."""
    source = source if source == MPI.ANY_SOURCE else wire.check_rank(source, ranks.size, "source")
    if source == ranks.rank:
        raise ValueError(f"recv: expected a rank other than this one for source, got {source}")
    tag = tag if tag == MPI.ANY_TAG else wire.check_tag(tag)
    announced, source, tag = header.recv(ranks, source, tag)
    header.raise_failure(announced, source)
    rooms = announced.make_room()
    for room in rooms:
        ranks.wait_all(pieces.irecv(ranks, room, source, tag))
    arrays: list[_Array] = announced.deliver(rooms)
    return tuple(arrays) if announced.is_tuple else arrays[0]


def bcast(ranks: Ranks, data: Any, root: int = 0) -> _Array:
    """Broadcast an array; see :meth:`mn_comm.CommunicatorBase.bcast`."""
    root, announced, error = same_root(ranks, root), Header(), None
    if ranks.rank == root:  # not earlier: where roots differ, only one rank has an array
        announced, error = header.attempt(lambda: header.describe([wire.check_array(data, "bcast")]))
    announced = ranks.bcast(announced, root)
    header.raise_failure(announced, root, error)
    if ranks.rank == root:
        bcast_in_place(ranks, data, root)
        return data  # type: ignore[no-any-return]
    if announced.on_device[0]:
        return placement.device_backend().bcast_new(ranks, announced.shapes[0], announced.dtypes[0], root)  # type: ignore[no-any-return]
    received: _Array = np.empty(announced.shapes[0], announced.dtypes[0])
    pieces.bcast(ranks, received, root)
    return received


def bcast_in_place(ranks: Ranks, array: Any, root: int = 0) -> None:
    """Overwrite every rank's array with the root's; collective.

    The arrays have the same shape and dtype, and any memory layout; they are on a device on all ranks or on none.
    """
    if placement.is_device_array(array):
        placement.device_backend().bcast(ranks, array, root)
        return
    contiguous = np.asarray(array, order="C")
    pieces.bcast(ranks, contiguous, root)
    if contiguous is not array and ranks.rank != root:
        array[...] = contiguous


def gather(ranks: Ranks, data: Any, root: int = 0) -> tuple[_Array, ...] | None:
    """Gather arrays on one rank; see :meth:`mn_comm.CommunicatorBase.gather`."""
    root = same_root(ranks, root)
    announced = _announce(ranks, data, "gather")
    array = placement.to_host(data)
    if ranks.rank != root:
        ranks.wait_all(pieces.isend(ranks, array, root))
        return None
    gathered = _make_room(announced)
    gathered[root][...] = array
    incoming = {source: [room] for source, room in enumerate(gathered) if source != root}
    ranks.wait_all(pieces.start(ranks, {}, incoming))
    return _deliver(gathered, announced)


def allgather(ranks: Ranks, data: Any) -> tuple[_Array, ...]:
    """Gather arrays on every rank; see :meth:`mn_comm.CommunicatorBase.allgather`."""
    announced = _announce(ranks, data, "allgather")
    array = placement.to_host(data)
    counts = [int(np.prod(other.shapes[0], dtype=np.int64)) * other.dtypes[0].itemsize for other in announced]
    if sum(counts) > pieces.PIECE_BYTES:
        gathered = _make_room(announced)
        gathered[ranks.rank][...] = array
        for root, room in enumerate(gathered):
            pieces.bcast(ranks, room, root)
        return _deliver(gathered, announced)
    gathered_bytes = np.empty(sum(counts), dtype=np.uint8)
    ranks.Allgatherv(pieces.as_bytes(array), [gathered_bytes, counts])
    ends = np.cumsum(counts)
    gathered = [
        np.ndarray(other.shapes[0], other.dtypes[0], gathered_bytes, end - count)
        for end, count, other in zip(ends, counts, announced, strict=True)
    ]
    return _deliver(gathered, announced)


def _make_room(announced: list[Header]) -> list[_Array]:
    return [other.make_room()[0] for other in announced]


def _deliver(gathered: list[_Array], announced: list[Header]) -> tuple[_Array, ...]:
    return tuple(other.deliver([array])[0] for array, other in zip(gathered, announced, strict=True))


def _announce(ranks: Ranks, data: Any, operation: str) -> list[Header]:
    """Exchange the headers of all ranks; all ranks raise if one has no array, or the dtypes differ."""
    own, error = header.attempt(lambda: header.describe([wire.check_array(data, operation)]))
    announced: list[Header] = ranks.allgather(own)
    if error is not None:
        raise error
    for rank, other in enumerate(announced):
        header.raise_failure(other, rank)
    wire.check_same_dtype([other.dtypes[0] for other in announced], operation, "on")
    return announced


def scatter(ranks: Ranks, xs: Any, root: int = 0) -> _Array:
    """Scatter arrays; see :meth:`mn_comm.CommunicatorBase.scatter`."""
    parts: list[_Array] = []
    root = same_root(ranks, root, lambda root: parts.extend(_split_parts(xs, ranks.size) if ranks.rank == root else []))
    announced: Header = ranks.scatter([header.describe([part]) for part in parts] or None, root)
    if ranks.rank == root:
        outgoing = {dest: [placement.to_host(part)] for dest, part in enumerate(parts) if dest != root}
        ranks.wait_all(pieces.start(ranks, outgoing, {}))
        own: _Array = parts[root].copy()
        return own
    (received,) = announced.make_room()
    ranks.wait_all(pieces.irecv(ranks, received, root))
    return announced.deliver([received])[0]  # type: ignore[no-any-return]


def _split_parts(xs: Any, size: int) -> list[_Array]:
    """Return one array for each rank, C-contiguous if it is in host memory; raise TypeError or ValueError."""
    is_array = isinstance(xs, np.ndarray) or placement.is_device_array(xs)
    if is_array and xs.ndim == 0:
        raise ValueError(f"scatter: expected an array whose first axis has length {size}, got a scalar array")
    if not is_array and not isinstance(xs, (tuple, list)):
        raise TypeError(f"scatter: expected an array or a tuple of {size} arrays, got {type(xs).__name__}")
    if len(xs) != size:
        raise ValueError(f"scatter: expected {size} parts, one for each rank, got {len(xs)}")
    if is_array:
        xs = [xs[rank, ...] for rank in range(size)]  # with the ellipsis, parts are never scalars
    checked = wire.check_parts(xs, "scatter")
    return [part if placement.is_device_array(part) else np.asarray(part, order="C") for part in checked]


def alltoall(ranks: Ranks, xs: Any) -> tuple[_Array, ...]:
    """Exchange arrays between all ranks; see :meth:`mn_comm.CommunicatorBase.alltoall`."""
    with agreement.raise_on_all(ranks):
        outgoing = _check_outgoing(xs, ranks.size)
    announced: list[Header] = ranks.alltoall([header.describe([array]) for array in outgoing])
    outgoing = [placement.to_host(array) for array in outgoing]
    incoming = _make_room(announced)
    rank = ranks.rank
    incoming[rank][...] = outgoing[rank]
    # Start with the next neighbour, so that not all ranks send to rank 0 first.
    others = [(rank + step) % ranks.size for step in range(1, ranks.size)]
    sent, received = ({other: [arrays[other]] for other in others} for arrays in (outgoing, incoming))
    ranks.wait_all(pieces.start(ranks, sent, received))
    return _deliver(incoming, announced)


def _check_outgoing(xs: Any, size: int) -> list[_Array]:
    if not isinstance(xs, (tuple, list, np.ndarray)) and not placement.is_device_array(xs):
        raise TypeError(f"alltoall: expected a tuple of {size} arrays, got {type(xs).__name__}")
    if len(xs) != size:
        raise ValueError(f"alltoall: expected {size} arrays, one for each rank, got {len(xs)}")
    return wire.check_parts(xs, "alltoall")
