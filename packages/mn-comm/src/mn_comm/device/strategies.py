"""How the mean of a buffer on a device is computed: staged through host memory, by NCCL, or by both.

Each strategy of :mod:`mn_comm.strategies` names its counterpart here by ``on_device()``.
"""

from __future__ import annotations

import warnings
from typing import Any

import numpy as np
from mpi4py import MPI

from mn_comm.arithmetic import is_half
from mn_comm.collectives import mean_in_place, sum_in_place
from mn_comm.device import staging
from mn_comm.device.awareness import is_cuda_aware
from mn_comm.device.buffer import DeviceBuffer, DeviceStrategy
from mn_comm.device.clique import Clique, clique_of
from mn_comm.intra import Buffer, shard_bounds
from mn_comm.strategies.strategy import Strategy
from mn_comm.topology import Topology

__all__ = ["Alone", "Direct", "EverywhereNccl", "NodeNccl", "Staged", "by_mpi", "by_nccl", "within_nodes"]

_Dtype = np.dtype[Any]


def by_mpi(host: Strategy, mpi_comm: MPI.Intracomm) -> DeviceStrategy:
    """Return the counterpart of a strategy that is nothing but MPI; collective."""
    return Direct(host, mpi_comm) if is_cuda_aware(mpi_comm) else Staged(host)


def by_nccl(mpi_comm: MPI.Intracomm) -> DeviceStrategy:
    """Return NCCL among all ranks; collective.

    Raises:
        RuntimeError: NCCL or CuPy is missing on some rank (on every rank).
        ValueError: Two ranks share a device, which NCCL has not been told to allow (on every rank).
    """
    return EverywhereNccl(mpi_comm) if mpi_comm.size > 1 else Alone()


def within_nodes(
    host: Strategy,
    mpi_comm: MPI.Intracomm,
    topology: Topology,
    shards: int,
    nodes: tuple[MPI.Intracomm, MPI.Intracomm],
) -> DeviceStrategy:
    """Return NCCL within each node and MPI across them, or the host's strategy where NCCL cannot be used; collective.

    Args:
        host: The strategy for host arrays.
        mpi_comm: The ranks.
        topology: Where they run.
        shards: How many processes of each node talk to other nodes.
        nodes: The processes of this node, and those of the same ``intra_rank`` on all nodes.
    """
    if mpi_comm.size == 1:
        return Alone()
    clique = clique_of(nodes[0])
    reasons = [reason for reason in mpi_comm.allgather(clique.obstacle and str(clique.obstacle)) if reason]
    if not reasons:
        return NodeNccl(topology, shards, clique, nodes[1])
    if mpi_comm.rank == 0:
        warnings.warn(f"gradients on devices are averaged through host memory: {reasons[0]}", stacklevel=2)
    return Staged(host)


class Alone:
    """Leave the packed buffer as it is."""

    def allocate(self, length: int, dtype: _Dtype) -> DeviceBuffer:
        """Return memory on the current device."""
        return DeviceBuffer(_empty(length, dtype), self, divisor=1)

    def average(self, buffer: DeviceBuffer) -> None:
        """Do nothing."""


class Staged:
    """Average through pinned host memory, by a strategy for host arrays.

    Args:
        host: That strategy.
    """

    def __init__(self, host: Strategy) -> None:
        self._host = host

    def allocate(self, length: int, dtype: _Dtype) -> DeviceBuffer:
        """Return memory on the current device, and pinned memory beside it; collective."""
        buffer = self._host.allocate(length, dtype)
        if len(buffer.segments) > 1:
            staging.register(buffer.array)  # shared with other processes: it must stay where it is
        else:
            buffer = _pinned(length, dtype)
        return DeviceBuffer(_empty(length, dtype), self, divisor=1, host=buffer)

    def average(self, buffer: DeviceBuffer) -> None:
        """Overwrite a buffer with its mean over all ranks; collective."""
        assert buffer.host is not None
        if buffer.array.size:
            buffer.array.get(out=buffer.host.array)
        self._host.average(buffer.host)
        if buffer.array.size:
            buffer.array.set(buffer.host.array)


