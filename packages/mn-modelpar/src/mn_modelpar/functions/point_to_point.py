"""Send and receive, each the other's adjoint."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any

import chainer
import numpy as np

from mn_comm import CommunicatorBase
from mn_modelpar.functions.pseudo_connect import connect
from mn_modelpar.functions.values import Spec, fill, problem_with, require_floats, spec_of
from mn_modelpar.staging import DeviceName, empty_like, moved_to, to_device_of, to_host
from mn_modelpar.traffic import MessageRecord, gradient_tag, traffic_of

__all__ = ["recv", "send"]

Arrays = Sequence[Any]


class Message(ABC):
    """How arrays travel between this rank and a peer, and how their gradients do."""

    def __init__(self, communicator: CommunicatorBase, record: MessageRecord) -> None:
        self.communicator = communicator
        self.record = record

    @abstractmethod
    def push(self, arrays: Arrays) -> None:
        """Send host arrays to the peer."""

    @abstractmethod
    def pull(self) -> Arrays:
        """Receive host arrays from the peer."""

    @abstractmethod
    def reply(self, specs: Sequence[Spec]) -> Message:
        """Return how the gradients of arrays of these shapes and dtypes travel."""

    @abstractmethod
    def about_to_reply(self) -> None:
        """Note that the backward has begun."""


class Value(Message):
    """Values, in the forward pass: the arrays and nothing else, as ``communicator.send`` would send them."""

    def push(self, arrays: Arrays) -> None:
        """Send the values."""
        record = self.record
        self.communicator.send(arrays[0] if len(arrays) == 1 else tuple(arrays), record.peer, record.tag)
        record.number = traffic_of(self.communicator).number("send", record.peer, record.tag)

    def pull(self) -> Arrays:
        """Receive the values."""
        record = self.record
        received = self.communicator.recv(record.peer, record.tag)
        record.number = traffic_of(self.communicator).number("recv", record.peer, record.tag)
        if isinstance(received, tuple) and not received:
            raise ValueError(f"{record}: expected at least one array from rank {record.peer}, got none")
        return received if isinstance(received, tuple) else (received,)

    def reply(self, specs: Sequence[Spec]) -> Message:
        """Return the message that carries the gradients back."""
        require_floats(specs, str(self.record))
        return Gradient(self.communicator, self.record, specs)

    def about_to_reply(self) -> None:
        """Note that nobody has forgotten this one."""
        traffic_of(self.communicator).ran(self.record)


class Gradient(Message):
    """Gradients, in the backward pass: under a tag of their own, and with the number of their value."""

    def __init__(self, communicator: CommunicatorBase, record: MessageRecord, specs: Sequence[Spec]) -> None:
        super().__init__(communicator, record)
        self.specs = list(specs)

    def push(self, arrays: Arrays) -> None:
        """Send the gradients."""
        record = self.record
        numbered = (*arrays, np.array(record.number))
        self.communicator.send(numbered, record.peer, gradient_tag(record.tag))

    def pull(self) -> Arrays:
        """Receive the gradients."""
        arrays = traffic_of(self.communicator).take_gradient(self.communicator, self.record)
        specs = [spec_of(array) for array in arrays]
        if specs != self.specs:
            raise RuntimeError(
                f"the gradient of {self.record}: expected {_describe(self.specs)}, got {_describe(specs)} from rank "
                f"{self.record.peer}, where another recv() took its value"
            )
        return arrays

    def reply(self, specs: Sequence[Spec]) -> Message:
        """Return the message that carries the gradients of these gradients, in a second backward pass."""
        require_floats(specs, str(self.record))
        return Value(self.communicator, MessageRecord(self.record.operation, self.record.peer, self.record.tag))

    def about_to_reply(self) -> None:
        """Do nothing: nobody expects a second backward pass."""


class Send(chainer.FunctionNode):  # type: ignore[misc]  # Chainer has no types
    """Arrays and something empty go in, something empty comes out; the adjoint receives."""

    def __init__(self, message: Message) -> None:
        super().__init__()
        self.message = message

    def forward(self, inputs: tuple[Any, ...]) -> tuple[Any, ...]:
        """Send all inputs but the last."""
        *arrays, empty = inputs
        self.message.push([to_host(array) for array in arrays])
        self.retain_outputs((0,))
        return (empty_like(empty),)

    def backward(self, indexes: tuple[int, ...], grad_outputs: tuple[Any, ...]) -> tuple[Any, ...]:
        """Receive the gradients."""
        del indexes, grad_outputs
        self.message.about_to_reply()
        reply = self.message.reply([spec_of(value) for value in self.inputs[:-1]])
        # A second backward pass must reply to the gradients before it waits for those of the values again.
        outputs: tuple[Any, ...] = Recv(reply).apply(self.get_retained_outputs())
        return outputs


class Recv(chainer.FunctionNode):  # type: ignore[misc]  # Chainer has no types
    """A delegate, if there is one, and something empty go in; arrays and something empty come out; the adjoint sends.

    The empty output stands for the function where none of its arrays is used.
    """

    def __init__(self, message: Message) -> None:
        super().__init__()
        self.message = message

    def forward(self, inputs: tuple[Any, ...]) -> tuple[Any, ...]:
        """Receive."""
        arrays = self.message.pull()
        self.specs = [spec_of(array) for array in arrays]
        self.message.record.may_be_cut_off |= any(dtype.kind != "f" for _, dtype in self.specs)
        return (*(to_device_of(inputs[0], array) for array in arrays), empty_like(inputs[-1]))

    def backward(self, indexes: tuple[int, ...], grad_outputs: tuple[Any, ...]) -> tuple[Any, ...]:
        """Send the gradients, zeros for those that are missing."""
        del indexes
        self.message.about_to_reply()
        *grads, token = grad_outputs
        empty = self.inputs[-1]
        filled = fill(grads, self.specs, _or_empty(None, empty))
        reply = self.message.reply(self.specs)
        (sent,) = Send(reply).apply((*filled, _or_empty(token, empty)))
        delegates = self.inputs[:-1]
        zeros = fill([None] * len(delegates), [spec_of(delegate) for delegate in delegates], sent.array)
        return (*(connect(sent, zero)[0] for zero in zeros), sent)


def _or_empty(grad: Any, node: Any) -> Any:
    if grad is not None:
        return grad
    return np.empty(0, np.float32) if node.data is None else empty_like(node.data)


def _describe(specs: Sequence[Spec]) -> str:
    return ", ".join(f"shape {shape} and dtype {dtype}" for shape, dtype in specs) or "no array"


def send(x: Any, communicator: CommunicatorBase, rank: int, tag: int = 0) -> chainer.Variable:
    """Send Variables to another rank; point-to-point.

    Its adjoint: the backward receives their gradients from there.

    Args:
        x: A Variable or array, or a tuple or list of them; any shapes, any dtypes, all on one device. Only floats can
            be back-propagated.
        communicator: The communicator that both ranks belong to.
        rank: The rank to send to, not this one.
        tag: A number that :func:`recv` must be given as well.

    Returns:
        An empty Variable, the delegate. The backward pass must reach it: pass it on to the next :func:`recv`, join it
        to something else by :func:`pseudo_connect`, or start there.

    Raises:
        TypeError: ``x`` is something else; the receiver raises too. In the backward: it is of integers.
        ValueError: ``rank`` or ``tag`` is out of range, or ``rank`` is this one, or ``x`` is empty.
        RuntimeError: A gradient came back for a ``send`` that the backward pass cannot reach any more; or, at the end
            of a backward pass, this one was not reached.
    """
    record = _record("send", communicator, rank, tag)
    values = list(x) if isinstance(x, (tuple, list)) else [x]
    problem = problem_with(values) if values else "expected at least one chainer.Variable, got none"
    if problem:
        _refuse(communicator, values, record, problem)
    traffic = traffic_of(communicator)
    traffic.check_arrivals(communicator)
    (delegate,) = traffic.apply(Send(Value(communicator, record)), values, record)
    delegate.name = "delegate_variable"
    return delegate


def recv(
    communicator: CommunicatorBase,
    rank: int,
    delegate_variable: chainer.Variable | None = None,
    tag: int = 0,
    force_tuple: bool | int = False,
    device: DeviceName = None,
) -> chainer.Variable | tuple[chainer.Variable, ...]:
    """Receive Variables from another rank; point-to-point.

    Its adjoint: the backward sends their gradients there.

    Args:
        communicator: The communicator that both ranks belong to.
        rank: The rank to receive from, not this one.
        delegate_variable: What the backward pass is to reach after this: what :func:`send` returned, if this rank's
            graph began with that. What is received is put on its device; without one it stays in host memory.
        tag: The number given to :func:`send`.
        force_tuple: Whether a single Variable is returned as a tuple too. An integer that is no ``bool`` is taken for
            the ``device``, which was in this place in ChainerMN 1.
        device: Where the result is to be: the number of a GPU, or any name of a device that Chainer knows. Nothing is
            moved by default, and by -1, the default of ChainerMN 1.

    Returns:
        A Variable, or a tuple of them if several were sent; shapes and dtypes as they were sent.

    Raises:
        TypeError: ``delegate_variable`` is not a Variable, or the sender's input was wrong. In the backward: what was
            received is of integers.
        ValueError: ``rank`` or ``tag`` is out of range, or ``rank`` is this one.
        RuntimeError: What came was not sent by :func:`send`; otherwise as there.
    """
    if type(force_tuple) is int:
        device, force_tuple = force_tuple, False
    outputs = moved_to(device, receive(communicator, rank, delegate_variable, tag)[:-1])
    return outputs if force_tuple or len(outputs) > 1 else outputs[0]


def receive(
    communicator: CommunicatorBase, rank: int, delegate: chainer.Variable | None = None, tag: int = 0
) -> tuple[chainer.Variable, ...]:
    """Do what :func:`recv` does; return a tuple whose last Variable is empty and stands for the function."""
    record = _record("recv", communicator, rank, tag)
    if delegate is not None and not isinstance(delegate, chainer.Variable):
        raise TypeError(f"recv: expected a chainer.Variable for delegate_variable, got {type(delegate).__name__}")
    traffic = traffic_of(communicator)
    traffic.check_arrivals(communicator)
    return traffic.apply(Recv(Value(communicator, record)), [] if delegate is None else [delegate], record)


def _record(operation: str, communicator: CommunicatorBase, rank: int, tag: int) -> MessageRecord:
    gradient_tag(tag)  # checks it
    if not 0 <= rank < communicator.size:
        raise ValueError(f"{operation}: expected rank in 0..{communicator.size - 1}, got {rank}")
    if rank == communicator.rank:
        raise ValueError(f"{operation}: expected another rank than this one, got {rank}")
    return MessageRecord(operation, rank, tag)


def _refuse(communicator: CommunicatorBase, values: list[Any], record: MessageRecord, problem: str) -> None:
    """Raise, and let the receiver hear of it: it is waiting already, or will be."""
    kind = TypeError if values else ValueError
    try:
        communicator.send(None, record.peer, record.tag)
    except TypeError as announced:
        raise kind(f"{record}: {problem}") from announced
