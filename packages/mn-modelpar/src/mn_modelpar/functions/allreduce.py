"""All-reduce, which is its own adjoint."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import chainer

from mn_comm import CommunicatorBase
from mn_modelpar.functions.collective import Collective, communicate
from mn_modelpar.traffic import Record

__all__ = ["AllReduce", "allreduce"]


class AllReduce(Collective):
    """The sum over all ranks, at every rank."""

    def exchange(self, arrays: Sequence[Any]) -> Sequence[Any]:
        """Add up over all ranks."""
        return [self.communicator.allreduce(arrays[0])]

    def adjoint(self) -> Collective:
        """Return the same sum, of gradients: every rank's output depends on every rank's input."""
        return AllReduce(self.communicator)


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
    return communicate(AllReduce(comm, record=Record("allreduce")), [x])[0]
