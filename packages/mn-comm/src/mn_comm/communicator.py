"""The communicator: a topology, the collectives and a strategy, put together."""

from __future__ import annotations

from typing import Any, ClassVar
from weakref import WeakKeyDictionary

import numpy as np
from mpi4py import MPI

from mn_comm import agreement, collectives, stall, strategies, timeline, wire
from mn_comm.base import DEFAULT_MAX_BUF_LEN, CommunicatorBase
from mn_comm.config import Config
from mn_comm.gradients import BackgroundReducer, GradientReducer
from mn_comm.gradients.agree import Agreement, signature_of
from mn_comm.gradients.select import sorted_parameters
from mn_comm.last_words import speak_when_ended
from mn_comm.protocols import Model
from mn_comm.stall import watched
from mn_comm.topology import discover, split

__all__ = [
    "Communicator",
    "DummyCommunicator",
    "FlatCommunicator",
    "HierarchicalCommunicator",
    "NaiveCommunicator",
    "NonCudaAwareCommunicator",
    "PureNcclCommunicator",
    "SingleNodeCommunicator",
    "TwoDimensionalCommunicator",
]

_Array = np.ndarray[Any, Any]


class Communicator(CommunicatorBase):
    """A communicator over the ranks of an MPI communicator; each subclass names a strategy.

    Collectives travel on a private duplicate of the MPI communicator, so that they cannot be mixed up with what the
    caller sends himself; point-to-point messages travel on the caller's.

    Args:
        mpi_comm: The ranks that take part. Creating a communicator is collective.
        config: Its settings.
        owns_mpi_comm: Whether ``finalize`` frees ``mpi_comm`` as well.
    """

    strategy: ClassVar[type[strategies.Strategy]]

    def __init__(self, mpi_comm: MPI.Intracomm, config: Config | None = None, *, owns_mpi_comm: bool = False) -> None:
        self._mpi_comm = mpi_comm
        self._private = mpi_comm.Dup()
        stall.join(self._private)
        timeline.join(self._private)
        speak_when_ended()
        self._owns_mpi_comm = owns_mpi_comm
        self._topology = discover(self._private)
        self._config = config or Config()
        self._strategy = self.strategy(self._private, self._topology)
        self._parameters = Agreement(self._private, "bcast_data")
        self._reducers: WeakKeyDictionary[Model, GradientReducer] = WeakKeyDictionary()

    @property
    def rank(self) -> int:
        return self._topology.rank

    @property
    def size(self) -> int:
        return self._topology.size

    @property
    def intra_rank(self) -> int:
        return self._topology.intra_rank

    @property
    def intra_size(self) -> int:
        return self._topology.intra_size

    @property
    def inter_rank(self) -> int:
        return self._topology.inter_rank

    @property
    def inter_size(self) -> int:
        return self._topology.inter_size

    @property
    def mpi_comm(self) -> MPI.Intracomm:
        return self._mpi_comm

    def set_config(self, name: str, value: Any = True) -> None:
        self._config = self._config.with_value(name, value)

    def get_config(self, name: str | None = None) -> Any:
        return self._config.get(name)

    def split(self, color: int, key: int) -> Communicator:
        with agreement.together(self._private):
            color = wire.as_index(color, "color")
            key = wire.as_index(key, "key")
            if color < 0:
                raise ValueError(f"expected a color of at least 0, got {color}")
        part = split(self._private, color, key)
        return type(self)(part, self._config, owns_mpi_comm=True)

    def finalize(self) -> None:
        if self._private != MPI.COMM_NULL:
            self._strategy.close()
            stall.leave(self._private)
            self._private.Free()
            if self._owns_mpi_comm:
                self._mpi_comm.Free()

    @watched
    def send(self, data: Any, dest: int, tag: int = 0) -> None:
        collectives.send(self._mpi_comm, data, dest, tag)

    @watched
    def recv(self, source: int, tag: int = 0) -> _Array | tuple[_Array, ...]:
        return collectives.recv(self._mpi_comm, source, tag)

    @watched
    def bcast(self, data: Any, root: int = 0) -> _Array:
        return collectives.bcast(self._private, data, root)

    @watched
    def gather(self, data: Any, root: int = 0) -> tuple[_Array, ...] | None:
        return collectives.gather(self._private, data, root)

    @watched
    def allgather(self, data: Any) -> tuple[_Array, ...]:
        return collectives.allgather(self._private, data)

    @watched
    def scatter(self, xs: Any, root: int = 0) -> _Array:
        return collectives.scatter(self._private, xs, root)

    @watched
    def alltoall(self, xs: Any) -> tuple[_Array, ...]:
        return collectives.alltoall(self._private, xs)

    @watched
    def allreduce(self, data: Any) -> _Array:
        return collectives.allreduce(self._private, data)

    @watched
    def send_obj(self, obj: Any, dest: int, tag: int = 0) -> None:
        collectives.send_obj(self._mpi_comm, obj, dest, tag)

    @watched
    def recv_obj(self, source: int, status: MPI.Status | None = None, tag: int = MPI.ANY_TAG) -> Any:
        return collectives.recv_obj(self._mpi_comm, source, tag, status)

    @watched
    def bcast_obj(self, obj: Any, max_buf_len: int = DEFAULT_MAX_BUF_LEN, root: int = 0) -> Any:
        return collectives.bcast_obj(self._private, obj, max_buf_len, root)

    @watched
    def gather_obj(self, obj: Any, root: int = 0) -> list[Any] | None:
        return collectives.gather_obj(self._private, obj, root)

    @watched
    def allgather_obj(self, obj: Any) -> list[Any]:
        return collectives.allgather_obj(self._private, obj)

    @watched
    def scatter_obj(self, objs: Any, root: int = 0) -> Any:
        return collectives.scatter_obj(self._private, objs, root)

    @watched
    def allreduce_obj(self, obj: Any) -> Any:
        return collectives.allreduce_obj(self._private, obj)

    @watched
    def bcast_data(self, model: Model) -> None:
        named = sorted_parameters(model)
        self._parameters.start(signature_of([(name, param.data) for name, param in named]))
        self._parameters.finish()
        for _, param in named:
            if param.data is not None:
                collectives.bcast_in_place(self._private, param.data)

    @watched
    def multi_node_mean_grad(self, model: Model, zero_fill: bool = False) -> None:
        self._reducer_of(model).average(model, zero_fill)

    def _reducer_of(self, model: Model) -> GradientReducer:
        reducer = self._reducers.get(model)
        if reducer is None:
            reducer = self._reducers[model] = GradientReducer(self._private, self._strategy, self._settings)
        return reducer

    def background_reducer(self, *, bucket_bytes: int | None = None, sets: int = 1) -> BackgroundReducer:
        return BackgroundReducer(
            self._private, self._topology, self.strategy, self._settings, bucket_bytes=bucket_bytes, sets=sets
        )

    def _settings(self) -> Config:
        return self._config


