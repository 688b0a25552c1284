"""The collective functions: all-gather, all-reduce, all-to-all, broadcast, gather, reduce-scatter and scatter."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import chainer

from mn_comm import CommunicatorBase, raise_on_all
from mn_modelpar.functions.base import Collective, Outputs, communicate
from mn_modelpar.staging import DeviceName, moved_to
from mn_modelpar.traffic import Record
from mn_modelpar.values import is_array, parts_of, total


class AllGather(Collective):
    """Every rank's array, at every rank."""

    def exchange(self, arrays: Sequence[Any]) -> Sequence[Any]:
        """Give all arrays to all."""
        return self.communicator.allgather(arrays[0])


class ReduceScatter(Collective):
    """The sum of all ranks' arrays for a rank, at that rank, added up in the order of ranks."""

    def exchange(self, arrays: Sequence[Any]) -> Sequence[Any]:
        """Give each rank its summands, and add them up there."""
        summands = self.communicator.alltoall(arrays)
        with raise_on_all(self.communicator):  # the shapes may differ on one rank only
            result = total(summands)
        return [result]


class AllReduce(Collective):
    """The sum over all ranks, at every rank; the adjoint too, as every output depends on every rank's input."""

    def exchange(self, arrays: Sequence[Any]) -> Sequence[Any]:
        """Add up over all ranks."""
        return [self.communicator.allreduce(arrays[0])]


class AllToAll(Collective):
    """From each rank one array to each rank; in the adjoint, what came from a rank goes back to it."""

    def exchange(self, arrays: Sequence[Any]) -> Sequence[Any]:
        """Exchange one array with each rank."""
        return self.communicator.alltoall(arrays)


class Bcast(Collective):
    """The root's array, at every rank."""

    takes_devices = True

    def exchange(self, arrays: Sequence[Any]) -> Sequence[Any]:
        """Give the root's array to all."""
        return [self.communicator.bcast(arrays[0] if arrays else None, root=self.root)]


class Reduce(Collective):
    """The sum over all ranks, at the root, in the order of ranks."""

    def exchange(self, arrays: Sequence[Any]) -> Sequence[Any]:
        """Add up at the root."""
        gathered = self.communicator.gather(arrays[0], self.root)
        return [] if gathered is None else [total(gathered)]


class Gather(Collective):
    """Every rank's array, at the root."""

    def exchange(self, arrays: Sequence[Any]) -> Sequence[Any]:
        """Give all arrays to the root."""
        return self.communicator.gather(arrays[0], self.root) or ()


class Scatter(Collective):
    """Each rank's part of the root's arrays, at that rank."""

    takes_devices = True

    def exchange(self, arrays: Sequence[Any]) -> Sequence[Any]:
        """Give each rank its array."""
        return [self.communicator.scatter(arrays, self.root)]


for _one, _other in [
    (AllGather, ReduceScatter),
    (AllReduce, AllReduce),
    (AllToAll, AllToAll),
    (Bcast, Reduce),
    (Gather, Scatter),
]:
    _one.adjoint, _other.adjoint = _other, _one


def allgather(comm: CommunicatorBase, x: Any, device: DeviceName = None) -> Outputs:
    """Gather Variables on every rank; collective.

    In the backward pass, each rank's gradient is the sum of its gradients on all ranks, as in :func:`reduce_scatter`.

    Args:
        comm: The ranks that take part.
        x: A Variable or array of any shape, of one dtype on all ranks.
        device: The device of the result: the number of a GPU, or any name of a device that Chainer knows. By default,
            and with -1, the default of ChainerMN 1, nothing is moved.

    Returns:
        A tuple of Variables in the order of ranks.

    Raises:
        TypeError: On some rank, ``x`` is something else, or has a different dtype (on every rank).

    Example:
        >>> parts = chainermn.functions.allgather(comm, np.full(2, comm.rank, np.float32))
        >>> [float(part.array[0]) for part in parts]
        [0.0, 1.0]
    """
    return moved_to(device, communicate(AllGather(comm), Record("allgather"), [x])[:-1])


def allreduce(comm: CommunicatorBase, x: Any) -> chainer.Variable:
    """Add up Variables of all ranks; collective.

    In the backward pass each rank's gradient is the sum of the gradients of all ranks.

    Args:
        comm: The ranks that take part.
        x: A Variable or array of numbers, of one shape and dtype on all ranks.

    Returns:
        The sum, of the same shape and dtype; half precision is added up in float32.

    Raises:
        TypeError: On some rank ``x`` is something else (on every rank).
        ValueError: The ranks differ in shape or dtype (on every rank).

    Example:
        >>> chainermn.functions.allreduce(comm, np.ones(2, np.float32)).array
        array([2., 2.], dtype=float32)
    """
    return communicate(AllReduce(comm), Record("allreduce"), [x])[0]


def alltoall(comm: CommunicatorBase, xs: Any, device: DeviceName = None) -> Outputs:
    """Send one Variable to each rank and receive one from each; collective.

    In the backward pass each gradient goes back to the rank that its Variable came from.

    Args:
        comm: The ranks that take part.
        xs: A tuple or list of ``comm.size`` Variables or arrays of one dtype and any shapes, or a single one whose
            first axis has this length and is split: the one at position ``i`` is for rank ``i``.
        device: The device of the result: the number of a GPU, or any name of a device that Chainer knows. By default,
            and with -1, the default of ChainerMN 1, nothing is moved.

    Returns:
        A tuple of Variables in the order of the ranks they came from.

    Raises:
        TypeError: On some rank ``xs`` is something else (on every rank).
        ValueError: On some rank, ``xs`` does not have length ``comm.size`` (on every rank).

    Example:
        >>> parts = [np.zeros(2, np.float32), np.ones(2, np.float32)]
        >>> [float(part.array[0]) for part in chainermn.functions.alltoall(comm, parts)] == [comm.rank] * 2
        True
    """
    return moved_to(device, communicate(AllToAll(comm), Record("alltoall"), parts_of(xs))[:-1])


