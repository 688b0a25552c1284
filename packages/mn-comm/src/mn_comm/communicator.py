"""The communicator: a topology, the collectives and a strategy."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

from mn_comm.base import DEFAULT_MAX_BUF_LEN, CommunicatorBase, mean_as_version_1
from mn_comm.basis import wire
from mn_comm.basis.arithmetic import is_half
from mn_comm.basis.config import Config
from mn_comm.basis.lazy import load_later
from mn_comm.basis.mpi import MPI, has_been_finalized
from mn_comm.basis.placement import DeviceBackend, provide, zeros_beside
from mn_comm.basis.protocols import Model
from mn_comm.ranks import agreement
from mn_comm.ranks.watch import operation

if TYPE_CHECKING:
    from mn_comm import collectives
    from mn_comm.gradients import agree
    from mn_comm.gradients.compression import CompressionScheme
    from mn_comm.gradients.interfaces import CommunicationHook
    from mn_comm.gradients.owned import OwnedArrays
    from mn_comm.gradients.reducer import GradientReducer
    from mn_comm.gradients.strategy import Strategy
    from mn_comm.ranks.context import Contexts
    from mn_comm.ranks.intracomm import Ranks
else:  # creating a communicator needs none of them
    collectives = load_later("mn_comm.collectives")
    agree = load_later("mn_comm.gradients.agree")

_Array = np.ndarray[Any, Any]


@provide
def _load_device_backend() -> DeviceBackend:
    from mn_comm.device import backend

    return backend


class Communicator(CommunicatorBase):
    """A communicator over the ranks of an MPI communicator; each subclass names a strategy.

    Collectives use a private duplicate of the MPI communicator, so they cannot be confused with messages of the caller;
    point-to-point messages use the caller's communicator. All communicators over one MPI communicator share the
    duplicate: to use two of them in two threads at the same time, pass each its own ``Dup()``.

    A subclass can have a method ``comm_hook(bucket)``, which averages every bucket in place of the strategy, also in
    the background, like ``send`` of ``mn_optim.AfterBackward``. Its ``strategy`` is the name of the built-in strategy
    that packs the gradients.

    A subclass in a script may define ``multi_node_mean_grad``, or ``_multi_node_mean`` to average gradients one by one;
    otherwise it averages as ``naive`` does. :meth:`.CommunicatorBase.split` creates it with ``mpi_comm`` alone.

    Args:
        mpi_comm: The ranks that take part. Creating a communicator is collective.
    """

    strategy: str = "naive"
    comm_hook: CommunicationHook | None = None
    ranks: Ranks
    """The ranks, as used by the collectives."""
    _config = Config()
    _part_of: Contexts | None = None

    def __init_subclass__(cls, **kwds: Any) -> None:
        super().__init_subclass__(**kwds)
        if cls.multi_node_mean_grad is not Communicator.multi_node_mean_grad:
            return
        is_one_of_ours = any("strategy" in vars(kind) for kind in cls.__mro__ if kind is not Communicator)
        if cls._multi_node_mean is not Communicator._multi_node_mean:
            cls.multi_node_mean_grad = mean_one_by_one  # type: ignore[method-assign]
        elif cls.allreduce_grad is not CommunicatorBase.allreduce_grad and not is_one_of_ours:
            cls.multi_node_mean_grad = mean_as_version_1  # type: ignore[method-assign]

    def __init__(self, mpi_comm: MPI.Intracomm) -> None:
        self.mpi_comm = mpi_comm

    @property
    def mpi_comm(self) -> MPI.Intracomm:  # assigning a different one is collective
        return self._mpi_comm

    @mpi_comm.setter
    def mpi_comm(self, mpi_comm: MPI.Intracomm) -> None:
        # Not at import: these need MPI, which is initialised by the first communicator.
        from mn_comm.gradients.strategies import STRATEGIES
        from mn_comm.ranks import spans
        from mn_comm.ranks.context import contexts_of

        wire.check_intracomm(mpi_comm)
        contexts = contexts_of(mpi_comm)
        spans.start(contexts.foreground.ranks)
        self._use(mpi_comm, contexts, STRATEGIES[self.strategy](contexts.foreground))

    def _use(self, mpi_comm: MPI.Intracomm, contexts: Contexts, strategy: Strategy) -> None:
        """Use these ranks from now on; not collective."""
        from mn_comm.ranks.intracomm import Ranks

        context = contexts.foreground
        self._strategy = strategy
        self._mpi_comm = mpi_comm
        self._peers = Ranks(mpi_comm)
        self._contexts = contexts
        self.ranks = context.ranks
        self._topology = context.topology
        self._reducers: weakref.WeakKeyDictionary[Model, GradientReducer] = weakref.WeakKeyDictionary()
        self._common_reducer: GradientReducer | None = None
        self._owned: OwnedArrays | None = None

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
    def batched_copy(self) -> bool:
        """The setting ``batched_copy``."""
        return self._config.batched_copy

    @batched_copy.setter
    def batched_copy(self, value: bool) -> None:
        self._config = self._config.with_value("batched_copy", value)

    @property
    def allreduce_grad_dtype(self) -> np.dtype[Any] | None:
        """The setting ``allreduce_grad_dtype``."""
        return self._config.allreduce_grad_dtype

    @allreduce_grad_dtype.setter
    def allreduce_grad_dtype(self, value: Any) -> None:
        self._config = self._config.with_value("allreduce_grad_dtype", value)

    def set_config(self, name: str, value: Any = True, **kwargs: Any) -> None:
        if kwargs:
            raise TypeError(f"expected the name and value of a setting, got {', '.join(kwargs)} as well")
        self._config = self._config.with_value(name, value)

    def get_config(self, name: str | None = None) -> Any:
        settings = self._config.get()
        if name is None:
            return {**super().get_config(), **settings}
        if name in self._configs and name not in settings:
            return super().get_config(name)
        return self._config.get(name)

    @operation
    def split(self, color: int, key: int) -> Communicator:
        with agreement.raise_on_all(self.ranks):
            color = wire.as_index(color, "color")
            key = wire.as_index(key, "key")
            if color < 0:
                raise ValueError(f"expected a color of at least 0, got {color}")
            if color >= 2**31 or not -(2**31) <= key < 2**31:
                raise ValueError(f"expected color and key to fit into 32 bits, got {color} and {key}")
        part = type(self)(mpi_comm=self._contexts.split(color, key))
        with part.config_scope():
            for name, value in self._configs.items():
                setattr(part, name, value)
        part._config, part._part_of = self._config, self._contexts  # noqa: SLF001 - it is one of these
        return part

    @operation
    def finalize(self) -> None:
        self._reducers.clear()
        if self._part_of is not None and not has_been_finalized():
            self._part_of.release(self._mpi_comm)
        self._part_of = None

    @operation
    def send(self, data: Any, dest: int, tag: int = 0) -> None:
        collectives.send(self._peers, data, dest, tag)

    @operation
    def recv(self, source: int, tag: int = 0) -> _Array | tuple[_Array, ...]:
        return collectives.recv(self._peers, source, tag)

    @operation
    def bcast(self, x: Any, root: int = 0) -> _Array:  # type: ignore[override]  # so they were
        return collectives.bcast(self.ranks, x, root)

    @operation
    def gather(self, x: Any, root: int = 0) -> tuple[_Array, ...] | None:
        return collectives.gather(self.ranks, x, root)

    @operation
    def allgather(self, x: Any) -> tuple[_Array, ...]:
        return collectives.allgather(self.ranks, x)

    @operation
    def scatter(self, xs: Any, root: int = 0) -> _Array:
        return collectives.scatter(self.ranks, xs, root)

    @operation
    def alltoall(self, xs: Any) -> tuple[_Array, ...]:
        return collectives.alltoall(self.ranks, xs)

    @operation
    def allreduce(self, x: Any, *, op: str = "sum") -> _Array:
        """Return the combination of all ranks' arrays, a new array of their shape and dtype, on every rank; collective.

        Args:
            x: An array of the same shape and dtype on every rank: integers, floats or complex numbers. Half precision
                is combined in float32. Whether integers that grow too large wrap around or saturate depends on the MPI
                library. In host memory, the result is NaN where any rank has NaN, also of ``max`` and ``min``.
            op: ``sum``, ``prod``, ``max`` or ``min``; the same on every rank.

        Raises:
            TypeError: A rank has no array, or one of a dtype that ``op`` cannot combine (on every rank).
            ValueError: The ranks differ in shape, dtype or ``op``, or there is no such ``op`` (on every rank).
        """
        return collectives.allreduce(self.ranks, x, op)

    @operation
    def reduce(self, x: Any, *, op: str = "sum", root: int = 0) -> _Array | None:
        """Return, at the root, the combination of all ranks' arrays, elsewhere ``None``; collective.

        Args:
            x: See :meth:`allreduce`, which raises the same exceptions.
            op: See :meth:`allreduce`.
            root: The rank that receives.

        Example:
            >>> largest = comm.reduce(np.array([comm.rank]), op="max", root=0)
            >>> int(largest[0]) if comm.rank == 0 else 1
            1
        """
        return collectives.reduce(self.ranks, x, op, root)

    @operation
    def reduce_scatter(self, x: Any, *, op: str = "sum") -> _Array:
        """Return this rank's block of the combination of all ranks' arrays; collective.

        Args:
            x: See :meth:`allreduce`, which raises the same exceptions. The length of the first axis is a multiple of
                ``size``.
            op: See :meth:`allreduce`.

        Returns:
            A new array of the same dtype: of ``size`` blocks of equal length along the first axis, the one at position
            ``rank``.

        Raises:
            ValueError: The length of the first axis is not a multiple of ``size`` (on every rank).

        Example:
            >>> comm.reduce_scatter(np.ones(4))
            array([2., 2.])
        """
        return collectives.reduce_scatter(self.ranks, x, op)

    @operation
    def barrier(self) -> None:
        """Wait until every rank has called this; collective."""
        self.ranks.Barrier()

    def __repr__(self) -> str:
        hosts = f"{self.inter_size} host{'s' if self.inter_size > 1 else ''}"
        return f"<{type(self).__name__} {self.strategy!r}: rank {self.rank} of {self.size}, on {hosts}>"

    @operation
    def send_obj(self, obj: Any, dest: int, tag: int = 0) -> None:
        collectives.send_obj(self._peers, obj, dest, tag)

    @operation
    def recv_obj(  # type: ignore[override]  # so it was
        self, source: int, status: MPI.Status | None = None, tag: int | None = None
    ) -> Any:
        return collectives.recv_obj(self._peers, source, MPI.ANY_TAG if tag is None else tag, status)

    @operation
    def bcast_obj(self, obj: Any, max_buf_len: int | None = DEFAULT_MAX_BUF_LEN, root: int = 0) -> Any:
        if max_buf_len is None:
            max_buf_len = DEFAULT_MAX_BUF_LEN
        return collectives.bcast_obj(self.ranks, obj, max_buf_len, root)

    @operation
    def gather_obj(self, obj: Any, root: int = 0) -> list[Any] | None:
        return collectives.gather_obj(self.ranks, obj, root)

    @operation
    def allgather_obj(self, obj: Any) -> list[Any]:
        return collectives.allgather_obj(self.ranks, obj)

    @operation
    def scatter_obj(self, objs: Any, root: int = 0) -> Any:
        return collectives.scatter_obj(self.ranks, objs, root)

    @operation
    def allreduce_obj(self, obj: Any) -> Any:
        return collectives.allreduce_obj(self.ranks, obj)

    @operation
    def bcast_data(self, model: Model) -> None:
        named = [(name, param.data) for name, param in agree.sorted_parameters(model)]
        agree.expect_same_arrays(self.ranks, "bcast_data", named)
        with agreement.raise_on_all(self.ranks):
            for name, array in named:
                if isinstance(array, np.ndarray) and not array.flags.writeable:
                    raise ValueError(
                        f"bcast_data: expected arrays that can be written to, got a read-only one for {name}"
                    )
        for _, array in named:
            if array is not None:
                collectives.bcast_in_place(self.ranks, array)

    @operation
    def multi_node_mean_grad(self, model: Model, zero_fill: bool = False) -> None:
        self._reducer_of(model).average(model, zero_fill)

    def _multi_node_mean(self, sendbuf: Any, recvbuf: Any) -> None:
        """Write the mean of an array over all ranks into another array; collective. Derived classes may override it.

        Args:
            sendbuf: An array of floats, of equal shape and dtype on every rank; ``None`` for ``recvbuf``.
            recvbuf: An array of that shape and dtype.
        """
        own = recvbuf if sendbuf is None else sendbuf
        total = self.allreduce(own.astype(np.float32) if is_half(own.dtype) else own)  # may overflow otherwise
        recvbuf[...] = total / self.size

    def _reducer_of(self, model: Model) -> GradientReducer:
        try:
            reducer = self._reducers.get(model)
            if reducer is None:
                reducer = self._reducers[model] = self._make_reducer(self._strategy)
        except TypeError:  # it cannot have weak references, or no hash
            if self._common_reducer is None:
                self._common_reducer = self._make_reducer(self._strategy)
            reducer = self._common_reducer
        return reducer

    def mean_grad_reducer(self, model: Model) -> GradientReducer:
        if self._averages_in_its_own_way:
            return super().mean_grad_reducer(model)
        return self._reducer_of(model)

    @operation
    def gradient_reducer(
        self,
        *,
        background: bool = False,
        comm_hook: CommunicationHook | None = None,
        compression: CompressionScheme | None = None,
        bucket_bytes: int | None = None,
        sets: int = 1,
        own_dtype: bool = False,
        apart: bool = False,
    ) -> GradientReducer:
        from mn_comm.gradients.strategies import STRATEGIES

        if self._averages_in_its_own_way:  # a reducer would not use the method of the derived class
            return super().gradient_reducer()
        with agreement.raise_on_all(self.ranks):
            self._check_compression(compression, comm_hook or self.comm_hook)
            if bucket_bytes is not None and wire.as_index(bucket_bytes, "bucket_bytes") < 0:
                raise ValueError(f"expected bucket_bytes of at least 0, got {bucket_bytes}")
            if wire.as_index(sets, "sets") < 1:
                raise ValueError(f"expected sets of at least 1, got {sets}")
            if background and apart:
                raise ValueError("expected one of background and apart, got both")
        what = "background, own_dtype, apart, use of comm_hook, bucket_bytes and sets"
        flags = (bool(background), bool(own_dtype), bool(apart), comm_hook is not None)
        agreement.expect_same(self.ranks, what, (*flags, bucket_bytes, sets))
        agreement.expect_same(self.ranks, "compression", repr(compression))
        context, worker, strategy = self._contexts.foreground, None, self._strategy
        if apart or background:
            _require_threads()
            context, worker = (self._contexts.another(), None) if apart else self._contexts.background
        if apart or background or compression is not None:
            strategy = STRATEGIES[self.strategy](context, None if compression is None else compression.compressor())
        if apart:
            weakref.finalize(strategy, self._contexts.give_back, context).atexit = False
        return self._make_reducer(
            strategy, own_dtype, worker=worker, comm_hook=comm_hook, bucket_bytes=bucket_bytes, sets=sets
        )

    @property
    def _averages_in_its_own_way(self) -> bool:
        return type(self).multi_node_mean_grad is not Communicator.multi_node_mean_grad

    @operation
    def all_gather_owned(
        self, arrays: Sequence[tuple[str, Any]], owners: Sequence[int], failure: Exception | None = None
    ) -> None:
        if self._owned is None:
            from mn_comm.gradients.owned import OwnedArrays

            self._owned = OwnedArrays(self._strategy)
        self._owned.gather(arrays, owners, failure)

    def _check_compression(self, compression: Any, comm_hook: Any) -> None:
        if compression is None:
            return
        if not hasattr(type(compression), "compressor"):
            raise TypeError(
                "expected Int8(), TopK(), PowerSGD() or OneBit() of mn_compress for compression, got "
                f"{type(compression).__name__}: {compression!r:.80}"
            )
        if comm_hook is not None:
            raise ValueError("expected one of compression and comm_hook, got both")
        if not self._strategy.packs:
            raise ValueError(
                "expected a communicator that packs gradients, to compress them: two_dimensional, hierarchical or "
                f"flat; got {self.strategy}, which sends each by itself"
            )

    def _make_reducer(
        self, strategy: Any, own_dtype: bool = False, comm_hook: CommunicationHook | None = None, **options: Any
    ) -> GradientReducer:
        from mn_comm.gradients.reducer import GradientReducer

        # Read in every step: settings may change later.
        config = self._config_without_dtype if own_dtype else partial(getattr, self, "_config")
        return GradientReducer(strategy, config, comm_hook=comm_hook or self.comm_hook, **options)

    def _config_without_dtype(self) -> Config:
        return self._config.with_value("allreduce_grad_dtype", None)


def _require_threads() -> None:
    if MPI.Query_thread() < MPI.THREAD_MULTIPLE:
        raise RuntimeError(
            "expected MPI to be initialised with MPI_THREAD_MULTIPLE, which averaging in the background needs; "
            f"got thread level {MPI.Query_thread()}"
        )


def mean_one_by_one(self: Communicator, model: Model, zero_fill: bool = False) -> None:
    """Average gradients by the ``_multi_node_mean`` of a derived class, one after the other; collective."""
    selection = agree.select(model, zero_fill)
    names = [name for name, _ in selection.params]
    agree.expect_same_arrays(self.ranks, "multi_node_mean_grad", zip(names, selection.likes, strict=True))
    for (_, param), like, grad in zip(*selection, strict=True):
        if grad is None:
            param.grad = zeros_beside(like, like.shape, like.dtype)
        self._multi_node_mean(None, param.grad)