class NaiveCommunicator(Communicator):
    """``naive``: gradients travel one by one; works everywhere, and every other one is tested against it."""

    strategy = strategies.Naive


class FlatCommunicator(Communicator):
    """``flat``: gradients travel together, in one MPI allreduce."""

    strategy = strategies.Flat


class HierarchicalCommunicator(Communicator):
    """``hierarchical``: added up on each node, then among the nodes' leaders; for nodes with one network card."""

    strategy = strategies.Hierarchical


class TwoDimensionalCommunicator(Communicator):
    """``two_dimensional``: each rank of a node adds up a shard and talks to its peers; for nodes with several cards."""

    strategy = strategies.TwoDimensional


class SingleNodeCommunicator(Communicator):
    """``single_node``: as ``two_dimensional`` without the network; refuses several nodes."""

    strategy = strategies.SingleNode


class NonCudaAwareCommunicator(Communicator):
    """``non_cuda_aware``: as ``two_dimensional``; for MPI libraries that know nothing of devices."""

    strategy = strategies.NonCudaAware


class PureNcclCommunicator(Communicator):
    """``pure_nccl``: gradients on devices travel together, in one NCCL all-reduce; refuses those in host memory."""

    strategy = strategies.PureNccl


class DummyCommunicator(Communicator):
    """``dummy``: packs and unpacks but does not communicate, to measure what the packing costs."""

    strategy = strategies.Dummy
