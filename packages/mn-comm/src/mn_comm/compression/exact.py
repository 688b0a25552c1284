"""What travels as it is: messages of bytes to all ranks, and exact means that are the same on all of them."""

from __future__ import annotations

from itertools import pairwise
from typing import TYPE_CHECKING, Any

import numpy as np

from mn_comm.compression.base import Link

if TYPE_CHECKING:
    from mn_comm.ranks import Ranks

__all__ = ["gather_bytes", "mean_exactly"]

_Array = np.ndarray[Any, Any]
_TAG = 7
# MPI counts bytes in 31 bits.
_MOST_BYTES = 1 << 30


def gather_bytes(ranks: Ranks, message: _Array) -> list[_Array]:
    """Return the messages of all ranks; collective.

    Args:
        ranks: The ranks.
        message: This rank's, of bytes; the lengths may differ.
    """
    lengths = np.empty(ranks.size, np.int64)
    ranks.Allgather(np.array([message.size], np.int64), lengths)
    messages = [message if rank == ranks.rank else np.empty(n, np.uint8) for rank, n in enumerate(lengths.tolist())]
    others = [(ranks.rank + distance) % ranks.size for distance in range(1, ranks.size)]
    requests = [ranks.Irecv(piece, other, _TAG) for other in others for piece in _pieces(messages[other])]
    requests += [ranks.Isend(piece, other, _TAG) for other in others for piece in _pieces(message)]
    for request in requests:
        ranks.wait_with_pauses(request, "Allgatherv")
    return messages


def mean_exactly(link: Link, flat: _Array) -> None:
    """Overwrite an array with its mean over the ranks, added up in their order; collective.

    MPI may add up in another order on another rank, so that the last bits would differ.

    Args:
        link: The ranks.
        flat: One-dimensional, of float32 or float64, of the same length and dtype on every rank.
    """
    ranks, size = link.ranks, link.ranks.size
    points = [flat.size * rank // size for rank in range(size + 1)]
    parts = [flat[begin:end].view(np.uint8) for begin, end in pairwise(points)]
    others = [(ranks.rank + distance) % size for distance in range(1, size)]
    own = flat[points[ranks.rank] : points[ranks.rank + 1]]
    received = {other: np.empty_like(own) for other in others}
    requests = [
        ranks.Irecv(piece, other, _TAG) for other in others for piece in _pieces(received[other].view(np.uint8))
    ]
    requests += [ranks.Isend(piece, other, _TAG) for other in others for piece in _pieces(parts[other])]
    for request in requests:
        ranks.wait_with_pauses(request, "Reduce_scatter")
    total = np.zeros_like(own)
    for rank in range(size):
        total += own if rank == ranks.rank else received[rank]
    np.multiply(total, own.dtype.type(1 / size), out=own)
    requests = [ranks.Irecv(piece, other, _TAG) for other in others for piece in _pieces(parts[other])]
    requests += [ranks.Isend(piece, other, _TAG) for other in others for piece in _pieces(parts[ranks.rank])]
    for request in requests:
        ranks.wait_with_pauses(request, "Allgather")
    link.sent += (flat.nbytes - own.nbytes) + own.nbytes * (size - 1)


def _pieces(message: _Array) -> list[_Array]:
    return [message[begin : begin + _MOST_BYTES] for begin in range(0, message.size, _MOST_BYTES)]
