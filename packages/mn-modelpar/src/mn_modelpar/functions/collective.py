"""What the collective functions have in common."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from typing import Any

import chainer

from mn_comm import CommunicatorBase
from mn_modelpar.functions.values import fill, problem_with, require_floats, spec_of
from mn_modelpar.staging import empty_like, to_device_of, to_host
from mn_modelpar.traffic import Record, traffic_of

__all__ = ["Collective", "Outputs", "communicate"]

Outputs = tuple[chainer.Variable, ...]


class Collective(chainer.FunctionNode):  # type: ignore[misc]  # Chainer has no types
    """A collective operation in a graph; a subclass says what it does to host arrays, and what its adjoint is.

    Beside the arrays that travel each rank has one empty input and one empty output. The input makes the backward pass
    run through the function on every rank, also where nothing is put in; the output stands for the function where
    nothing comes out.

    Args:
        communicator: The ranks that take part.
        root: The rank that is different from the others, if one is.
        record: The call of the user, if it is one.
    """

    takes_devices = False
    """Whether ``exchange`` is given arrays as they are, so that who has none finds out where the root's were."""

    def __init__(self, communicator: CommunicatorBase, root: int = 0, record: Record | None = None) -> None:
        super().__init__()
        self.received: Sequence[Any] | None = None
        self.communicator = communicator
        self.root = root
        self.record = record

    @abstractmethod
    def exchange(self, arrays: Sequence[Any]) -> Sequence[Any]:
        """Communicate arrays, in host memory unless it takes those on devices; collective."""

    @abstractmethod
    def adjoint(self) -> Collective:
        """Return the function that takes the gradients of the outputs to those of the inputs."""

    def forward(self, inputs: tuple[Any, ...]) -> tuple[Any, ...]:
        """Communicate; collective."""
        *arrays, empty = inputs
        self.empty = empty
        received = self.communicate(arrays) if self.received is None else self.received
        self.received = None  # the graph lives longer than they may
        self.specs = [spec_of(array) for array in received]
        return (*(to_device_of(empty, array) for array in received), empty_like(empty))

    def communicate(self, arrays: Sequence[Any]) -> Sequence[Any]:
        """Communicate arrays from wherever they are; collective."""
        return self.exchange(arrays if self.takes_devices else [to_host(array) for array in arrays])

    def backward(self, indexes: tuple[int, ...], grad_outputs: tuple[Any, ...]) -> Outputs:
        """Communicate gradients, zeros for those that are missing; collective."""
        del indexes
        if self.record is not None:
            traffic_of(self.communicator).ran(self.record)
        sent = self.inputs[:-1]
        require_floats([*self.specs, *map(spec_of, sent)], str(self.record or type(self).__name__))
        *grads, token = grad_outputs
        filled = fill(grads, self.specs, self.empty)
        outputs: Outputs = self.adjoint().apply((*filled, self.empty if token is None else token))
        return outputs


def communicate(function: Collective, values: Sequence[Any], like: Any = None) -> Outputs:
    """Apply a collective function to what a user passed; collective.

    Args:
        function: The function.
        values: Variables or arrays, as many as the function takes on this rank.
        like: An array or Variable that says on which device to receive, where ``values`` is empty.

    Returns:
        The outputs, of which the last one is empty.

    Raises:
        TypeError: On some rank they are something else (on every rank).
    """
    problem = problem_with(values)
    if problem:
        _refuse(function, problem)
    if like is not None:
        like = chainer.as_variable(like).array
    elif not values:
        function.received = function.communicate([])
        like = function.received[0]
    return traffic_of(function.communicator).apply(
        function, values, function.record or Record(type(function).__name__), like
    )


def _refuse(function: Collective, problem: str) -> None:
    """Raise on this rank, and let the others hear of it: they are waiting in the operation already, or will be."""
    operation = function.record.operation if function.record is not None else type(function).__name__
    try:
        function.exchange([None] * function.communicator.size)
    except Exception as announced:
        raise TypeError(f"{operation}: {problem}") from announced
    raise TypeError(f"{operation}: {problem}")
