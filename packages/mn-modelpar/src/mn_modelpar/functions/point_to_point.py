"""Send and receive, each the other's adjoint."""

from __future__ import annotations

import weakref
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any

import chainer

from mn_comm import CommunicatorBase
from mn_modelpar.functions.pseudo_connect import connect
from mn_modelpar.functions.values import fill, has_floats, problem_with, spec_of
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
    def push(self, arrays: Arrays, node: chainer.FunctionNode) -> None:
        """Send arrays, which are the inputs of a function, to the peer."""

    @abstractmethod
    def pull(self) -> Arrays:
        """Receive arrays from the peer."""

    @abstractmethod
    def reply(self) -> Message:
        """Return how the gradients of those of the arrays travel that are of floats."""

    @abstractmethod
    def about_to_reply(self) -> bool:
        """Note that the backward has begun; return whether there is anything to reply."""


class Value(Message):
    """Values, in the forward pass: the arrays and nothing else, as ``communicator.send`` would send them."""

    def push(self, arrays: Arrays, node: chainer.FunctionNode) -> None:
        """Send the values."""
        record = self.record
        record.node = weakref.ref(node)
        traffic = traffic_of(self.communicator)
        record.specs = tuple(spec for spec in map(spec_of, arrays) if has_floats(spec))
        traffic.about_to_send(record)
        self.communicator.send(arrays[0] if len(arrays) == 1 else tuple(arrays), record.peer, record.tag)
        traffic.sent(record)

    def pull(self) -> Arrays:
        """Receive the values."""
        record = self.record
        received = self.communicator.recv(record.peer, record.tag)
        arrays = received if isinstance(received, tuple) else (received,)
        record.specs = tuple(spec for spec in map(spec_of, arrays) if has_floats(spec))
        traffic_of(self.communicator).received(record)
        if not arrays:
            raise ValueError(f"{record}: expected at least one array from rank {record.peer}, got none")
        return arrays

    def reply(self) -> Message:
        """Return the message that carries the gradients back."""
        return Gradient(self.communicator, self.record)

    def about_to_reply(self) -> bool:
        """Note that nobody has forgotten this one; return whether a gradient belongs to it."""
        traffic_of(self.communicator).ran(self.record)
        return self.record.has_gradient


class Gradient(Message):
    """Gradients, in the backward pass: under a tag of their own, and with the number of their value."""

    def push(self, arrays: Arrays, node: chainer.FunctionNode) -> None:
        """Send the gradients."""
        del node
        traffic_of(self.communicator).answer(self.record, [to_host(array) for array in arrays])

    def pull(self) -> Arrays:
        """Receive the gradients."""
        return traffic_of(self.communicator).take_gradient(self.record)

    def reply(self) -> Message:
        """Return the message that carries the gradients of these gradients, in a second backward pass."""
        return Value(self.communicator, MessageRecord(self.record.operation, self.record.peer, self.record.tag))

    def about_to_reply(self) -> bool:
        """Return that there is: all are floats, and nobody begins a second backward pass for nothing."""
        return True


class Send(chainer.FunctionNode):  # type: ignore[misc]  # Chainer has no types
    """Arrays and something empty go in, something empty comes out; the adjoint receives."""

    def __init__(self, message: Message) -> None:
        super().__init__()
        self.message = message

    def forward(self, inputs: tuple[Any, ...]) -> tuple[Any, ...]:
        """Send all inputs but the last."""
        *arrays, self.empty = inputs
        self.message.push(arrays, self)
        self.retain_outputs((0,))
        return (empty_like(self.empty),)

    def backward(self, indexes: tuple[int, ...], grad_outputs: tuple[Any, ...]) -> tuple[Any, ...]:
        """Receive the gradients of floats, if somebody needs them."""
        del indexes, grad_outputs
        sent = self.inputs[:-1]
        if not self.message.about_to_reply():
            return (*(None for _ in sent), chainer.as_variable(self.empty))
        # A second backward pass must reply to the gradients before it waits for those of the values again.
        *grads, token = Recv(self.message.reply()).apply(self.get_retained_outputs())
        remaining = iter(grads)
        return (*(next(remaining) if has_floats(spec_of(value)) else None for value in sent), token)


class Recv(chainer.FunctionNode):  # type: ignore[misc]  # Chainer has no types
    """A delegate, if there is one, and something empty go in; arrays and something empty come out; the adjoint sends.

    The empty output stands for the function where none of its arrays is used.

    Args:
        message: How they travel.
        received: The arrays, if they have been received already: without a delegate they say on which device to work.
    """

    def __init__(self, message: Message, received: Arrays | None = None) -> None:
        super().__init__()
        self.message = message
        self.received = received

    def forward(self, inputs: tuple[Any, ...]) -> tuple[Any, ...]:
        """Receive."""
        arrays = self.message.pull() if self.received is None else self.received
        self.received = None  # the graph lives longer than they may
        self.specs = [spec_of(array) for array in arrays]
        self.empty = inputs[-1]
        return (*(to_device_of(inputs[0], array) for array in arrays), empty_like(self.empty))

    def backward(self, indexes: tuple[int, ...], grad_outputs: tuple[Any, ...]) -> tuple[Any, ...]:
        """Send the gradients of floats, zeros for those that are missing, if the sender needs them."""
        del indexes
        delegates = self.inputs[:-1]
        *grads, token = grad_outputs
        end = self.empty if token is None else token
        if self.message.about_to_reply():
            floats = [(grad, spec) for grad, spec in zip(grads, self.specs, strict=True) if has_floats(spec)]
            filled = fill([grad for grad, _ in floats], [spec for _, spec in floats], self.empty)
            (end,) = Send(self.message.reply()).apply((*filled, end))
        end = chainer.as_variable(end)
        zeros = fill([None] * len(delegates), [spec_of(delegate) for delegate in delegates], end.array)
        return (*(connect(end, zero)[0] for zero in zeros), end)


