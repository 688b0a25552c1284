"""Broadcast, and its adjoint: the sum at the root."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import chainer

from mn_comm import CommunicatorBase
from mn_modelpar.functions.collective import Collective, communicate
from mn_modelpar.staging import DeviceName, moved_to
from mn_modelpar.traffic import Record
from mn_modelpar.values import total

__all__ = ["Bcast", "Reduce", "bcast"]


class Bcast(Collective):
    """The root's array, at every rank."""

    takes_devices = True

    def exchange(self, arrays: Sequence[Any]) -> Sequence[Any]:
        """Give the root's array to all."""
        return [self.communicator.bcast(arrays[0] if arrays else None, root=self.root)]

    def adjoint(self) -> Collective:
        """Return the sum at the root."""
        return Reduce(self.communicator, self.root)


class Reduce(Collective):
    """The sum over all ranks, at the root, in the order of ranks."""

    def exchange(self, arrays: Sequence[Any]) -> Sequence[Any]:
        """Add up at the root."""
        gathered = self.communicator.gather(arrays[0], self.root)
        return [] if gathered is None else [total(gathered)]

    def adjoint(self) -> Collective:
        """Return the broadcast from the root."""
        return Bcast(self.communicator, self.root)


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
    function = Bcast(comm, root, Record("bcast", f"root={root}"))
    if comm.rank == root:
        outputs = communicate(function, [x])
    else:
        is_array = isinstance(x, (chainer.Variable, chainer.get_array_types()))
        outputs = communicate(function, [], like=x if is_array else None)
    return moved_to(device, outputs)[0]
