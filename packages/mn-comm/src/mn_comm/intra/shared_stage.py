"""Within a node by shared memory: each process adds up its shard out of its neighbours' memory, and writes it back.

Every byte is read once and written once, while it is in the cache; there is no other copy, no second buffer, and two
barriers.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Sequence
from typing import Any

import numpy as np
from mpi4py import MPI

from mn_comm import arithmetic, patience
from mn_comm.intra import memfd
from mn_comm.intra.buffer import Buffer, shard_bounds
from mn_comm.intra.streamed import Streamed

__all__ = ["SharedStage"]

_Array = np.ndarray[Any, Any]

# As much of each segment as is worked on at a time: with those of a few neighbours it stays in a core's second-level
# cache.
_CHUNK_BYTES = 128 * 1024

# Where arrays are averaged where they lie, every process adds up everything; of more processes each had better add up
# a part.
_MOST_STREAMING = 4


class SharedStage:
    """The stage within a node whose processes share memory.

    Args:
        mpi_comm: The processes of the node.
    """

    def __init__(self, mpi_comm: MPI.Intracomm) -> None:
        self._mpi_comm = mpi_comm

    def allocate(self, length: int, dtype: np.dtype[Any]) -> Buffer:
        """Return memory that all processes of the node see; collective within the node.

        Raises:
            OSError: They cannot share memory, or not so much; on every process.
        """
        shared = memfd.share(self._mpi_comm, length * dtype.itemsize)
        segments = tuple(each.view(dtype) for each in shared)
        return Buffer(segments[self._mpi_comm.rank], segments)

    def streamed(self, lengths: Sequence[int], dtype: np.dtype[Any]) -> Streamed | None:
        """Return what averages arrays of these lengths where they lie, if that is faster; collective within the node.

        Raises:
            OSError: The processes cannot share memory; on every process.
        """
        # They wait for each other at every piece, which takes long if they have to take turns.
        if self._mpi_comm.size > min(_MOST_STREAMING, self._cores()):
            return None
        return Streamed(self._mpi_comm, lengths, dtype, functools.partial(memfd.share, self._mpi_comm))

    def reduce_scatter(self, buffer: Buffer, shards: int, divisor: int) -> _Array:
        """Add up, over the node, the shard that belongs to this process; collective within the node."""
        begin, end = self._own(buffer, shards)
        self._barrier()  # all have packed
        _sum_chunks(buffer, begin, end, divisor, [buffer.array])
        return buffer.array[begin:end]

    def all_gather(self, buffer: Buffer, shards: int) -> None:
        """Give every process the shards of all; collective within the node."""
        begin, end = self._own(buffer, shards)
        # Nobody else reads or writes this part of anybody's memory before the barrier.
        for segment in buffer.segments:
            if segment is not buffer.array:
                np.copyto(segment[begin:end], buffer.array[begin:end])
        self._barrier()  # all have written

    def mean(self, buffer: Buffer, divisor: int) -> None:
        """Overwrite a buffer with its sum over the node, divided; collective within the node."""
        begin, end = self._own(buffer, self._mpi_comm.size)
        self._barrier()  # all have packed
        _sum_chunks(buffer, begin, end, divisor, buffer.segments)
        self._barrier()  # all have written

    def _barrier(self) -> None:
        patience.call(self._mpi_comm.Barrier, self._mpi_comm.Ibarrier)

    def close(self) -> None:
        """Hold nothing: memory goes with the last array that uses it."""

    def _cores(self) -> int:
        """Return how many cores the processes may run on, all together; collective within the node."""
        return len(set().union(*self._mpi_comm.allgather(os.sched_getaffinity(0))))

    def _own(self, buffer: Buffer, shards: int) -> tuple[int, int]:
        rank = self._mpi_comm.rank
        return shard_bounds(buffer.array.size, shards)[rank] if rank < shards else (0, 0)


def _sum_chunks(buffer: Buffer, begin: int, end: int, divisor: int, out: Sequence[_Array]) -> None:
    """Add up a part of all segments, in the order of ranks whoever does it, and write it to the segments in ``out``."""
    dtype = arithmetic.sum_dtype(buffer.array.dtype)
    step = max(1, _CHUNK_BYTES // dtype.itemsize)
    scratch = np.empty(min(step, end - begin), dtype)
    for start in range(begin, end, step):
        chunk = slice(start, min(start + step, end))
        total = scratch[: chunk.stop - start]
        np.copyto(total, buffer.segments[0][chunk])
        for segment in buffer.segments[1:]:
            np.add(total, segment[chunk], out=total)
        arithmetic.divide(total, divisor)
        for segment in out:
            np.copyto(segment[chunk], total, casting="same_kind")