class Direct(Staged):
    """Hand the device's memory to a CUDA-aware MPI; half precision, which MPI cannot add up, is staged.

    Args:
        host: The strategy for what is staged.
        mpi_comm: The ranks.
    """

    def __init__(self, host: Strategy, mpi_comm: MPI.Intracomm) -> None:
        super().__init__(host)
        self._mpi_comm = mpi_comm

    def allocate(self, length: int, dtype: _Dtype) -> DeviceBuffer:
        """Return memory on the current device; collective."""
        if is_half(dtype):
            return super().allocate(length, dtype)
        return DeviceBuffer(_empty(length, dtype), self, divisor=self._mpi_comm.size)

    def average(self, buffer: DeviceBuffer) -> None:
        """Overwrite a buffer with its mean over all ranks; collective."""
        if buffer.host is not None:
            super().average(buffer)
            return
        _synchronize()  # MPI knows nothing of streams: the gradients must be packed
        sum_in_place(self._mpi_comm, buffer.array)


class EverywhereNccl:
    """One NCCL all-reduce over all ranks.

    Args:
        mpi_comm: The ranks.
    """

    def __init__(self, mpi_comm: MPI.Intracomm) -> None:
        self._mpi_comm = mpi_comm
        self._clique = clique_of(mpi_comm)
        self._clique.require()

    def allocate(self, length: int, dtype: _Dtype) -> DeviceBuffer:
        """Return memory on the current device; collective."""
        self._clique.communicator()  # made here, where all ranks are, rather than in a thread
        return DeviceBuffer(_empty(length, dtype), self, divisor=self._mpi_comm.size)

    def average(self, buffer: DeviceBuffer) -> None:
        """Overwrite a buffer with its mean over all ranks, added up in its own dtype; collective."""
        if buffer.array.size:
            self._clique.communicator().all_reduce(buffer.array)


class NodeNccl:
    """NCCL within each node; each shard is staged for the MPI allreduce across nodes.

    Args:
        topology: Where the ranks run.
        shards: How many processes of each node own a shard and talk to other nodes.
        clique: NCCL among the processes of this node.
        inter: The processes of the same ``intra_rank`` on all nodes that have one.
    """

    def __init__(self, topology: Topology, shards: int, clique: Clique, inter: MPI.Intracomm) -> None:
        self._topology = topology
        self._shards = shards
        self._clique = clique
        self._inter = inter

    def allocate(self, length: int, dtype: _Dtype) -> DeviceBuffer:
        """Return memory on the current device, in shards of equal length, and pinned memory for this rank's."""
        self._clique.communicator()  # made here, where all ranks are, rather than in a thread
        shard = -(-length // self._shards)
        whole = _empty(shard * self._shards, dtype)
        whole[length:] = 0
        crosses = self._topology.inter_size > 1 and self._topology.intra_rank < self._shards
        host = _pinned(shard, dtype) if crosses else None
        return DeviceBuffer(whole[:length], self, divisor=self._topology.size, host=host, whole=whole)

    def average(self, buffer: DeviceBuffer) -> None:
        """Overwrite a buffer with its mean over all ranks; collective."""
        if not buffer.array.size:
            return
        if self._topology.inter_size == 1:
            self._clique.communicator().all_reduce(buffer.whole)
            return
        self._reduce_scatter(buffer.whole)
        if buffer.host is not None:
            shard = self._shard(buffer.whole, self._topology.intra_rank)
            shard.get(out=buffer.host.array)
            mean_in_place(self._inter, buffer.host.array, 1)
            shard.set(buffer.host.array)
        self._all_gather(buffer.whole)

    def _reduce_scatter(self, whole: Any) -> None:
        communicator = self._clique.communicator()
        if self._shards == self._topology.intra_size:
            communicator.reduce_scatter(whole)
            return
        for owner in range(self._shards):
            communicator.reduce(self._shard(whole, owner), owner)

    def _all_gather(self, whole: Any) -> None:
        communicator = self._clique.communicator()
        if self._shards == self._topology.intra_size:
            communicator.all_gather(whole)
            return
        for owner in range(self._shards):
            communicator.broadcast(self._shard(whole, owner), owner)

    def _shard(self, whole: Any, owner: int) -> Any:
        begin, end = shard_bounds(whole.size, self._shards)[owner]
        return whole[begin:end]


def _empty(length: int, dtype: _Dtype) -> Any:
    import cupy

    return cupy.empty(length, dtype)


def _pinned(length: int, dtype: _Dtype) -> Buffer:
    array = staging.empty_pinned((length,), dtype)
    return Buffer(array, (array,))


def _synchronize() -> None:
    import cupy

    cupy.cuda.get_current_stream().synchronize()
