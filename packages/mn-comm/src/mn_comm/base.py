"""The interface of every communicator."""

from __future__ import annotations

import warnings
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np

from mn_comm.basis.placement import zeros_beside
from mn_comm.basis.protocols import Model

if TYPE_CHECKING:
    from mpi4py import MPI

    from mn_comm.gradients.compression import CompressionScheme
    from mn_comm.gradients.interfaces import CommunicationHook
    from mn_comm.gradients.reducer import GradientReducer

_Array = np.ndarray[Any, Any]

DEFAULT_MAX_BUF_LEN = 256 * 1024 * 1024


class CommunicatorBase(ABC):
    """The methods that every communicator has.

    Methods without a suffix transfer NumPy or CuPy arrays. If an array was on a device at the sender, it is on the
    current device at the receiver. Methods whose names end in ``_obj`` transfer any object that can be pickled, of any
    size. A method is collective unless its description says that it is point-to-point: every rank must call it, in the
    same order. Wrong input on one rank raises an exception on every rank that takes part: a ValueError for a rank, root
    or tag that is out of range, and for a root that differs between ranks; and what pickling an object raises.

    A subclass in a script must define the abstract methods, and those of the properties below that are used. Code that
    takes a communicator uses only these methods, not an MPI communicator that the object may hold, and passes arrays
    and objects by position: their names differ between classes. A subclass that defines ``allreduce_grad(model)``, as
    in ChainerMN 1, gets a ``multi_node_mean_grad`` that calls it.

    Attributes:
        mpi_comm: The mpi4py communicator over the same ranks, if the communicator has one.
    """

    mpi_comm: MPI.Intracomm
    is_elastic: ClassVar[bool] = False
    """Whether it continues without ranks that die."""

    def __init_subclass__(cls, **kwds: Any) -> None:
        super().__init_subclass__(**kwds)
        is_abstract = getattr(cls.multi_node_mean_grad, "__isabstractmethod__", False)
        if is_abstract and cls.allreduce_grad is not CommunicatorBase.allreduce_grad:
            cls.multi_node_mean_grad = mean_as_version_1  # type: ignore[method-assign]

    @property
    def rank(self) -> int:
        """The number of this process among all processes, from 0."""
        raise NotImplementedError(f"{type(self).__name__} does not define rank")

    @property
    def size(self) -> int:
        """How many processes there are."""
        raise NotImplementedError(f"{type(self).__name__} does not define size")

    @property
    def intra_rank(self) -> int:
        """The number of this process among the processes on this host, from 0; also the index of the GPU to use."""
        raise NotImplementedError(f"{type(self).__name__} does not define intra_rank")

    @property
    def intra_size(self) -> int:
        """How many processes run on this host."""
        raise NotImplementedError(f"{type(self).__name__} does not define intra_size")

    @property
    def inter_rank(self) -> int:
        """The number of this host among all hosts, from 0."""
        raise NotImplementedError(f"{type(self).__name__} does not define inter_rank")

    @property
    def inter_size(self) -> int:
        """How many hosts there are."""
        raise NotImplementedError(f"{type(self).__name__} does not define inter_size")

    def set_config(self, name: str, **kwargs: Any) -> None:
        """Change one setting of this communicator, in the same way on every rank.

        Args:
            name: The name of the setting, as in :func:`mn_comm.create_communicator`.
            kwargs: ``value``, its value.

        Raises:
            ValueError: There is no setting with this name, or the value is not allowed.
            TypeError: The value is of the wrong type.

        Example:
            >>> halved = chainermn.create_communicator("flat")
            >>> halved.set_config("allreduce_grad_dtype", "float16")
            >>> halved.get_config("allreduce_grad_dtype")
            dtype('float16')
        """
        raise ValueError(f"expected the name of a setting, but {type(self).__name__} has none; got {name!r}")

    def get_config(self, name: str | None = None) -> Any:
        """Return one setting, or all of them as a dictionary.

        Raises:
            ValueError: There is no setting of that name.

        Example:
            >>> comm.get_config("batched_copy")
            True
        """
        if name is None:
            return dict(self._configs)
        if name not in self._configs:
            raise ValueError(f"expected the name of a setting, one of {', '.join(self._configs)}; got {name!r}")
        return self._configs[name]

    @property
    def within_config_scope(self) -> bool:
        """Whether attributes that are assigned now become settings."""
        return "_within_config_scope" in self.__dict__

    @contextmanager
    def config_scope(self) -> Iterator[None]:
        """Return a context in which assigned attributes become settings, which :meth:`get_config` returns.

        For derived classes with their own settings; :meth:`split` passes them on.
        """
        is_nested = self.within_config_scope
        self.__dict__["_within_config_scope"] = True
        try:
            yield
        finally:
            if not is_nested:
                del self.__dict__["_within_config_scope"]

    def __setattr__(self, name: str, value: Any) -> None:
        if "_within_config_scope" in self.__dict__ and not name.startswith("_"):
            self._configs[name] = value
        super().__setattr__(name, value)

    @property
    def _configs(self) -> dict[str, Any]:
        """The settings that were assigned in :meth:`config_scope`."""
        settings: dict[str, Any] = self.__dict__.setdefault("_settings", {})
        return settings

    @abstractmethod
    def split(self, color: int, key: int) -> CommunicatorBase:
        """Split the ranks into groups, and return the communicator of this rank's group; collective.

        It is of the same class, and has the same settings.

        Args:
            color: Ranks that pass the same number form a group.
            key: Within a group, ranks are numbered in the order of their keys.

        Raises:
            TypeError: On some rank ``color`` or ``key`` is not an integer.
            ValueError: On some rank ``color`` is negative, or one of the two does not fit into 32 bits.

        Example:
            >>> alone = comm.split(color=comm.rank, key=0)
            >>> alone.rank, alone.size
            (0, 1)
        """

    def finalize(self) -> None:  # noqa: B027 - one that holds nothing has nothing to give back
        """Free the communicator's resources; collective. Do not use it afterwards; a second call does nothing.

        This also frees the MPI communicator of a communicator from :meth:`split`, unless another communicator uses it:
        splits into the same groups share one.
        """

    @abstractmethod
    def send(self, data: Any, dest: int, tag: int) -> None:
        """Send arrays to another rank; point-to-point.

        Args:
            data: An array, or a tuple or list of arrays, with any shapes and any dtypes without Python objects.
            dest: The rank to send to, not this one.
            tag: A number; the receiver must pass the same one to :meth:`recv`.

        Raises:
            TypeError: ``data`` is something else; the receiver raises too.

        Example:
            >>> if comm.rank == 0:
            ...     comm.send(np.arange(3), dest=1, tag=0)
            ... else:
            ...     received = comm.recv(source=0, tag=0)
        """

    @abstractmethod
    def recv(self, source: int, tag: int) -> _Array | tuple[_Array, ...]:
        """Receive arrays from another rank; point-to-point.

        Args:
            source: The rank to receive from, or ``MPI.ANY_SOURCE``.
            tag: The number given to :meth:`send`, or ``MPI.ANY_TAG``.

        Returns:
            An array, or a tuple of arrays if a tuple or list was sent, with the shapes and dtypes of the sender.

        Raises:
            RuntimeError: The message was not sent by :meth:`send`.

        Example:
            >>> if comm.rank == 0:
            ...     comm.send((np.zeros(2), np.ones(3)), dest=1, tag=7)
            ... else:
            ...     zeros, ones = comm.recv(source=0, tag=7)
        """

    @abstractmethod
    def bcast(self, data: Any, max_buf_len: int | None = None, root: int = 0) -> _Array:
        """Broadcast an array: return it at the root, elsewhere a new array like it; collective.

        Those that :func:`mn_comm.create_communicator` makes have the arguments ``x`` and ``root``, as before: pass
        ``root`` by its name.

        Args:
            data: At the root an array of any shape and any dtype without Python objects; ignored elsewhere.
            max_buf_len: The maximum number of bytes to pass to MPI at once.
            root: The rank that has the array.

        Raises:
            TypeError: The root passed something else (on every rank).

        Example:
            >>> comm.bcast(np.arange(3) if comm.rank == 0 else None, root=0)
            array([0, 1, 2])
        """

    @abstractmethod
    def gather(self, data: Any, root: int = 0) -> tuple[_Array, ...] | None:
        """Return, at the root, the arrays of all ranks in the order of ranks, elsewhere ``None``; collective.

        Args:
            data: An array of any shape, of the same dtype on every rank.
            root: The rank that receives.

        Raises:
            TypeError: A rank has no array, or another dtype than the others (on every rank).

        Example:
            >>> parts = comm.gather(np.full(2, comm.rank), root=0)
            >>> len(parts) if comm.rank == 0 else parts is None and 2
            2
        """

    @abstractmethod
    def allgather(self, x: Any) -> tuple[_Array, ...]:
        """Return the arrays of all ranks, in the order of ranks; collective.

        Args:
            x: An array of any shape, of the same dtype on every rank.

        Raises:
            TypeError: A rank has no array, or another dtype than the others (on every rank).

        Example:
            >>> comm.allgather(np.array([comm.rank]))
            (array([0]), array([1]))
        """

    @abstractmethod
    def scatter(self, xs: Any, root: int = 0) -> _Array:
        """Return this rank's part, a new array, of the arrays at the root; collective.

        Args:
            xs: At the root a tuple or list of ``size`` arrays of one dtype and any shapes, or one array whose
                first axis has length ``size``; ignored elsewhere.
            root: The rank that has the parts.

        Raises:
            TypeError: ``xs`` at the root contains something other than arrays, or arrays of different dtypes (on every
                rank).
            ValueError: There are not ``size`` parts (on every rank).

        Example:
            >>> parts = [np.array([0]), np.array([10])] if comm.rank == 0 else None
            >>> int(comm.scatter(parts, root=0)[0]) == 10 * comm.rank
            True
        """

    @abstractmethod
    def alltoall(self, xs: Any) -> tuple[_Array, ...]:
        """Send one array to each rank, and return those received, in the order of the senders; collective.

        Args:
            xs: A tuple or list of ``size`` arrays of one dtype and any shapes; the one at position ``i`` is for rank
                ``i``.

        Raises:
            TypeError: A rank passed something other than arrays, or arrays of different dtypes (on every rank).
            ValueError: A rank did not pass ``size`` arrays (on every rank).

        Example:
            >>> first, second = comm.alltoall([np.array([0]), np.array([10])])
            >>> int(first[0]) == int(second[0]) == 10 * comm.rank
            True
        """

    @abstractmethod
    def allreduce(self, data: Any) -> _Array:
        """Return the sum of the arrays of all ranks, a new array of the same shape and dtype; collective.

        Args:
            data: An array of the same shape and dtype on every rank: integers, floats or complex numbers.
                Half precision is added up in float32. Whether integers that grow too large wrap around or saturate
                depends on the MPI library.

        Raises:
            TypeError: A rank passed no array, or one whose dtype cannot be added up (on every rank).
            ValueError: The ranks differ in shape or dtype (on every rank).

        Example:
            >>> comm.allreduce(np.array([1.0, 2.0]))
            array([2., 4.])
        """

    @abstractmethod
    def send_obj(self, obj: Any, dest: int, tag: int) -> None:
        """Send an object to another rank; point-to-point.

        Args:
            obj: Anything that can be pickled, of any size.
            dest: The rank to send to.
            tag: A number by which the receiver can select the message.

        Example:
            >>> if comm.rank == 0:
            ...     comm.send_obj({"classes": 10}, dest=1, tag=0)
            ... else:
            ...     received = comm.recv_obj(source=0, tag=0)
        """

    @abstractmethod
    def recv_obj(self, source: int, tag: int) -> Any:
        """Receive an object from another rank, and return it; point-to-point.

        Those that :func:`mn_comm.create_communicator` makes have an argument ``status`` before ``tag``, as before: pass
        ``tag`` by its name. Without ``tag`` they receive an object with any tag, while :meth:`recv` expects tag 0.

        Args:
            source: The rank to receive from, or ``MPI.ANY_SOURCE``.
            tag: The number given to :meth:`send_obj`, or ``MPI.ANY_TAG``.

        Raises:
            RuntimeError: The message was sent by :meth:`send`.

        Example:
            >>> if comm.rank == 0:
            ...     comm.send_obj("done", dest=1, tag=3)
            ... else:
            ...     assert comm.recv_obj(source=0, tag=3) == "done"
        """

    @abstractmethod
    def bcast_obj(self, obj: Any, max_buf_len: int | None = None, root: int = 0) -> Any:
        """Broadcast an object: return it at the root, elsewhere a copy; collective.

        Args:
            obj: At the root anything that can be pickled, of any size; ignored elsewhere.
            max_buf_len: The maximum number of bytes to pass to MPI at once; ``None`` for the default.
            root: The rank that has the object.

        Raises:
            ValueError: ``max_buf_len`` is below 1 (on every rank).

        Example:
            >>> comm.bcast_obj({"classes": 10} if comm.rank == 0 else None, root=0)
            {'classes': 10}
        """

    @abstractmethod
    def gather_obj(self, obj: Any, root: int = 0) -> list[Any] | None:
        """Return, at the root, the objects of all ranks in the order of ranks, elsewhere ``None``; collective.

        Example:
            >>> names = comm.gather_obj(f"rank {comm.rank}", root=0)
            >>> names == (["rank 0", "rank 1"] if comm.rank == 0 else None)
            True
        """

    @abstractmethod
    def allreduce_obj(self, obj: Any) -> Any:
        """Return the sum of the objects of all ranks, computed with ``+`` and equal on every rank; collective.

        The objects are added up along a binomial tree, neighbors first, so no rank ever holds the objects of all ranks.

        Args:
            obj: Anything that can be pickled and added.

        Raises:
            Exception: What adding raised.

        Example:
            >>> comm.allreduce_obj(comm.rank + 1)
            3
        """

    @abstractmethod
    def bcast_data(self, model: Model) -> None:
        """Overwrite the parameters of the model on every rank with those of rank 0; collective.

        Args:
            model: The model; uninitialised parameters stay uninitialised.

        Raises:
            ValueError: The ranks' models differ in names, shapes or dtypes (on every rank).

        Example:
            >>> model = L.Linear(3, 2)
            >>> comm.bcast_data(model)
            >>> bool((model.W.array == comm.bcast(model.W.array)).all())
            True
        """

    @abstractmethod
    def multi_node_mean_grad(self, model: Model, zero_fill: bool = False) -> None:
        """Replace every gradient of the model by its mean over all ranks; collective.

        It happens in place: ``param.grad`` stays the same array, and contains the mean afterwards. Only a gradient that
        is missing, is read-only, or shares memory with another gradient gets a new array.

        Args:
            model: The model, after its backward pass.
            zero_fill: Whether the missing gradient of an initialised parameter counts as zeros. Otherwise it is
                skipped, and must be missing on every rank.

        Raises:
            ValueError: The ranks' gradients differ in names, shapes or dtypes (on every rank).

        Example:
            >>> model = L.Linear(1, 1)
            >>> model.cleargrads()
            >>> model.W.grad = np.full((1, 1), comm.rank, np.float32)
            >>> comm.multi_node_mean_grad(model)
            >>> model.W.grad
            array([[0.5]], dtype=float32)
        """

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
        """Return an object that averages the gradients of one model, and need not be closed; collective.

        Args:
            background: Whether gradients are averaged by another thread, or on a stream, while this thread computes.
            comm_hook: Starts to average a bucket, maybe less exactly with fewer bytes; ``None`` to average exactly.
            compression: How gradients are compressed between nodes, an object from :mod:`mn_compress`; ``None``
                to send them uncompressed.
            bucket_bytes: The maximum size of a bucket that holds more than one gradient, in bytes; ``None`` for a
                suitable default.
            sets: How many backward passes may be averaged in the background at the same time.
            own_dtype: Whether arrays are sent in their own dtypes, whatever ``allreduce_grad_dtype`` says: for values
                other than gradients, which must not be rounded.
            apart: Whether the reducer has its own MPI communicators, so that a thread of the caller may call its
                ``average`` while other threads communicate.

        Raises:
            RuntimeError: ``background`` or ``apart`` is true, and MPI was initialised without ``MPI_THREAD_MULTIPLE``.
            NotImplementedError: This kind of communicator cannot do it.
            TypeError: ``compression`` is not a compression (on every rank).
            ValueError: The ranks pass different arguments; or compression is requested together with a hook, or with
                ``naive`` (on every rank).
        """
        raise NotImplementedError(f"{type(self).__name__} cannot average gradients in the background or by a hook")

    def all_gather_owned(
        self, arrays: Sequence[tuple[str, Any]], owners: Sequence[int], failure: Exception | None = None
    ) -> None:
        """Overwrite arrays, in place, with those of the rank that owns them; collective.

        Args:
            arrays: Names and arrays, of NumPy or CuPy, of any memory layout, of the same names, shapes and dtypes on
                every rank.
            owners: For each the rank that owns it.
            failure: An exception that occurred on this rank before. The arrays are still gathered; then every rank
                raises.

        Raises:
            TypeError: Something is no array, or its dtype holds Python objects, on some rank (on every rank).
            ValueError: The ranks' arrays or owners differ, or there is no such owner (on every rank); then nothing was
                gathered. Or an array is read-only on some rank (on every rank).
            Exception: ``failure``, and on the other ranks one of the same built-in type.
            NotImplementedError: This kind of communicator cannot do it.
        """
        raise NotImplementedError(f"{type(self).__name__} cannot gather arrays that some ranks own")

    def mean_grad_reducer(self, model: Model) -> GradientReducer:
        """Return the reducer that :meth:`multi_node_mean_grad` uses for a model; not collective.

        Raises:
            NotImplementedError: This kind of communicator averages in a different way.
        """
        raise NotImplementedError(f"{type(self).__name__} averages gradients in its own way")

    def broadcast_data(self, model: Model) -> None:
        """Call :meth:`bcast_data`; this is its old name."""
        self.bcast_data(model)

    def allreduce_grad(self, model: Model, zero_fill: bool = False) -> None:
        """Call :meth:`multi_node_mean_grad`; this is its old, deprecated name."""
        warnings.warn("allreduce_grad is the old name of multi_node_mean_grad", DeprecationWarning, stacklevel=2)
        self.multi_node_mean_grad(model, zero_fill)

    def allgather_obj(self, obj: Any) -> list[Any]:
        """Return the objects of all ranks, in the order of ranks; collective.

        Example:
            >>> comm.allgather_obj(comm.rank)
            [0, 1]
        """
        return self.bcast_obj(self.gather_obj(obj))  # type: ignore[no-any-return]

    def scatter_obj(self, objs: Any, root: int = 0) -> Any:
        """Return this rank's object from a sequence at the root; collective.

        Args:
            objs: At the root ``size`` objects that can be pickled, of any size; ignored elsewhere.
            root: The rank that has them.

        Raises:
            ValueError: There are not ``size`` objects (on every rank).

        Example:
            >>> comm.scatter_obj(["first", "second"] if comm.rank == 0 else None) == ["first", "second"][comm.rank]
            True
        """
        return self.bcast_obj(objs, root=root)[self.rank]


def mean_as_version_1(self: CommunicatorBase, model: Model, zero_fill: bool = False) -> None:
    """Do what ``multi_node_mean_grad`` does, with the ``allreduce_grad(model)`` of a class written for ChainerMN 1."""
    for _, param in model.namedparams():
        if zero_fill and param.data is not None and param.grad is None:
            param.grad = zeros_beside(param.data, param.data.shape, param.data.dtype)
    self.allreduce_grad(model)
