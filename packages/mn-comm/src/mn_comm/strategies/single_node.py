"""``single_node``: the stage within the node alone, and a refusal of several nodes."""

from __future__ import annotations

from mpi4py import MPI

from mn_comm.strategies.two_stage import TwoStage
from mn_comm.topology import Topology

__all__ = ["SingleNode"]


class SingleNode(TwoStage):
    """Reduce-scatter and all-gather within the one node."""

    def __init__(self, mpi_comm: MPI.Intracomm, topology: Topology) -> None:
        if topology.inter_size != 1:
            raise ValueError(f"single_node: expected all ranks on one node, got {topology.inter_size} nodes")
        super().__init__(mpi_comm, topology, shards=topology.intra_size)
