"""Records of the messages between ranks, so that no rank waits forever and mistakes are reported.

Three things can go wrong in models that span processes, and none of them would raise an error by itself:

- A part of the graph is cut off: its ``send`` never receives its gradient. At the end of a backward pass, there is one
  warning for every ``send`` and ``recv`` whose node has been freed and whose backward method did not run, although
  others of the communicator ran. The other rank is informed as well: :mod:`mn_modelpar.replies` sends a message for a
  ``recv`` that is cut off, or for a ``send`` that needs no gradient, so that the other rank does not wait.
- Gradients come back in a different order than the values were sent: each carries the number of its value, and is kept
  until the ``send`` with that number asks for it.
- A gradient could be mistaken for a value of the next pass: gradients use separate tags.
"""

from __future__ import annotations

import atexit
import functools
import os
import weakref
from collections import Counter, defaultdict, deque
from collections.abc import Sequence
from typing import Any

import chainer
import numpy as np

from mn_comm import Communicator, CommunicatorBase, explain_stalls
from mn_comm.building_blocks import MPI, refuse_elastic, waiting_for
from mn_modelpar.callsite import CallSite, call_site
from mn_modelpar.replies import GRADIENT, NONE, UNWANTED, Post, Word, gradient_tag, post_of
from mn_modelpar.staging import empty_like
from mn_modelpar.values import Spec

__all__ = ["Anchor", "MessageRecord", "Record", "Traffic", "describe", "expect_lasting", "gradient_tag", "traffic_of"]

_Array = np.ndarray[Any, Any]

_KEPT = 256  # how many values to or from one rank are remembered, to recognise their answers
_ADVICE = (
    "connect it to the loss: pass the result of send() to the next recv() as its delegate_variable, connect it with "
    "pseudo_connect(), or return it; run a forward pass that needs no backward pass in chainer.no_backprop_mode()"
)


class Record:
    """One call of a function, kept until its backward method has run.

    Args:
        operation: The name of the function.
        detail: Peer and tag, or root, in words.

    Attributes:
        may_be_cut_off: Whether it may happen, without a mistake, that its backward method never runs.
    """

    may_be_cut_off = True

    def __init__(self, operation: str, detail: str = "") -> None:
        self.operation = operation
        self.detail = detail
        self.site: CallSite = call_site()
        self.node: Any = None

    @property
    def key(self) -> tuple[object, ...]:
        """Equal for the same call in another pass."""
        return (self.operation, self.detail, *self.site.key)

    @property
    def is_cut_off(self) -> bool:
        """Whether its graph has been freed, so that its backward method can never run."""
        return self.node is not None and self.node() is None

    def __str__(self) -> str:
        return f"{self.operation}({self.detail}) called at {self.site}"


class Anchor(chainer.Variable):  # type: ignore[misc]  # Chainer has no types
    """An empty leaf that makes a function part of every backward pass, and is notified when the pass has ended.

    Chainer gives leaves their gradients last, once all functions have run, by the method that is overridden here; there
    is no other hook at the end of a backward pass.
    """

    def __init__(self, like: Any, traffic: Traffic) -> None:
        super().__init__(empty_like(like))
        self._traffic = traffic

    def _set_grad_var_without_check(self, gv: Any) -> None:
        super()._set_grad_var_without_check(None)  # it is never read, and the next pass would add to it
        if gv is not None:
            self._traffic.backward_ended()


class MessageRecord(Record):
    """One call of ``send`` or ``recv``: a value to which a gradient belongs.

    Args:
        operation: Which of the two.
        peer: The other rank.
        tag: The tag with which the value is sent.

    Attributes:
        number: The number of the message, known once it has been sent or received.
        specs: Shapes and dtypes of its floating-point arrays, which can have a gradient.
        wanted: Whether the sender needs their gradients.
        answered: On the receiver, whether it has sent an answer; on the sender, whether it has read the answer.
    """

    may_be_cut_off = False

    def __init__(self, operation: str, peer: int, tag: int) -> None:
        super().__init__(operation, f"rank={peer}, tag={tag}")
        self.peer = peer
        self.tag = tag
        self.number = 0
        self.specs: tuple[Spec, ...] = ()
        self.wanted = True
        self.answered = False

    @property
    def has_gradient(self) -> bool:
        """Whether a gradient belongs to the value."""
        return self.wanted and bool(self.specs)


class Lane:
    """The values that are sent between this rank and another one under one tag, in either direction."""

    def __init__(self) -> None:
        self.sent: dict[int, MessageRecord] = {}  # values that have a gradient
        self.arrived: dict[int, deque[list[_Array] | None]] = defaultdict(deque)  # that no backward has asked for yet
        self.unwanted: set[int] = set()  # values to be received

    def expect(self, record: MessageRecord) -> None:
        """Expect the answer to a value; there may be several, one for each backward pass."""
        if len(self.sent) > _KEPT:
            self.sent = {number: other for number, other in self.sent.items() if not other.is_cut_off}
        self.sent[record.number] = record

    def clear(self) -> None:
        """Drop the answers that no backward method can ask for any more."""
        for number in list(self.arrived):
            if number not in self.sent or self.sent[number].is_cut_off:
                del self.arrived[number]


