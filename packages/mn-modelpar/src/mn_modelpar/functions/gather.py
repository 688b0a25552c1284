"""Gather and scatter, each the other's adjoint."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import chainer

from mn_comm import CommunicatorBase
from mn_modelpar.functions.collective import Collective, Outputs, communicate
from mn_modelpar.staging import DeviceName, moved_to
from mn_modelpar.traffic import Record
from mn_modelpar.values import parts_of

__all__ = ["Gather", "Scatter", "gather", "scatter"]


class Gather(Collective):
    """Every rank's array, at the root."""

    def exchange(self, arrays: Sequence[Any]) -> Sequence[Any]:
        """Give all arrays to the root."""
        return self.communicator.gather(arrays[0], self.root) or ()

    def adjoint(self) -> Collective:
        """Return the scatter from the root."""
        return Scatter(self.communicator, self.root)


class Scatter(Collective):
    """Each rank's part of the root's arrays, at that rank."""

    takes_devices = True

    def exchange(self, arrays: Sequence[Any]) -> Sequence[Any]:
        """Give each rank its array."""
        return [self.communicator.scatter(arrays, self.root)]

    def adjoint(self) -> Collective:
        """Return the gather at the root."""
        return Gather(self.communicator, self.root)


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
    outputs = communicate(Gather(comm, root, Record("gather", f"root={root}")), [x])
    return moved_to(device, outputs[:-1]) if comm.rank == root else outputs[-1]


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
    function = Scatter(comm, root, Record("scatter", f"root={root}"))
    values = [] if comm.rank != root else parts_of(xs)
    return moved_to(device, communicate(function, values))[0]
