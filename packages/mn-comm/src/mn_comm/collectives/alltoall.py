"""All-to-all: one array from each rank to each rank."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from mn_comm.basis import placement, wire
from mn_comm.collectives import header, pieces
from mn_comm.ranks import agreement

if TYPE_CHECKING:
    from mn_comm.ranks.intracomm import Ranks

__all__ = ["alltoall"]

_Array = np.ndarray[Any, Any]


def alltoall(ranks: Ranks, xs: Any) -> tuple[_Array, ...]:
    """Exchange arrays between all ranks; see :meth:`mn_comm.CommunicatorBase.alltoall`."""
    with agreement.raise_on_all(ranks):
        outgoing = _check(xs, ranks.size)
    announced: list[header.Header] = ranks.alltoall([header.describe([array]) for array in outgoing])
    outgoing = [placement.to_host(array) for array in outgoing]
    incoming: list[_Array] = [other.make_room()[0] for other in announced]
    rank = ranks.rank
    incoming[rank][...] = outgoing[rank]
    # Start with the next neighbour, so that not all ranks send to rank 0 first.
    others = [(rank + step) % ranks.size for step in range(1, ranks.size)]
    sent, received = ({other: [arrays[other]] for other in others} for arrays in (outgoing, incoming))
    ranks.wait_all(pieces.start(ranks, sent, received))
    return tuple(other.deliver([array])[0] for array, other in zip(incoming, announced, strict=True))


def _check(xs: Any, size: int) -> list[_Array]:
    if not isinstance(xs, (tuple, list, np.ndarray)) and not placement.is_device_array(xs):
        raise TypeError(f"alltoall: expected a tuple of {size} arrays, got {type(xs).__name__}")
    if len(xs) != size:
        raise ValueError(f"alltoall: expected {size} arrays, one for each rank, got {len(xs)}")
    return wire.check_parts(xs, "alltoall")
