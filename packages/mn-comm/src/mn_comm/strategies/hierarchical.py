"""``hierarchical``: add up on each node, then among the nodes' leaders, and hand the result back."""

from __future__ import annotations

from typing import Any

import numpy as np
from mpi4py import MPI

from mn_comm.collectives import pieces, sum_in_place
from mn_comm.topology import Topology, split

__all__ = ["Hierarchical"]

_LEADER = 0


class Hierarchical:
    """Reduce to the node's leader, allreduce among the leaders, broadcast back."""

    one_bucket_each = False

    def __init__(self, mpi_comm: MPI.Intracomm, topology: Topology) -> None:
        self._size = topology.size
        self._is_leader = topology.intra_rank == _LEADER
        self._intra = split(mpi_comm, topology.inter_rank, topology.intra_rank)
        self._inter = split(mpi_comm, topology.intra_rank, topology.inter_rank)

    def average(self, buffer: np.ndarray[Any, Any]) -> None:
        """Overwrite a buffer with its mean over all ranks; collective."""
        for piece in pieces.pieces(buffer):
            self._intra.Reduce(MPI.IN_PLACE if self._is_leader else piece, piece if self._is_leader else None)
        if self._is_leader:
            sum_in_place(self._inter, buffer)
            buffer /= self._size
        pieces.bcast(self._intra, buffer, _LEADER)

    def close(self) -> None:
        """Free the communicators of the stages; collective."""
        self._intra.Free()
        self._inter.Free()
