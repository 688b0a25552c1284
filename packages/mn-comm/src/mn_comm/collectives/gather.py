"""Gather: every rank's array to one rank, or to all."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from mn_comm.basis import placement, wire
from mn_comm.collectives import header, pieces
from mn_comm.collectives.roots import same_root

if TYPE_CHECKING:
    from mn_comm.ranks.intracomm import Ranks

__all__ = ["allgather", "gather"]

_Array = np.ndarray[Any, Any]


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
        return _allgather_by_broadcasts(ranks, array, announced)
    gathered_bytes = np.empty(sum(counts), dtype=np.uint8)
    ranks.Allgatherv(pieces.as_bytes(array), [gathered_bytes, counts])
    ends = np.cumsum(counts)
    gathered = [
        np.ndarray(other.shapes[0], other.dtypes[0], gathered_bytes, end - count)
        for end, count, other in zip(ends, counts, announced, strict=True)
    ]
    return _deliver(gathered, announced)


def _allgather_by_broadcasts(ranks: Ranks, array: _Array, announced: list[header.Header]) -> tuple[_Array, ...]:
    gathered = _make_room(announced)
    gathered[ranks.rank][...] = array
    for root, room in enumerate(gathered):
        pieces.bcast(ranks, room, root)
    return _deliver(gathered, announced)


def _make_room(announced: list[header.Header]) -> list[_Array]:
    return [other.make_room()[0] for other in announced]


def _deliver(gathered: list[_Array], announced: list[header.Header]) -> tuple[_Array, ...]:
    return tuple(other.deliver([array])[0] for array, other in zip(gathered, announced, strict=True))


def _announce(ranks: Ranks, data: Any, operation: str) -> list[header.Header]:
    """Exchange the headers of all ranks; all ranks raise if one has no array, or the dtypes differ."""
    own, error = header.attempt(lambda: header.describe([wire.check_array(data, operation)]))
    announced: list[header.Header] = ranks.allgather(own)
    if error is not None:
        raise error
    for rank, other in enumerate(announced):
        header.raise_failure(other, rank)
    wire.check_same_dtype([other.dtypes[0] for other in announced], operation, "on")
    return announced
