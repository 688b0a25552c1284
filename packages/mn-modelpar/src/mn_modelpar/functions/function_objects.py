"""The function objects of which the old ChainerMN was built; in new code, call the functions instead.

Create one with the communicator, ranks and tag, and call it with the values. They are plain callables, not subclasses
of ``chainer.Function``.
"""

from __future__ import annotations

from typing import Any

import chainer

from mn_comm import CommunicatorBase
from mn_modelpar import functions


class _BetweenTwo:
    def __init__(self, comm: CommunicatorBase, peer_rank: int, peer_tag: int) -> None:
        self.comm = comm
        self.peer_rank = peer_rank
        self.peer_tag = peer_tag

    @property
    def label(self) -> str:
        """The name in a drawing of the graph."""
        return f"{type(self).__name__} (peer_rank: {self.peer_rank})"


class Send(_BetweenTwo):
    """See :func:`mn_modelpar.functions.send`."""

    def __call__(self, *inputs: Any) -> chainer.Variable:
        """Send the inputs, except for an empty last one, which only kept the old class in the graph."""
        values = inputs[:-1] if len(inputs) > 1 and chainer.as_variable(inputs[-1]).size == 0 else inputs
        return functions.send(values[0] if len(values) == 1 else values, self.comm, self.peer_rank, self.peer_tag)


class Recv(_BetweenTwo):
    """See :func:`mn_modelpar.functions.recv`."""

    def __call__(self, delegate_variable: chainer.Variable | None = None) -> Any:
        """Receive a Variable, or a tuple of several."""
        return functions.recv(self.comm, self.peer_rank, delegate_variable, self.peer_tag)


class _AmongAll:
    def __init__(self, comm: CommunicatorBase) -> None:
        self.comm = comm


class AllGather(_AmongAll):
    """See :func:`mn_modelpar.functions.allgather`."""

    def __call__(self, x: Any) -> tuple[chainer.Variable, ...]:
        """Gather at every rank; collective."""
        return functions.allgather(self.comm, x)


class AllToAll(_AmongAll):
    """See :func:`mn_modelpar.functions.alltoall`."""

    def __call__(self, *xs: Any) -> tuple[chainer.Variable, ...]:
        """Send one input to each rank; collective."""
        return functions.alltoall(self.comm, xs)


class _WithRoot:
    def __init__(self, comm: CommunicatorBase, root: int) -> None:
        self.comm = comm
        self.root = root


class Bcast(_WithRoot):
    """See :func:`mn_modelpar.functions.bcast`."""

    def __call__(self, x: Any = None) -> chainer.Variable:
        """Broadcast the root's input; collective."""
        return functions.bcast(self.comm, x, self.root)


class Gather(_WithRoot):
    """See :func:`mn_modelpar.functions.gather`."""

    def __call__(self, x: Any) -> Any:
        """Gather at the root; collective."""
        return functions.gather(self.comm, x, self.root)


class Scatter(_WithRoot):
    """See :func:`mn_modelpar.functions.scatter`."""

    def __call__(self, *xs: Any) -> chainer.Variable:
        """Give each rank its part of the root's inputs; collective."""
        return functions.scatter(self.comm, xs, self.root)