def bcast(comm: CommunicatorBase, x: Any, root: int = 0, device: DeviceName = None) -> chainer.Variable:
    """Broadcast a Variable; collective.

    In the backward pass the gradient at the root is the sum of the gradients of all ranks.

    Args:
        comm: The ranks that take part.
        x: At the root a Variable or array of any shape and dtype. Elsewhere ``None`` or anything else; its value is
            ignored, but if it is a Variable or array, the result will be on its device. Otherwise the result is on the
            current GPU if the root's Variable is on a GPU.
        root: The rank that has the Variable.
        device: The device of the result: the number of a GPU, or any name of a device that Chainer knows. By default,
            and with -1, the default of ChainerMN 1, nothing is moved.

    Returns:
        A Variable like the root's.

    Raises:
        TypeError: ``x`` at the root is something else (on every rank).
        ValueError: ``root`` is out of range.

    Example:
        >>> x = chainer.Variable(np.arange(3, dtype=np.float32)) if comm.rank == 0 else None
        >>> chainermn.functions.bcast(comm, x, root=0).array
        array([0., 1., 2.], dtype=float32)
    """
    record = Record("bcast", f"root={root}")
    outputs = communicate(Bcast(comm, root), record, [x] if comm.rank == root else [], like=x if is_array(x) else None)
    return moved_to(device, outputs)[0]


def gather(comm: CommunicatorBase, x: Any, root: int = 0, device: DeviceName = None) -> chainer.Variable | Outputs:
    """Gather Variables on one rank; collective.

    In the backward pass, each rank's gradient is its part of the root's gradients.

    Args:
        comm: The ranks that take part.
        x: A Variable or array of any shape, of one dtype on all ranks.
        root: The rank that receives.
        device: The device of the result: the number of a GPU, or any name of a device that Chainer knows. By default,
            and with -1, the default of ChainerMN 1, nothing is moved.

    Returns:
        At the root a tuple of Variables in the order of ranks. Elsewhere an empty Variable, the delegate, from which
        the backward pass must reach this function.

    Raises:
        TypeError: On some rank ``x`` is something else, or of another dtype (on every rank).
        ValueError: ``root`` is out of range.

    Example:
        >>> parts = chainermn.functions.gather(comm, np.full(2, comm.rank, np.float32), root=0)
        >>> len(parts) if comm.rank == 0 else 2
        2
    """
    outputs = communicate(Gather(comm, root), Record("gather", f"root={root}"), [x])
    return moved_to(device, outputs[:-1]) if comm.rank == root else outputs[-1]


def reduce_scatter(comm: CommunicatorBase, xs: Any) -> chainer.Variable:
    """Add up the Variables that all ranks have for a rank, and give that rank the sum; collective.

    In the backward pass the gradients of all ranks are gathered on every rank, as in :func:`allgather`.

    Args:
        comm: The ranks that take part.
        xs: A tuple or list of ``comm.size`` Variables or arrays of one dtype, or a single one whose first axis has this
            length and is split: the one at position ``i`` is a summand for rank ``i``, and has the same shape on all
            ranks.

    Returns:
        The sum over all ranks of their summands for this rank; half precision is added up in float32.

    Raises:
        TypeError: On some rank ``xs`` is something else (on every rank).
        ValueError: On some rank, ``xs`` does not have length ``comm.size``, or the summands' shapes differ (on every
            rank).

    Example:
        >>> parts = [np.ones(2, np.float32), np.ones(2, np.float32)]
        >>> chainermn.functions.reduce_scatter(comm, parts).array
        array([2., 2.], dtype=float32)
    """
    return communicate(ReduceScatter(comm), Record("reduce_scatter"), parts_of(xs))[0]


def scatter(comm: CommunicatorBase, xs: Any, root: int = 0, device: DeviceName = None) -> chainer.Variable:
    """Give each rank its part of the root's Variables; collective.

    In the backward pass the gradients of all ranks are gathered at the root.

    Args:
        comm: The ranks that take part.
        xs: At the root a tuple or list of ``comm.size`` Variables or arrays of one dtype and any shapes, or a single
            one whose first axis has this length and is split; ignored elsewhere.
        root: The rank that has the Variables.
        device: The device of the result: the number of a GPU, or any name of a device that Chainer knows. By default,
            and with -1, the default of ChainerMN 1, nothing is moved.

    Returns:
        This rank's Variable, on the current GPU if the root's Variables are on a GPU.

    Raises:
        TypeError: ``xs`` at the root is something else (on every rank).
        ValueError: ``xs`` does not have length ``comm.size`` (on every rank), or ``root`` is out of range.

    Example:
        >>> parts = [np.zeros(2, np.float32), np.ones(2, np.float32)] if comm.rank == 0 else None
        >>> bool((chainermn.functions.scatter(comm, parts, root=0).array == comm.rank).all())
        True
    """
    values = parts_of(xs) if comm.rank == root else []
    return moved_to(device, communicate(Scatter(comm, root), Record("scatter", f"root={root}"), values))[0]
