"""A stage within each node, and one across them: what all strategies that know of nodes are made of."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from mpi4py import MPI

from mn_comm.collectives import mean_in_place
from mn_comm.intra import Buffer, MessageStage, SharedStage, Stage, Streamed
from mn_comm.topology import Topology, split

if TYPE_CHECKING:
    from mn_comm.device.buffer import DeviceStrategy

__all__ = ["TwoStage"]


class TwoStage:
    """Reduce-scatter within the node, allreduce of each shard across the nodes, all-gather within the node.

    Args:
        mpi_comm: The communicator whose ranks take part.
        topology: Where they run.
        shards: How many processes of each node own a shard and talk to other nodes; every node has at least so many.
    """

    one_bucket_each = False

    def __init__(self, mpi_comm: MPI.Intracomm, topology: Topology, shards: int) -> None:
        self._mpi_comm = mpi_comm
        self._topology = topology
        self._shards = shards
        self._intra = split(mpi_comm, topology.inter_rank, topology.intra_rank)
        self._inter = split(mpi_comm, topology.intra_rank, topology.inter_rank)
        self._stage: Stage = SharedStage(self._intra)

    def allocate(self, length: int, dtype: np.dtype[Any]) -> Buffer:
        """Return memory that the stage within the node works on; collective within the node.

        Where the processes of the node cannot share so much memory, one of them warns, and from now on messages are
        used.
        """
        try:
            return self._stage.allocate(length, dtype)
        except OSError as error:
            return self._without_shared_memory(error).allocate(length, dtype)

    def streamed(self, lengths: Sequence[int], dtype: np.dtype[Any]) -> Streamed | None:
        """Return what averages arrays of these lengths where they lie, on one node, if that is faster; collective."""
        if self._topology.inter_size > 1:
            return None
        try:
            return self._stage.streamed(lengths, dtype)
        except OSError as error:
            return self._without_shared_memory(error).streamed(lengths, dtype)

    def average(self, buffer: Buffer) -> None:
        """Overwrite a buffer with its mean over all ranks; collective."""
        size = self._topology.size
        if self._topology.inter_size == 1:
            self._stage.mean(buffer, size)
            return
        # Divided before it travels on: a sum of halves may not fit where the mean does.
        shard = self._stage.reduce_scatter(buffer, self._shards, size)
        if self._topology.intra_rank < self._shards:
            mean_in_place(self._inter, shard, 1)
        self._stage.all_gather(buffer, self._shards)

    def on_device(self) -> DeviceStrategy:
        """Return NCCL within the nodes and MPI across them, staged where NCCL cannot be used; collective."""
        from mn_comm.device import strategies as on_device

        nodes = (self._intra, self._inter)
        return on_device.within_nodes(self, self._mpi_comm, self._topology, self._shards, nodes)

    def _without_shared_memory(self, error: OSError) -> Stage:
        if self._topology.intra_rank == 0:
            warnings.warn(f"gradients are averaged by messages, not in shared memory: {error}", stacklevel=3)
        self._stage = MessageStage(self._intra)
        return self._stage

    def close(self) -> None:
        """Free the communicators of the stages; collective."""
        self._intra.Free()
        self._inter.Free()
