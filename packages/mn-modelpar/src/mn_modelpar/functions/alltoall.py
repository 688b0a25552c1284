"""All-to-all, which is its own adjoint."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from mn_comm import CommunicatorBase
from mn_modelpar.functions.collective import Collective, Outputs, communicate
from mn_modelpar.staging import DeviceName, moved_to
from mn_modelpar.traffic import Record
from mn_modelpar.values import parts_of

__all__ = ["AllToAll", "alltoall"]


class AllToAll(Collective):
    """From each rank one array to each rank."""

    def exchange(self, arrays: Sequence[Any]) -> Sequence[Any]:
        """Exchange one array with each rank."""
        return self.communicator.alltoall(arrays)

    def adjoint(self) -> Collective:
        """Return the same exchange: what came from a rank goes back to it."""
        return AllToAll(self.communicator)


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
    values = parts_of(xs)
    return moved_to(device, communicate(AllToAll(comm, record=Record("alltoall")), values)[:-1])
