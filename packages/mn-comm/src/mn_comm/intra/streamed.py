"""Within a node, arrays averaged where they lie, in pieces that stay in the cache on their way.

Each process copies a piece of its array into a small slot that its neighbours see, divided already where that is exact;
then each adds up all slots into its array. The array is read once and written once, as a copy of it would be, and
there is no buffer of its size. While the neighbours are still copying one piece, a process goes on with the next.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
from mpi4py import MPI

from mn_comm import arithmetic, patience

__all__ = ["Streamed"]

_Array = np.ndarray[Any, Any]
_Piece = tuple[int, slice, list[_Array]]

# One that is being filled, one that is being read and the array itself stay in a core's second-level cache; smaller
# pieces cost more barriers.
_PIECE_BYTES = 512 * 1024
# How many pieces a process may be ahead of its neighbours.
_AHEAD = 1
# A slot is filled again when the neighbours have certainly read it: they had filled the one _AHEAD + 1 pieces later,
# and this process learned that _AHEAD pieces later still.
_SLOTS = 2 * _AHEAD + 2


class Streamed:
    """Arrays of fixed lengths, averaged over the processes of a node where they lie.

    Args:
        mpi_comm: The processes, all of one node.
        lengths: The arrays' lengths, in elements; the same on every process.
        dtype: Their dtype, ``float32`` or ``float64``.
        share: Returns memory of as many bytes of every process, which all of them see; collective.

    Attributes:
        arrays: The arrays, one-dimensional, C-contiguous, writeable and not overlapping; to be set before each
            :meth:`average`.
        nbytes: How many bytes they are, all together.

    Raises:
        OSError: What ``share`` raises.
    """

    arrays: Sequence[_Array] = ()

    def __init__(
        self,
        mpi_comm: MPI.Intracomm,
        lengths: Sequence[int],
        dtype: np.dtype[Any],
        share: Callable[[int], Sequence[_Array]],
    ) -> None:
        self._mpi_comm = mpi_comm
        self.nbytes = sum(lengths) * dtype.itemsize
        bounds = [(i, begin, end) for i, length in enumerate(lengths) for begin, end in _cut(length, dtype.itemsize)]
        longest = max((end - begin for _, begin, end in bounds), default=0)
        slots = [memory.view(dtype) for memory in share(longest * dtype.itemsize * min(_SLOTS, len(bounds)))]
        self._pieces: list[_Piece] = []
        for number, (i, begin, end) in enumerate(bounds):
            offset = number % _SLOTS * longest
            views = [slot[offset : offset + end - begin] for slot in slots]
            self._pieces.append((i, slice(begin, end), views))

    def average(self) -> None:
        """Overwrite the arrays with their means over all processes; collective.

        The same values in the same order are added up on every process, so that the means are equal to the last bit.
        """
        filled: deque[tuple[MPI.Request, _Piece]] = deque()
        for piece in self._pieces:
            self._fill(piece)
            filled.append((self._mpi_comm.Ibarrier(), piece))
            if len(filled) > _AHEAD:
                self._add_up(*filled.popleft())
        while filled:
            self._add_up(*filled.popleft())
        patience.wait(self._mpi_comm.Ibarrier())  # all have read the last slots, which the next average may begin with

    def _fill(self, piece: _Piece) -> None:
        i, part, slots = piece
        size = self._mpi_comm.size
        if _is_power_of_two(size):
            np.multiply(self.arrays[i][part], slots[0].dtype.type(1 / size), out=slots[self._mpi_comm.rank])
        else:
            np.copyto(slots[self._mpi_comm.rank], self.arrays[i][part])

    def _add_up(self, all_have_filled: MPI.Request, piece: _Piece) -> None:
        i, part, slots = piece
        patience.wait(all_have_filled)
        total = self.arrays[i][part]
        if len(slots) == 1:
            return
        np.add(slots[0], slots[1], out=total)
        for slot in slots[2:]:
            np.add(total, slot, out=total)
        if not _is_power_of_two(len(slots)):
            arithmetic.divide(total, len(slots))


def _cut(length: int, itemsize: int) -> Iterator[tuple[int, int]]:
    """Yield the bounds of almost equal pieces of ``length`` elements."""
    count = -(-length * itemsize // _PIECE_BYTES)
    for i in range(count):
        yield length * i // count, length * (i + 1) // count


def _is_power_of_two(number: int) -> bool:
    return number & (number - 1) == 0
