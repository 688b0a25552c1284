"""The mean of arrays of half precision over all ranks, with halves on the wire.

MPI has no such type, and a sum of halves may not fit where their mean does; divided beforehand, small ones vanish. What
travels here are means, never sums: reduce-scatter by recursive halving, all-gather by recursive doubling (Rabenseifner,
"Optimization of Collective Reduction Operations", ICCS 2004, section 2), with the mean of two groups taken in float32
wherever they meet, and rounded to be sent on.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from mn_comm.arithmetic import divide
from mn_comm.collectives import pieces

if TYPE_CHECKING:
    from mn_comm.ranks import Ranks

__all__ = ["mean_of_halves"]

_Array = np.ndarray[Any, Any]
_TAG = 0  # on a private communicator nothing else is under way


def mean_of_halves(ranks: Ranks, flat: _Array) -> None:
    """Overwrite an array with its mean over all ranks; collective.

    Args:
        ranks: The ranks, with arrays of equal length and dtype.
        flat: One-dimensional and contiguous, of half precision.
    """
    rank, most = ranks.rank, 1 << (ranks.size.bit_length() - 1)
    extra = ranks.size - most
    # Ranks beyond a power of two give what they have to another one, and are given the result.
    if rank >= most:
        _exchange(ranks, rank - most, flat, None)
        _exchange(ranks, rank - most, None, flat)
        return
    mean = flat.astype(np.float32)
    if rank < extra:
        theirs = np.empty_like(flat)
        _exchange(ranks, rank + most, None, theirs)
        mean += theirs
        divide(mean, 2, mean)
    begin, end, distance = 0, flat.size, most
    met: list[tuple[int, slice, slice]] = []
    while distance > 1:
        mine = _count(rank, distance, most, extra)
        distance //= 2
        other = rank ^ distance
        theirs_are = _count(rank, distance, most, extra) - mine
        middle = (begin + end) // 2
        low, high = slice(begin, middle), slice(middle, end)
        kept, given = (low, high) if rank < other else (high, low)
        received = np.empty(kept.stop - kept.start, flat.dtype)
        flat[given] = mean[given]
        _exchange(ranks, other, flat[given], received)
        _merge(mean[kept], mine, received, theirs_are)
        begin, end = kept.start, kept.stop
        met.append((other, kept, given))
    flat[begin:end] = mean[begin:end]
    for other, kept, given in reversed(met):
        _exchange(ranks, other, flat[kept], flat[given])
    if rank < extra:
        _exchange(ranks, rank + most, flat, None)


def _count(rank: int, distance: int, most: int, extra: int) -> int:
    """Return the mean of how many ranks a rank has once it has met those at greater distances."""
    residue = rank % distance
    return most // distance + max(0, -(-(extra - residue) // distance))


def _merge(mean: _Array, count: int, other: _Array, other_count: int) -> None:
    """Overwrite the mean of some ranks with that of these and others, in float32."""
    if count == other_count:
        mean += other
        divide(mean, 2, mean)
    else:
        mean *= np.float32(count / (count + other_count))
        mean += other.astype(np.float32) * np.float32(other_count / (count + other_count))


def _exchange(ranks: Ranks, other: int, sent: _Array | None, received: _Array | None) -> None:
    requests = [] if received is None else pieces.irecv(ranks, received, other, _TAG)
    requests += [] if sent is None else pieces.isend(ranks, sent, other, _TAG)
    for request in requests:
        ranks.wait(request, "Sendrecv")
