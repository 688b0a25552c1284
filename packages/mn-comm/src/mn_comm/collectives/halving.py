"""Means over all ranks that MPI does not provide: of half precision, and of each range on the one rank that needs it.

They are a reduce-scatter by recursive halving, followed by an all-gather by recursive doubling if every rank needs the
mean (Rabenseifner, "Optimization of Collective Reduction Operations", ICCS 2004, section 2). The order of addition
depends only on the ranks, and not on the position of an element, on the rank that needs it, or on the MPI library.

MPI has no type for half precision. A sum may overflow although the mean would not, and small numbers that are divided
first become zero. So ranks send means, which they compute in float32 and round before they send them again.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from mn_comm.basis.arithmetic import divide, is_half
from mn_comm.basis.mpi import MPI
from mn_comm.collectives import pieces

if TYPE_CHECKING:
    from mn_comm.ranks.intracomm import Ranks

_Array = np.ndarray[Any, Any]
# Data is added up in pieces while more of it arrives.
_PIECE_BYTES = 1 << 20


def mean_of_halves(ranks: Ranks, flat: _Array) -> None:
    """Overwrite an array of half precision, flat and contiguous, with its mean over all ranks; collective."""
    most = _power_of_two(ranks.size)
    met = _reduce_scatter(ranks, flat, [flat.size * i // most for i in range(most + 1)])
    for meeting in reversed(met):
        _exchange(ranks, meeting.other, flat[meeting.kept], flat[meeting.given])
    if ranks.rank >= most:
        _exchange(ranks, ranks.rank - most, None, flat)
    elif ranks.rank < ranks.size - most:
        _exchange(ranks, ranks.rank + most, flat, None)


def mean_to_each(ranks: Ranks, flat: _Array, ranges: Sequence[slice]) -> None:
    """Overwrite, on each rank, one range of an array with its mean over all ranks; other elements are lost; collective.

    ``flat`` is one-dimensional and contiguous, of floats, and of equal length and dtype on every rank. ``ranges`` has
    the range of each rank. In the order of :func:`order_of_ranges`, they are the whole array, without gaps.
    """
    most = _power_of_two(ranks.size)
    begins = [ranges[rank].start for rank in order_of_ranges(ranks.size) if rank < most]
    _reduce_scatter(ranks, flat, [*begins, flat.size])
    if ranks.rank >= most:
        _exchange(ranks, ranks.rank - most, None, flat[ranges[ranks.rank]])
    elif ranks.rank < ranks.size - most:
        _exchange(ranks, ranks.rank + most, flat[ranges[ranks.rank + most]], None)


def order_of_ranges(size: int) -> list[int]:
    """Return the ranks in the order in which their ranges must lie for :func:`mean_to_each`."""
    most = _power_of_two(size)
    return sorted(range(size), key=lambda rank: (rank % most, rank))


def _power_of_two(size: int) -> int:
    return 1 << (size.bit_length() - 1)


class _Meeting(NamedTuple):
    """An exchange with another rank."""

    other: int  # the other rank
    kept: slice  # the elements for which this rank continues
    given: slice  # the elements for which the other rank continues
    mine: int  # the number of ranks over which this rank's values are a mean
    theirs: int  # the number of ranks over which the other rank's values are a mean


def _meetings(rank: int, size: int, bounds: Sequence[int]) -> Iterator[_Meeting]:
    """Yield the meetings of a rank below the power of two, given where ranges begin, and where the last one ends."""
    most = len(bounds) - 1
    low, high, distance = 0, most, most
    while distance > 1:
        mine = _count(rank, distance, most, size - most)
        distance //= 2
        theirs = _count(rank, distance, most, size - most) - mine
        middle = (low + high) // 2
        lower, upper = slice(bounds[low], bounds[middle]), slice(bounds[middle], bounds[high])
        if rank & distance:
            low = middle
            yield _Meeting(rank - distance, upper, lower, mine, theirs)
        else:
            high = middle
            yield _Meeting(rank + distance, lower, upper, mine, theirs)


def _reduce_scatter(ranks: Ranks, flat: _Array, bounds: Sequence[int]) -> list[_Meeting]:
    """Overwrite, on each rank below a power of two, its range of an array with the mean over all ranks; collective.

    Ranks above it send their values to one of these. Elements outside the range are lost. Return the meetings.
    """
    rank, most = ranks.rank, len(bounds) - 1
    if rank >= most:
        list(_swap(ranks, rank - most, flat, flat[:0]))
        return []
    add = _merge if is_half(flat.dtype) else _add
    total = flat.astype(np.float32) if is_half(flat.dtype) else flat
    if rank < ranks.size - most:
        for here, theirs in _swap(ranks, rank + most, flat[:0], flat):
            add(total[here], 1, theirs, 1)
    met = list(_meetings(rank, ranks.size, bounds))
    for meeting in met:
        if total is not flat:
            _round(total, flat, meeting)
        for here, theirs in _swap(ranks, meeting.other, flat[meeting.given], flat[meeting.kept]):
            add(total[meeting.kept][here], meeting.mine, theirs, meeting.theirs)
    own = slice(bounds[rank], bounds[rank + 1])
    if total is flat:
        divide(flat[own], ranks.size, flat[own])
    else:
        flat[own] = total[own]
    return met


def _round(total: _Array, flat: _Array, meeting: _Meeting) -> None:
    """Round both the kept and the given elements, so that it does not matter which rank keeps which."""
    for part in (meeting.kept, meeting.given):
        flat[part] = total[part]
    total[meeting.kept] = flat[meeting.kept]


def _count(rank: int, distance: int, most: int, extra: int) -> int:
    """Return the number of ranks over which a rank has a mean after it has met the ranks at greater distances."""
    residue = rank % distance
    return most // distance + max(0, -(-(extra - residue) // distance))


def _add(total: _Array, count: int, other: _Array, other_count: int) -> None:
    """Overwrite the sum over some ranks with the sum over these and other ranks."""
    np.add(total, other, total)


def _merge(mean: _Array, count: int, other: _Array, other_count: int) -> None:
    """Overwrite the mean over some ranks with the mean over these and other ranks, in float32."""
    if count == other_count:
        mean += other
        divide(mean, 2, mean)
    else:
        mean *= np.float32(count / (count + other_count))
        mean += other.astype(np.float32) * np.float32(other_count / (count + other_count))


def _swap(ranks: Ranks, other: int, given: _Array, kept: _Array) -> Iterator[tuple[slice, _Array]]:
    """Send elements to another rank, and yield the elements that it sends for ``kept``: their positions and values."""
    sending = pieces.isend(ranks, given, other, nbytes=_PIECE_BYTES)
    step = min(kept.size, _PIECE_BYTES // kept.itemsize)
    rooms = np.empty((2, step), kept.dtype)
    waiting: list[tuple[slice, _Array, list[MPI.Request]]] = []
    for number, begin in enumerate(range(0, kept.size, step or 1)):
        here = slice(begin, min(begin + step, kept.size))
        room = rooms[number % 2, : here.stop - begin]
        waiting.append((here, room, pieces.irecv(ranks, room, other)))
        if len(waiting) == 2:
            yield _received(ranks, *waiting.pop(0))
    for each in waiting:
        yield _received(ranks, *each)
    for request in sending:
        ranks.wait(request, "Reduce_scatter")


def _received(ranks: Ranks, here: slice, room: _Array, requests: Sequence[MPI.Request]) -> tuple[slice, _Array]:
    for request in requests:
        ranks.wait(request, "Reduce_scatter")  # not "Irecv": it waits for all ranks
    return here, room


def _exchange(ranks: Ranks, other: int, sent: _Array | None, received: _Array | None) -> None:
    requests = [] if received is None else pieces.irecv(ranks, received, other)
    requests += [] if sent is None else pieces.isend(ranks, sent, other)
    for request in requests:
        ranks.wait(request, "Allgather")
