"""Send and receive, each the other's adjoint."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import Any, NamedTuple, TypeAlias

import chainer

from mn_comm import CommunicatorBase
from mn_modelpar.functions.ordered import Ordered
from mn_modelpar.functions.pseudo_connect import connect
from mn_modelpar.staging import DeviceName, empty_like, moved_to, to_device_of, to_host
from mn_modelpar.traffic import MessageRecord, gradient_tag, traffic_of
from mn_modelpar.values import fill, has_floats, problem_with, spec_of

Arrays = Sequence[Any]


class Value(NamedTuple):
    """Values in the forward pass: only the arrays, as ``communicator.send`` would send them."""

    communicator: CommunicatorBase
    record: MessageRecord

    def push(self, arrays: Arrays, node: chainer.FunctionNode) -> None:
        """Send the values, which are the inputs of a function."""
        record = self.record
        record.node = weakref.ref(node)
        traffic = traffic_of(self.communicator)
        record.specs = tuple(spec for spec in map(spec_of, arrays) if has_floats(spec))
        traffic.about_to_send(record)
        self.communicator.send(arrays[0] if len(arrays) == 1 else tuple(arrays), record.peer, record.tag)
        traffic.sent(record)

    def pull(self) -> Arrays:
        """Receive the values."""
        record, traffic = self.record, traffic_of(self.communicator)
        traffic.count(record)
        received = self.communicator.recv(record.peer, record.tag)
        arrays = received if isinstance(received, tuple) else (received,)
        record.specs = tuple(spec for spec in map(spec_of, arrays) if has_floats(spec))
        traffic.received(record)
        if not arrays:
            raise ValueError(f"{record}: expected at least one array from rank {record.peer}, got none")
        return arrays

    def reply(self) -> Gradient:
        """Return the message that carries the gradients back."""
        return Gradient(self.communicator, self.record)

    def about_to_reply(self) -> bool:
        """Record that the backward pass has reached this message; return whether a gradient belongs to it."""
        traffic_of(self.communicator).ran(self.record)
        return self.record.has_gradient


class Gradient(NamedTuple):
    """Gradients in the backward pass: sent under a separate tag, with the number of their value."""

    communicator: CommunicatorBase
    record: MessageRecord

    def push(self, arrays: Arrays, node: chainer.FunctionNode) -> None:
        """Send the gradients."""
        del node
        traffic_of(self.communicator).answer(self.record, [to_host(array) for array in arrays])

    def pull(self) -> Arrays:
        """Receive the gradients."""
        return traffic_of(self.communicator).take_gradient(self.record)

    def reply(self) -> Value:
        """Return the message that carries the gradients of these gradients, in a second backward pass."""
        return Value(self.communicator, MessageRecord(self.record.operation, self.record.peer, self.record.tag))

    def about_to_reply(self) -> bool:
        """Return ``True``: all gradients are floats, and a second backward pass always needs them."""
        return True


Message: TypeAlias = Value | Gradient
"""How arrays and their gradients are exchanged between this rank and a peer."""


class Send(Ordered):
    """Takes arrays and an empty array, and returns an empty array; the adjoint receives."""

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
        """Receive the gradients of floating-point arrays, if they are needed."""
        del indexes, grad_outputs
        sent = self.inputs[:-1]
        if not self.message.about_to_reply():
            return (*(None for _ in sent), chainer.as_variable(self.empty))
        # A second backward pass must reply to the gradients before it waits for those of the values again.
        *grads, token = Recv(self.message.reply()).apply(self.get_retained_outputs())
        remaining = iter(grads)
        return (*(next(remaining) if has_floats(spec_of(value)) else None for value in sent), token)


class Recv(Ordered):
    """Takes a delegate, if there is one, and an empty array; returns arrays and an empty one; the adjoint sends.

    The empty output represents the function if none of its arrays is used.

    Args:
        message: How the arrays are received.
        received: The arrays, if they have been received already: without a delegate, they determine the device.
    """

    def __init__(self, message: Message, received: Arrays | None = None) -> None:
        super().__init__()
        self.message = message
        self.received = received

    def forward(self, inputs: tuple[Any, ...]) -> tuple[Any, ...]:
        """Receive."""
        arrays = self.message.pull() if self.received is None else self.received
        self.received = None  # the graph may live longer than these arrays
        self.specs = [spec_of(array) for array in arrays]
        self.empty = inputs[-1]
        return (*(to_device_of(inputs[0], array) for array in arrays), empty_like(self.empty))

    def backward(self, indexes: tuple[int, ...], grad_outputs: tuple[Any, ...]) -> tuple[Any, ...]:
        """Send the gradients of floating-point arrays, with zeros for missing ones, if the sender needs them."""
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

    In the backward pass, it receives their gradients from that rank.

    Args:
        x: A Variable or array, or a tuple or list of them, of any shapes and dtypes, all on one device. Gradients are
            received for floating-point Variables. If no Variable needs a gradient, the backward pass does not wait, and
            need not reach this call.
        communicator: The communicator that both ranks belong to.
        rank: The rank to send to, not this one.
        tag: A number; the receiver must pass the same one to :func:`recv`.

    Returns:
        An empty Variable, the delegate variable. The backward pass must reach it: pass it to the next :func:`recv`,
        connect it to something else with :func:`pseudo_connect`, or start the backward pass there.

    Raises:
        TypeError: ``x`` is something else; the receiver raises too.
        ValueError: ``rank`` or ``tag`` is out of range, or ``rank`` is this one, or ``x`` is empty.
        RuntimeError: In the backward pass: the received gradient does not match the value.

    Warns:
        RuntimeWarning: The backward pass did not reach this call; or a gradient arrived for a ``send`` that a backward
            pass can no longer reach; or the receiver's backward pass did not reach the value, so that its gradient is
            assumed to be zero.

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

    In the backward pass, it sends the gradients of floating-point Variables to that rank, without waiting.

    Args:
        communicator: The communicator that both ranks belong to.
        rank: The rank to receive from, not this one.
        delegate_variable: The result of :func:`send`, if this rank's graph began with a send: the backward pass
            continues there. The received arrays are put on its device. Without a delegate variable, arrays that were
            sent from a GPU are put on the current GPU, and others into host memory.
        tag: The number given to :func:`send`.
        force_tuple: Whether a single Variable is also returned as a tuple. An integer that is not a ``bool`` is used as
            ``device``, which was at this position in ChainerMN 1.
        device: The device of the result: the number of a GPU, or any name of a device that Chainer knows. By default,
            and with -1, the default of ChainerMN 1, nothing is moved.

    Returns:
        A Variable, or a tuple of Variables if several were sent, with the shapes and dtypes of the sender.

    Raises:
        TypeError: ``delegate_variable`` is not a Variable, or the sender's input was wrong.
        ValueError: ``rank`` or ``tag`` is out of range, or ``rank`` is this one.
        RuntimeError: The message was not sent by :func:`send`.

    Warns:
        RuntimeWarning: In the same cases as :func:`send`.

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
    """Do what :func:`recv` does; return a tuple whose last Variable is empty and represents the function."""
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
    """Raise, and inform the receiver: it is waiting already, or will be."""
    kind = TypeError if values else ValueError
    traffic_of(communicator).count(record)  # as the receiver does
    try:
        communicator.send(None, record.peer, record.tag)
    except TypeError as announced:
        raise kind(f"{record}: {problem}") from announced
