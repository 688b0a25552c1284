"""All-gather and reduce-scatter, each the other's adjoint."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import chainer

from mn_comm import CommunicatorBase, raise_on_all
from mn_modelpar.functions.collective import Collective, Outputs, communicate
from mn_modelpar.staging import DeviceName, moved_to
from mn_modelpar.traffic import Record
from mn_modelpar.values import parts_of, total

__all__ = ["AllGather", "ReduceScatter", "allgather", "reduce_scatter"]


class AllGather(Collective):
    """Every rank's array, at every rank."""

    def exchange(self, arrays: Sequence[Any]) -> Sequence[Any]:
        """Give all arrays to all."""
        return self.communicator.allgather(arrays[0])

    def adjoint(self) -> Collective:
        """Return the sum of all ranks' gradients for each rank."""
        return ReduceScatter(self.communicator)


class ReduceScatter(Collective):
    """The sum of all ranks' arrays for a rank, at that rank, added up in the order of ranks."""

    def exchange(self, arrays: Sequence[Any]) -> Sequence[Any]:
        """Give each rank its summands, and add them up there."""
        summands = self.communicator.alltoall(arrays)
        with raise_on_all(self.communicator):  # the shapes may differ on one rank only
            result = total(summands)
        return [result]

    def adjoint(self) -> Collective:
        """Return the all-gather."""
        return AllGather(self.communicator)


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
    return moved_to(device, communicate(AllGather(comm, record=Record("allgather")), [x])[:-1])


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
    function = ReduceScatter(comm, record=Record("reduce_scatter"))
    return communicate(function, parts_of(xs))[0]