class Traffic:
    """The messages between this rank and the others on one MPI communicator.

    Args:
        post: Sends and receives the gradients.
    """

    def __init__(self, post: Post) -> None:
        self._post = post
        self._counts: Counter[tuple[object, ...]] = Counter()
        self._lanes: dict[tuple[int, int], Lane] = defaultdict(Lane)
        self._open: dict[tuple[object, ...], list[Record]] = {}
        self._ran: set[tuple[object, ...]] = set()
        self._warned: set[tuple[object, ...]] = set()
        _all.add(self)

    def count(self, record: MessageRecord) -> None:
        """Give a value its number, before it is sent or received.

        Not afterwards: a signal handler may raise while this rank waits, and the other one counts the value.
        """
        key = (record.operation, record.peer, record.tag)
        self._counts[key] += 1
        record.number = self._counts[key]

    def about_to_send(self, record: MessageRecord) -> None:
        """Give a value its number, and inform the receiver if its gradient is not needed."""
        self.count(record)
        if record.specs and not record.wanted:
            self._say(UNWANTED, record)

    def sent(self, record: MessageRecord) -> None:
        """Record that a value has been sent."""
        if record.has_gradient:
            self._lanes[record.peer, record.tag].expect(record)

    def received(self, record: MessageRecord) -> None:
        """Find out whether the sender of a value that has been received needs its gradient."""
        self._read_words(record.peer, record.tag)
        unwanted = self._lanes[record.peer, record.tag].unwanted
        record.wanted = record.number not in unwanted
        unwanted.discard(record.number)

    def opened(self, record: Record, node: chainer.FunctionNode) -> None:
        """Expect the backward method of a call that is part of a graph; in training, being cut off is a mistake."""
        record.node = weakref.ref(node)
        record.may_be_cut_off |= not chainer.config.train
        if isinstance(record, MessageRecord):
            record.may_be_cut_off |= not record.has_gradient
        if not chainer.config.enable_backprop:
            self._decline(record)
            return
        others = self._open.get(record.key, [])
        # One cut-off call represents all equal ones: memory stays bounded if there is never a backward pass.
        gone = [other for other in others if other.is_cut_off]
        for other in gone:
            self._decline(other)
        self._open[record.key] = [*gone[:1], *(other for other in others if not other.is_cut_off), record]

    def apply(
        self, node: chainer.FunctionNode, values: Sequence[Any], record: Record, like: Any = ()
    ) -> tuple[chainer.Variable, ...]:
        """Apply a function, with an anchor as its last input, and expect its backward method to run.

        Args:
            node: The function.
            values: Its other inputs, Variables or arrays.
            record: The call.
            like: An array on the device to use, if there are no values.

        Returns:
            Its outputs.
        """
        device = chainer.as_variable(values[0]).array if values else like
        anchor = Anchor(device, self)
        outputs: tuple[chainer.Variable, ...] = node.apply((*values, anchor))
        node.anchor = anchor  # the graph holds on to nodes, but not to Variables
        self.opened(record, node)
        return outputs

    def ran(self, record: Record) -> None:
        """Record that the backward method of a call has run."""
        self._ran.add(record.key)
        self._forget(record)

    def backward_ended(self) -> None:
        """Look for calls that no backward pass can reach any more; answer for them, and warn."""
        if not self._ran:
            return
        ran, self._ran = self._ran, set()
        gone = self._cut_off()
        for record in gone:
            self._decline(record)
            self._forget(record)
        # The same call ran in this pass: the cut-off one belonged to a forward pass without a backward pass.
        for record in gone:
            if record.key not in ran:
                self._warn(f"the backward pass has ended, but the backward of {record} never ran; {_ADVICE}", record)

    def look_around(self) -> None:
        """Answer for calls that are cut off, and read answers that have arrived, before a value is sent or received."""
        for record in self._cut_off():
            self._decline(record)
        for (peer, tag), lane in list(self._lanes.items()):
            if lane.sent:
                self._read_words(peer, tag)
                lane.clear()

    def answer(self, record: MessageRecord, arrays: Sequence[_Array]) -> None:
        """Send the gradients of the values of a ``recv``; return without waiting for the other rank.

        Args:
            record: The call of ``recv``.
            arrays: The gradients, in host memory.
        """
        record.answered = True
        self._say(GRADIENT, record, arrays)

    def take_gradient(self, record: MessageRecord) -> list[_Array]:
        """Receive the gradients of the values of a ``send``; point-to-point.

        Args:
            record: The call of ``send``.

        Returns:
            One array for each floating-point array that was sent; zeros if the other rank has no gradient.
        """
        for other in self._cut_off():
            self._decline(other)  # the other rank may have to continue before this one can
        lane = self._lanes[record.peer, record.tag]
        with waiting_for(lambda: f"the gradient of {record}"):
            while not lane.arrived[record.number]:
                self._read_word(record.peer, record.tag)
        record.answered = True
        arrays = lane.arrived[record.number].popleft()
        if arrays is None:
            self._warn(
                f"the gradient of {record} is assumed to be zero: the backward pass of rank {record.peer} does not "
                "reach the value that it received",
                record,
            )
            arrays = [np.zeros(shape, dtype) for shape, dtype in record.specs]
        return arrays

    def _cut_off(self) -> list[Record]:
        return [record for records in self._open.values() for record in records if record.is_cut_off]

    def _say(self, kind: str, record: MessageRecord, arrays: Sequence[_Array] = ()) -> None:
        word = Word(kind, record.number, tuple((array.shape, array.dtype) for array in arrays))
        self._post.post(word, arrays, record.peer, gradient_tag(record.tag))

    def _decline(self, record: Record) -> None:
        """Inform the sender that there will be no gradient for the values of a ``recv``."""
        if isinstance(record, MessageRecord) and record.operation == "recv" and record.has_gradient:
            if not record.answered:
                record.answered = True
                self._say(NONE, record)

    def _read_words(self, peer: int, tag: int) -> None:
        while self._post.has_word(peer, gradient_tag(tag)):
            self._read_word(peer, tag)

    def _read_word(self, peer: int, tag: int) -> None:
        word, arrays = self._post.recv_gradient(peer, gradient_tag(tag))
        lane = self._lanes[peer, tag]
        if word.kind == UNWANTED:
            lane.unwanted.add(word.number)
            return
        record = lane.sent.get(word.number)
        if record is None:
            return  # it was dropped long ago
        if word.kind == GRADIENT and word.specs != record.specs:
            raise RuntimeError(
                f"the gradient of {record}: expected {describe(record.specs)}, got {describe(word.specs)} from rank "
                f"{peer}; values sent by the function send() must be received by the function recv(), not by a method "
                "of the communicator"
            )
        if not record.is_cut_off:
            lane.arrived[word.number].append(arrays if word.kind == GRADIENT else None)
            return
        if word.kind == GRADIENT and not record.answered:
            self._forget(record)
            self._warn(
                f"the gradient of {record} came back from rank {peer}, but this rank has discarded the result of "
                f"send(); {_ADVICE}",
                record,
            )

    def _forget(self, record: Record) -> None:
        left = [other for other in self._open.get(record.key, []) if other is not record]
        if left:
            self._open[record.key] = left
        else:
            self._open.pop(record.key, None)

    def _warn(self, message: str, record: Record) -> None:
        """Warn of a mistake, once for each call in the user's code, at the line of that call."""
        if not record.may_be_cut_off and record.key not in self._warned:
            self._warned.add(record.key)
            record.site.warn(message)

    def pending(self) -> list[str]:
        """Describe the calls whose backward method has not run yet."""
        return [str(record) for records in self._open.values() for record in records]

    def end(self) -> None:
        """Answer for all values, as there are no more backward passes, and read the remaining answers.

        MPICH fails at the end if long messages have not been received.
        """
        if self._post.is_closed:
            return
        for record in [record for records in self._open.values() for record in records]:
            self._decline(record)
        for (peer, tag), lane in self._lanes.items():
            while lane.sent and self._post.has_word(peer, gradient_tag(tag)):
                self._post.recv_gradient(peer, gradient_tag(tag))


