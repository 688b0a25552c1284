"""Point-to-point: an array, or a tuple of arrays, from one rank to another."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from mn_comm.basis import placement, wire
from mn_comm.basis.mpi import MPI
from mn_comm.collectives import header, pieces

if TYPE_CHECKING:
    from mn_comm.ranks.intracomm import Ranks

__all__ = ["recv", "send"]

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
    announced, error = header.attempt(
        lambda: header.describe([wire.check_array(array, "send") for array in arrays], is_tuple)
    )
    header.send(ranks, announced, dest, tag)
    header.raise_failure(announced, ranks.rank, error)
    for array in arrays:
        ranks.wait_all(pieces.isend(ranks, placement.to_host(array), dest, tag))


def recv(ranks: Ranks, source: int, tag: int = 0) -> _Array | tuple[_Array, ...]:
    """Receive what :func:`send` sent; see :meth:`mn_comm.CommunicatorBase.recv`."""
    if source != MPI.ANY_SOURCE:
        source = wire.check_rank(source, ranks.size, "source")
        if source == ranks.rank:
            raise ValueError(f"recv: expected a rank other than this one for source, got {source}")
    if tag != MPI.ANY_TAG:
        tag = wire.check_tag(tag)
    announced, source, tag = header.recv(ranks, source, tag)
    header.raise_failure(announced, source)
    rooms = announced.make_room()
    for room in rooms:
        ranks.wait_all(pieces.irecv(ranks, room, source, tag))
    arrays: list[_Array] = announced.deliver(rooms)
    return tuple(arrays) if announced.is_tuple else arrays[0]