def send(x: Any, communicator: CommunicatorBase, rank: int, tag: int = 0) -> chainer.Variable:
    """Send Variables to another rank; point-to-point.

    In the backward pass it receives their gradients from that rank.

    Args:
        x: A Variable or array, or a tuple or list of them; any shapes, any dtypes, all on one device. Gradients come
            back for Variables of floats. If there are none that need one, the backward pass waits for nothing, and may
            leave this out.
        communicator: The communicator that both ranks belong to.
        rank: The rank to send to, not this one.
        tag: A number that :func:`recv` must be given as well.

    Returns:
        An empty Variable, the delegate. The backward pass must reach it: pass it on to the next :func:`recv`, join it
        to something else by :func:`pseudo_connect`, or start there.

    Raises:
        TypeError: ``x`` is something else; the receiver raises too.
        ValueError: ``rank`` or ``tag`` is out of range, or ``rank`` is this one, or ``x`` is empty.
        RuntimeError: In the backward: the gradient that came back is of something else.

    Warns:
        RuntimeWarning: A gradient came back for a ``send`` that the backward pass cannot reach any more; or, at the end
            of a backward pass, this one was not reached; or, in its backward, that of the receiver cannot reach the
            value, so that its gradient is taken to be zeros.

    Example:
        >>> if comm.rank == 0:
        ...     x = chainer.Variable(np.ones(3, np.float32))
        ...     chainermn.functions.send(x, comm, rank=1).backward()  # waits for the gradient
        ... else:
        ...     F.sum(chainermn.functions.recv(comm, rank=0)).backward()  # sends it
    """
    record = _record("send", communicator, rank, tag)
    values = list(x) if isinstance(x, (tuple, list)) else [x]
    problem = problem_with(values) if values else "expected at least one chainer.Variable, got none"
    if problem:
        _refuse(communicator, values, record, problem)
    record.wanted = chainer.config.enable_backprop and any(
        value.requires_grad and has_floats(spec_of(value)) for value in map(chainer.as_variable, values)
    )
    traffic = traffic_of(communicator)
    traffic.look_around()
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

    In the backward pass it sends the gradients of floats to that rank, without waiting.

    Args:
        communicator: The communicator that both ranks belong to.
        rank: The rank to receive from, not this one.
        delegate_variable: What :func:`send` returned, if this rank's graph began with a send: the backward pass
            continues there. What is received is put on its device; without one, what was sent from a GPU is put
            on the current one, and the rest into host memory.
        tag: The number given to :func:`send`.
        force_tuple: Whether a single Variable is returned as a tuple too. An integer that is no ``bool`` is taken for
            the ``device``, which was in this place in ChainerMN 1.
        device: Where the result is to be: the number of a GPU, or any name of a device that Chainer knows. By default,
            and with -1, the default of ChainerMN 1, nothing is moved.

    Returns:
        A Variable, or a tuple of them if several were sent; shapes and dtypes as they were sent.

    Raises:
        TypeError: ``delegate_variable`` is not a Variable, or the sender's input was wrong.
        ValueError: ``rank`` or ``tag`` is out of range, or ``rank`` is this one.
        RuntimeError: The message was not sent by :func:`send`.

    Warns:
        RuntimeWarning: As there.

    Example:
        >>> if comm.rank == 0:
        ...     delegate = chainermn.functions.send(L.Linear(3, 2)(np.ones((1, 3), np.float32)), comm, rank=1)
        ...     y = chainermn.functions.recv(comm, rank=1, delegate_variable=delegate)
        ...     F.sum(y).backward()
        ... else:
        ...     y = chainermn.functions.send(chainermn.functions.recv(comm, rank=0) * 2, comm, rank=0)
        ...     y.backward()
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
    traffic.look_around()
    message = Value(communicator, record)
    received = message.pull()
    values = [] if delegate is None else [delegate]
    return traffic.apply(Recv(message, received), values, record, like=received[0])


def _record(operation: str, communicator: CommunicatorBase, rank: int, tag: int) -> MessageRecord:
    gradient_tag(tag)  # checks it
    if not 0 <= rank < communicator.size:
        raise ValueError(f"{operation}: expected rank in 0..{communicator.size - 1}, got {rank}")
    if rank == communicator.rank:
        raise ValueError(f"{operation}: expected a rank other than this one, got {rank}")
    return MessageRecord(operation, rank, tag)


def _refuse(communicator: CommunicatorBase, values: list[Any], record: MessageRecord, problem: str) -> None:
    """Raise, and let the receiver hear of it: it is waiting already, or will be."""
    kind = TypeError if values else ValueError
    try:
        communicator.send(None, record.peer, record.tag)
    except TypeError as announced:
        raise kind(f"{record}: {problem}") from announced
