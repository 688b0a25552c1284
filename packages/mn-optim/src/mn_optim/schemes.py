"""When gradients are averaged: after the backward pass, during it, or while the next one runs.

All three tell the same gradient reducer what is ready, and wait for it at different times.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import chainer

from mn_comm import CommunicatorBase, Round

__all__ = ["AfterBackward", "Backward", "DoubleBuffered", "Overlapped", "Scheme"]

Backward = Callable[[Callable[[chainer.Variable], None] | None], None]
"""Computes the gradients; what it is given is told of each as it becomes final."""


class Scheme(Protocol):
    """A time to average gradients at."""

    def average(self, model: chainer.Link, backward: Backward | None) -> bool:
        """Compute gradients and average them; collective.

        Args:
            model: The model.
            backward: Computes its gradients; ``None`` if they are there.

        Returns:
            Whether the gradients are averages now, and a step can be taken.
        """
        ...

    def restart(self) -> None:
        """Forget what was under way: the model changed; collective."""
        ...


class AfterBackward:
    """Average after the backward pass.

    Args:
        communicator: The ranks that train together.
        zero_fill: Whether an initialised parameter without a gradient counts as one of zeros.
    """

    def __init__(self, communicator: CommunicatorBase, zero_fill: bool) -> None:
        self._communicator = communicator
        self._zero_fill = zero_fill

    def average(self, model: chainer.Link, backward: Backward | None) -> bool:
        """Compute gradients, then average them; collective."""
        if backward is not None:
            backward(None)
        self._communicator.multi_node_mean_grad(model, self._zero_fill)
        return True

    def restart(self) -> None:
        """Have nothing under way."""


class Overlapped:
    """Average each bucket of gradients as soon as it is final, while the backward pass goes on.

    Buckets travel in the order in which rank 0's gradients became final in the first step, on every rank.

    Args:
        communicator: The ranks that train together.
        bucket_bytes: Of how many bytes a bucket may be, if it holds more than one gradient.
    """

    def __init__(self, communicator: CommunicatorBase, bucket_bytes: int) -> None:
        self._communicator = communicator
        self._reducer = communicator.background_reducer(bucket_bytes=bucket_bytes)
        self._order: list[str] | None = None

    def average(self, model: chainer.Link, backward: Backward | None) -> bool:
        """Compute gradients and average them meanwhile; collective."""
        if self._order is None or backward is None:
            self._learn(model, backward)
            current = self._reducer.start(model, zero_fill=True, order=self._order or ())
        else:
            current = self._reducer.start(model, zero_fill=True, order=self._order)
            self._backward(model, backward, current.ready)
        current.ready_all()
        current.wait()
        return True

    def restart(self) -> None:
        """Learn the order anew in the next step."""
        self._order = None

    def _learn(self, model: chainer.Link, backward: Backward | None) -> None:
        if backward is not None:
            names: list[str] = []
            self._backward(model, backward, names.append)
            self._order = self._communicator.bcast_obj(names if self._communicator.rank == 0 else None)

    @staticmethod
    def _backward(model: chainer.Link, backward: Backward, on_final: Callable[[str], None]) -> None:
        name_of = {id(param): name for name, param in model.namedparams() if param.data is not None}

        def tell(variable: chainer.Variable) -> None:
            name = name_of.get(id(variable))
            if name is not None:
                on_final(name)

        backward(tell)


class DoubleBuffered:
    """Average while the next forward and backward pass run: each step applies the gradients of the one before.

    Args:
        communicator: The ranks that train together.
        zero_fill: Whether an initialised parameter without a gradient counts as one of zeros.
    """

    def __init__(self, communicator: CommunicatorBase, zero_fill: bool) -> None:
        self._zero_fill = zero_fill
        self._reducer = communicator.background_reducer(sets=2)
        self._under_way: Round | None = None

    def average(self, model: chainer.Link, backward: Backward | None) -> bool:
        """Compute gradients, send them on their way, and wait for those of the step before; collective."""
        if backward is not None:
            backward(None)
        current = self._reducer.start(model, self._zero_fill)
        current.ready_all()
        previous, self._under_way = self._under_way, current
        if previous is None:
            return False
        previous.wait()
        return True

    def restart(self) -> None:
        """Let what is under way arrive, and forget it; collective."""
        if self._under_way is not None:
            self._under_way.wait()
            self._under_way = None
