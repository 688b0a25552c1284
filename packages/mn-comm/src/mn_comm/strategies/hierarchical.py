"""``hierarchical``: add up on each node, then among the nodes' leaders, and hand the result back."""

from __future__ import annotations

from mpi4py import MPI

from mn_comm.strategies.two_stage import TwoStage
from mn_comm.topology import Topology

__all__ = ["Hierarchical"]


class Hierarchical(TwoStage):
    """Reduce to the node's leader, allreduce among the leaders, broadcast back: one shard, for one network card."""

    def __init__(self, mpi_comm: MPI.Intracomm, topology: Topology) -> None:
        super().__init__(mpi_comm, topology, shards=1)