_all: weakref.WeakSet[Traffic] = weakref.WeakSet()
_of_others: weakref.WeakKeyDictionary[CommunicatorBase, Traffic] = weakref.WeakKeyDictionary()


def expect_lasting(communicator: CommunicatorBase) -> None:
    """Raise ValueError, on every rank, for an elastic communicator."""
    refuse_elastic(communicator, "a model that spans ranks", "a lost rank's part of the model is on no other rank")


def traffic_of(communicator: CommunicatorBase) -> Traffic:
    """Return the records of a communicator, which live as long as the communicator.

    Communicators over one MPI communicator share them, because one can receive the messages of the other.
    """
    expect_lasting(communicator)
    if not isinstance(communicator, Communicator):
        found = _of_others.get(communicator)
        if found is None:
            found = _of_others[communicator] = Traffic(post_of(communicator))
        return found
    attached: Any = communicator.mpi_comm.Get_attr(_keyval())
    if attached is None:
        attached = Traffic(post_of(communicator))
        communicator.mpi_comm.Set_attr(_keyval(), attached)
    return attached  # type: ignore[no-any-return]


@functools.cache
def _keyval() -> int:
    return MPI.Comm.Create_keyval()


def describe(specs: Sequence[Spec]) -> str:
    """Return shapes and dtypes in words."""
    return ", ".join(f"shape {shape} and dtype {dtype}" for shape, dtype in specs) or "no array"


def _explain() -> Sequence[str]:
    pending = [text for traffic in list(_all) for text in traffic.pending()]
    return [f"its backward has not run: {text}" for text in pending]


def _end() -> None:
    for traffic in list(_all):
        if not MPI.Is_finalized():
            traffic.end()


explain_stalls(_explain)
atexit.register(_end)
os.register_at_fork(after_in_child=_all.clear)  # the answers are for the parent
