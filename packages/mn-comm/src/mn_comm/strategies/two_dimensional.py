"""``two_dimensional``: each rank of a node adds up a shard, trades it with its peers elsewhere, and shares it out."""

from __future__ import annotations

from typing import Any

import numpy as np
from mpi4py import MPI

from mn_comm.collectives import pieces, sum_in_place
from mn_comm.topology import Topology, split

__all__ = ["TwoDimensional", "shard_bounds"]


class TwoDimensional:
    """Reduce-scatter within the node, allreduce of each shard across the nodes, all-gather within the node.

    There are as many shards as the smallest node has ranks; on a larger node the further ranks own none.
    """

    one_bucket_each = False

    def __init__(self, mpi_comm: MPI.Intracomm, topology: Topology) -> None:
        self._size = topology.size
        self._intra = split(mpi_comm, topology.inter_rank, topology.intra_rank)
        self._inter = split(mpi_comm, topology.intra_rank, topology.inter_rank)
        self._shards = mpi_comm.allreduce(topology.intra_size, op=MPI.MIN)

    def average(self, buffer: np.ndarray[Any, Any]) -> None:
        """Overwrite a buffer with its mean over all ranks; collective."""
        for owner, (begin, end) in enumerate(shard_bounds(buffer.size, self._shards)):
            _reduce(self._intra, buffer[begin:end], owner)
        if self._intra.rank < self._shards:
            begin, end = shard_bounds(buffer.size, self._shards)[self._intra.rank]
            shard = buffer[begin:end]
            sum_in_place(self._inter, shard)
            shard /= self._size
        for owner, (begin, end) in enumerate(shard_bounds(buffer.size, self._shards)):
            pieces.bcast(self._intra, buffer[begin:end], owner)

    def close(self) -> None:
        """Free the communicators of the stages; collective."""
        self._intra.Free()
        self._inter.Free()


def shard_bounds(length: int, shards: int) -> list[tuple[int, int]]:
    """Return where each of ``shards`` almost equal parts of ``length`` elements begins and ends."""
    return [(length * i // shards, length * (i + 1) // shards) for i in range(shards)]


def _reduce(mpi_comm: MPI.Intracomm, part: np.ndarray[Any, Any], root: int) -> None:
    for piece in pieces.pieces(part):
        if mpi_comm.rank == root:
            mpi_comm.Reduce(MPI.IN_PLACE, piece, root=root)
        else:
            mpi_comm.Reduce(piece, None, root=root)
