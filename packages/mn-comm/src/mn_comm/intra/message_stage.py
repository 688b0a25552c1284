"""Within a node by messages: for processes that cannot share memory."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from mpi4py import MPI

from mn_comm.collectives import pieces, reduce_in_place
from mn_comm.intra.buffer import Buffer, shard_bounds

__all__ = ["MessageStage"]

_Array = np.ndarray[Any, Any]


class MessageStage:
    """The stage within a node whose processes do not share memory.

    Args:
        mpi_comm: The processes of the node.
    """

    def __init__(self, mpi_comm: MPI.Intracomm) -> None:
        self._mpi_comm = mpi_comm

    def allocate(self, length: int, dtype: np.dtype[Any]) -> Buffer:
        """Return memory of this process's own."""
        return Buffer.private(length, dtype)

    def streamed(self, lengths: Sequence[int], dtype: np.dtype[Any]) -> None:
        """Return nothing: messages are faster all together."""
        return

    def reduce_scatter(self, buffer: Buffer, shards: int, divisor: int) -> _Array:
        """Add up, over the node, the shard that belongs to this process; collective within the node."""
        mine = buffer.array[:0]
        for owner, (begin, end) in enumerate(shard_bounds(buffer.array.size, shards)):
            shard = buffer.array[begin:end]
            reduce_in_place(self._mpi_comm, shard, divisor, owner)
            mine = shard if owner == self._mpi_comm.rank else mine
        return mine

    def all_gather(self, buffer: Buffer, shards: int) -> None:
        """Give every process the shards of all; collective within the node."""
        for owner, (begin, end) in enumerate(shard_bounds(buffer.array.size, shards)):
            pieces.bcast(self._mpi_comm, buffer.array[begin:end], owner)

    def mean(self, buffer: Buffer, divisor: int) -> None:
        """Overwrite a buffer with its sum over the node, divided; collective within the node."""
        self.reduce_scatter(buffer, self._mpi_comm.size, divisor)
        self.all_gather(buffer, self._mpi_comm.size)

    def close(self) -> None:
        """Hold nothing, give nothing back."""
