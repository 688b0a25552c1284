"""``two_dimensional``: each rank of a node adds up a shard, trades it with its peers elsewhere, and shares it out."""

from __future__ import annotations

from mpi4py import MPI

from mn_comm.strategies.two_stage import TwoStage
from mn_comm.topology import Topology

__all__ = ["TwoDimensional"]


class TwoDimensional(TwoStage):
    """As many shards as the smallest node has ranks; on a larger node the further ranks own none."""

    def __init__(self, mpi_comm: MPI.Intracomm, topology: Topology) -> None:
        super().__init__(mpi_comm, topology, shards=mpi_comm.allreduce(topology.intra_size, op=MPI.MIN))
