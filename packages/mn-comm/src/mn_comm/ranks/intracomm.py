"""The ranks of one MPI communicator, and the one place where this package waits for them."""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, NoReturn, SupportsIndex, cast

import numpy as np
from mpi4py import MPI

from mn_comm.ranks.watch import activity

if TYPE_CHECKING:
    from mn_comm.ranks.topology import Topology

# Shorter pauses make more progress on a slow network; longer pauses leave more of the core to the computation.
_PAUSE_SECONDS = 50e-6
_WITH_NONBLOCKING_FORM = (
    *("Barrier", "Bcast", "Allgather", "Allgatherv", "Alltoallv", "Reduce", "Reduce_scatter", "Reduce_scatter_block"),
    *("Allreduce", "Send", "Recv"),
)
# Not `allreduce`, for which mpi4py has a communicator of its own, which would not be revoked when a rank is lost.
_BLOCKING_ONLY = (
    *("Mprobe", "Dup", "Split", "Free"),
    *("bcast", "gather", "allgather", "scatter", "alltoall", "send", "recv"),
)
_NONBLOCKING = ("Isend", "Irecv", "Iallreduce", "isend")

_forgotten: list[Any] = []


class _Request(MPI.Request):
    """A nonblocking operation, which is kept if nobody waits for its end any more: MPI may still be using its memory.

    A signal handler may raise in the function that waits, or before it waits.
    """

    arguments: Any  # mpi4py's own requests of reductions do not keep them

    def __del__(self, keep: Callable[[Any], None] = _forgotten.append) -> None:
        if self:  # it is not done
            keep(self)


class Ranks(MPI.Intracomm):
    """An MPI communicator whose operations are watched while they wait.

    Blocking operations wait in the fastest way, by spinning. In a background thread, they leave the core to the
    computation, and only poll from time to time. ``Ranks(mpi_comm)`` is the same communicator as ``mpi_comm``.
    """

    on_devices: Any = None
    """What NCCL can do among these ranks; see :mod:`mn_comm.device.nccl_ranks`."""

    def __reduce_ex__(self, protocol: SupportsIndex) -> NoReturn:
        raise TypeError(
            "expected no communicator in an object that is pickled or deep-copied: its processes belong to this job; "
            "pickle or copy the model, and save an optimizer by chainer.serializers"
        )

    def wait_for(self, call: Callable[..., Any], *args: Any) -> Any:
        """Call a function that waits for these ranks by other means than the methods below, and return its result."""
        return activity().wait_for(call, getattr(call, "__name__", "wait"), self, args)

    def duplicate(self) -> Ranks:
        """Return a communicator of the same ranks; collective."""
        return Ranks(self.Dup())

    def split(self, color: int, key: int) -> Ranks:
        """Split the ranks into groups of equal color, ordered by key; collective."""
        return Ranks(cast(MPI.Intracomm, self.Split(color, key)))

    def by_node(self, topology: Topology) -> tuple[Ranks, Ranks]:
        """Return the ranks of this node, and those of the same ``intra_rank`` on all nodes; collective."""
        within = self.split(topology.inter_rank, topology.intra_rank)
        return within, self.split(topology.intra_rank, topology.inter_rank)

    def wait(self, request: MPI.Request, what: str) -> None:
        """Wait for the end of a nonblocking operation among these ranks, ``what``."""
        doing = activity()
        doing.wait_for(_poll if doing.polls else MPI.Request.Wait, what, self, (request,))

    def wait_with_pauses(self, request: MPI.Request, what: str) -> None:
        """Wait for a slow network with pauses, and leave the core to ranks that still have work to do."""
        activity().wait_for(_poll, what, self, (request,))

    def wait_all(self, requests: Sequence[MPI.Request]) -> None:
        """Wait for the end of several nonblocking operations among these ranks."""
        activity().wait_for(MPI.Request.Waitall, "Waitall", self, (requests,))

    def allreduce_blocking(self, array: Any) -> None:
        """Overwrite an array with its sum over all ranks, in a blocking call in any thread; collective."""
        activity().wait_for(MPI.Intracomm.Allreduce, "Allreduce", self, (self, MPI.IN_PLACE, array, MPI.SUM))

    def any(self, flag: bool) -> bool:
        """Return whether a flag is set on any rank; collective."""
        found = np.array([flag], np.int32)
        self.Allreduce(MPI.IN_PLACE, found, MPI.MAX)
        return bool(found[0])

    def differ(self, number: int) -> bool:
        """Return whether a number of at most 62 bits is not the same on all ranks; collective."""
        extremes = np.array([number, -number], np.int64)
        self.Allreduce(MPI.IN_PLACE, extremes, MPI.MAX)
        return bool(extremes[0] != -extremes[1])


def _poll(request: MPI.Request) -> None:
    while not request.Test():
        time.sleep(_PAUSE_SECONDS)


def _watched(name: str) -> Callable[..., Any]:
    """Return a blocking method of MPI that is watched."""
    method = getattr(MPI.Intracomm, name)

    def call(self: Ranks, *args: Any, **kwargs: Any) -> Any:
        return activity().wait_for(method, name, self, (self, *args), kwargs)

    return _described(call, name)


def _polled(name: str) -> Callable[..., Any]:
    """Return a watched method that uses its nonblocking form if the thread polls."""
    blocking, nonblocking = getattr(MPI.Intracomm, name), getattr(MPI.Intracomm, f"I{name.lower()}")

    def call(self: Ranks, *args: Any, **kwargs: Any) -> Any:
        doing = activity()
        if doing.polls:
            return self.wait(nonblocking(self, *args, **kwargs), name)
        return doing.wait_for(blocking, name, self, (self, *args), kwargs)

    return _described(call, name)


def _started(name: str) -> Callable[..., Any]:
    """Return a nonblocking method of MPI whose request is a :class:`_Request`."""
    method = getattr(MPI.Intracomm, name)

    def call(self: Ranks, *args: Any, **kwargs: Any) -> MPI.Request:
        start = functools.partial(method, self, *args, **kwargs)
        try:
            # Not two calls from here, between which a signal handler could raise.
            request = next(map(_Request, iter(start, None)))
            request.arguments = args, kwargs
        except BaseException:
            _forgotten.append((args, kwargs))
            raise
        return request

    return _described(call, name)


def _described(method: Callable[..., Any], name: str) -> Callable[..., Any]:
    method.__name__ = name
    method.__doc__ = f"Do what ``{name}`` of an mpi4py communicator does."
    return method


for _name in _BLOCKING_ONLY:
    setattr(Ranks, _name, _watched(_name))
for _name in _WITH_NONBLOCKING_FORM:
    setattr(Ranks, _name, _polled(_name))
for _name in _NONBLOCKING:
    setattr(Ranks, _name, _started(_name))
