"""The base class of the collective functions."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar

import chainer

from mn_comm import CommunicatorBase
from mn_modelpar.functions.ordered import Ordered
from mn_modelpar.staging import empty_like, to_device_of, to_host
from mn_modelpar.traffic import Record, traffic_of
from mn_modelpar.values import fill, problem_with, require_floats, spec_of

Outputs = tuple[chainer.Variable, ...]


class Collective(Ordered):
    """A collective operation in a graph; a subclass defines the operation on host arrays, and its adjoint.

    In addition to the arrays that are communicated, each rank has one empty input and one empty output. The input makes
    the backward pass run through the function on every rank, even if the rank has no other input; the output represents
    the function on a rank that has no other output.

    Args:
        communicator: The ranks that take part.
        root: The root, if the operation has one.

    Attributes:
        adjoint: The function that computes the gradients of the inputs from those of the outputs.
        record: The record of the call, if the user called the function.
    """

    adjoint: ClassVar[type[Collective]]

    takes_devices = False
    """Whether ``exchange`` also gets arrays on devices, so that a rank without input learns where the root's arrays
    are."""

    def __init__(self, communicator: CommunicatorBase, root: int = 0) -> None:
        super().__init__()
        self.received: Sequence[Any] | None = None
        self.communicator = communicator
        self.root = root
        self.record: Record | None = None

    def exchange(self, arrays: Sequence[Any]) -> Sequence[Any]:
        """Communicate arrays, which are in host memory unless arrays on devices are accepted; collective."""
        raise NotImplementedError

    def forward(self, inputs: tuple[Any, ...]) -> tuple[Any, ...]:
        """Communicate; collective."""
        *arrays, empty = inputs
        self.empty = empty
        received = self.communicate(arrays) if self.received is None else self.received
        self.received = None  # the graph may live longer than these arrays
        self.specs = [spec_of(array) for array in received]
        return (*(to_device_of(empty, array) for array in received), empty_like(empty))

    def communicate(self, arrays: Sequence[Any]) -> Sequence[Any]:
        """Communicate arrays on any device; collective."""
        return self.exchange(arrays if self.takes_devices else [to_host(array) for array in arrays])

    def backward(self, indexes: tuple[int, ...], grad_outputs: tuple[Any, ...]) -> Outputs:
        """Communicate gradients, with zeros for missing ones; collective."""
        del indexes
        if self.record is not None:
            traffic_of(self.communicator).ran(self.record)
        sent = self.inputs[:-1]
        require_floats([*self.specs, *map(spec_of, sent)], str(self.record or type(self).__name__))
        *grads, token = grad_outputs
        filled = fill(grads, self.specs, self.empty)
        adjoint = self.adjoint(self.communicator, self.root)
        return adjoint.apply((*filled, self.empty if token is None else token))  # type: ignore[no-any-return]


def communicate(function: Collective, record: Record, values: Sequence[Any], like: Any = None) -> Outputs:
    """Apply a collective function to a user's arguments; collective.

    Args:
        function: The function.
        record: The user's call.
        values: Variables or arrays, as many as the function takes on this rank.
        like: An array or Variable on the device on which to receive, if ``values`` is empty.

    Returns:
        The outputs, of which the last one is empty.

    Raises:
        TypeError: On some rank they are something else (on every rank).
    """
    problem = problem_with(values)
    if problem:
        _refuse(function, f"{record.operation}: {problem}")
    function.record = record
    if like is not None:
        like = chainer.as_variable(like).array
    elif not values:
        function.received = function.communicate([])
        like = function.received[0]
    return traffic_of(function.communicator).apply(function, values, record, like)


def _refuse(function: Collective, problem: str) -> None:
    """Raise on this rank, and inform the others: they are waiting in the operation already, or will be."""
    try:
        function.exchange([None] * function.communicator.size)
    except Exception as announced:
        raise TypeError(problem) from announced
    raise TypeError(problem)
