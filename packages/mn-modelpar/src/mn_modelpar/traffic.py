"""What the functions remember of each other's messages, so that no rank waits for ever and a mistake is named.

Three things go wrong in models that span processes, and each is silent by nature:

- A part of the graph is cut off: its ``send`` never receives its gradient. When a backward pass ends, every ``send``
  and ``recv`` whose node is gone without its backward having run, while others of the communicator ran, is warned of,
  once. The other side hears of it too: what :mod:`mn_modelpar.replies` posts for a ``recv`` that is cut off, or a
  ``send`` that needs no gradient, keeps it from waiting.
- Gradients come back in another order than the values went: each carries the number of its value, and is kept until
  the ``send`` of that number asks for it.
- A gradient is taken for a value of the next pass: gradients travel under tags of their own.
"""

from __future__ import annotations

import atexit
import functools
import weakref
from collections import Counter, defaultdict, deque
from collections.abc import Sequence
from typing import Any

import chainer
import numpy as np

from mn_comm import MPI, Communicator, CommunicatorBase, explain_stalls, waiting_for
from mn_modelpar.callsite import CallSite, call_site
from mn_modelpar.functions.values import Spec
from mn_modelpar.replies import GRADIENT, NONE, UNWANTED, Post, Word, gradient_tag, post_of
from mn_modelpar.staging import empty_like

__all__ = ["Anchor", "MessageRecord", "Record", "Traffic", "describe", "gradient_tag", "traffic_of"]

_Array = np.ndarray[Any, Any]

_KEPT = 256  # values to or from one rank whose answers are known when they come
_ADVICE = (
    "connect it to the loss: pass the result of send() to the next recv() as its delegate_variable, connect it with "
    "pseudo_connect(), or return it; run a forward pass that needs no backward pass in chainer.no_backprop_mode()"
)


class Record:
    """One call of a function, for as long as its backward has not run.

    Args:
        operation: The name of the function.
        detail: Peer and tag, or root, in words.
        may_be_cut_off: Whether it is no mistake that its backward never runs.
    """

    def __init__(self, operation: str, detail: str = "", may_be_cut_off: bool = True) -> None:
        self.operation = operation
        self.detail = detail
        self.may_be_cut_off = may_be_cut_off
        self.site: CallSite = call_site()
        self.node: Any = None

    @property
    def key(self) -> tuple[object, ...]:
        """Equal for the same call in another pass."""
        return (self.operation, self.detail, *self.site.key)

    @property
    def is_cut_off(self) -> bool:
        """Whether the graph it belonged to is gone, so that its backward can never run."""
        return self.node is not None and self.node() is None

    def __str__(self) -> str:
        return f"{self.operation}({self.detail}) called at {self.site}"


class Anchor(chainer.Variable):  # type: ignore[misc]  # Chainer has no types
    """An empty leaf that makes a function part of every backward pass, and hears when the pass has ended.

    Chainer gives leaves their gradients last, once all functions have run, by the method that is overridden here; there
    is no other hook at the end of a backward pass.
    """

    def __init__(self, like: Any, traffic: Traffic) -> None:
        super().__init__(empty_like(like))
        self._traffic = traffic

    def _set_grad_var_without_check(self, gv: Any) -> None:
        super()._set_grad_var_without_check(None)  # nobody reads it, and the next pass would add to it
        if gv is not None:
            self._traffic.backward_ended()


class MessageRecord(Record):
    """One call of ``send``, or of ``recv``: a value that a gradient belongs to.

    Args:
        operation: Which of the two.
        peer: The other rank.
        tag: The tag under which the value travels.

    Attributes:
        number: Which message this is, known once it has travelled.
        specs: Shapes and dtypes of those of its arrays that can have a gradient: floats.
        wanted: Whether the sender needs their gradients.
        answered: Whether an answer has been given, on the receiver's side, or taken, on the sender's.
    """

    def __init__(self, operation: str, peer: int, tag: int) -> None:
        super().__init__(operation, f"rank={peer}, tag={tag}", may_be_cut_off=False)
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
    """The values that travel between this rank and another one under one tag, in either direction."""

    def __init__(self) -> None:
        self.sent: dict[int, MessageRecord] = {}  # those that have a gradient
        self.arrived: dict[int, deque[list[_Array] | None]] = defaultdict(deque)  # that no backward has asked for yet
        self.unwanted: set[int] = set()  # of those to be received

    def expect(self, record: MessageRecord) -> None:
        """Expect the answer to a value; there may be several, one for each backward pass."""
        if len(self.sent) > _KEPT:
            self.sent = {number: other for number, other in self.sent.items() if not other.is_cut_off}
        self.sent[record.number] = record

    def clear(self) -> None:
        """Drop the answers that no backward can ask for any more."""
        for number in list(self.arrived):
            if number not in self.sent or self.sent[number].is_cut_off:
                del self.arrived[number]


class Traffic:
    """The messages between this rank and the others on one MPI communicator.

    Args:
        post: How gradients travel.
    """

    def __init__(self, post: Post) -> None:
        self._post = post
        self._counts: Counter[tuple[object, ...]] = Counter()
        self._lanes: dict[tuple[int, int], Lane] = defaultdict(Lane)
        self._open: dict[tuple[object, ...], list[Record]] = {}
        self._ran: set[tuple[object, ...]] = set()
        self._warned: set[tuple[object, ...]] = set()
        _all.add(self)

    def about_to_send(self, record: MessageRecord) -> None:
        """Give a value its number, and say ahead of it if nobody here needs its gradient."""
        record.number = self._counts["send", record.peer, record.tag] + 1
        if record.specs and not record.wanted:
            self._say(UNWANTED, record)

    def sent(self, record: MessageRecord) -> None:
        """Note that a value has been sent."""
        self._counts["send", record.peer, record.tag] = record.number
        if record.has_gradient:
            self._lanes[record.peer, record.tag].expect(record)

    def received(self, record: MessageRecord) -> None:
        """Note that a value has been received; find out whether its sender needs its gradient."""
        key = ("recv", record.peer, record.tag)
        self._counts[key] += 1
        record.number = self._counts[key]
        self._read_words(record.peer, record.tag)
        unwanted = self._lanes[record.peer, record.tag].unwanted
        record.wanted = record.number not in unwanted
        unwanted.discard(record.number)

    def opened(self, record: Record, node: chainer.FunctionNode) -> None:
        """Expect the backward of a call, if it is part of a graph; in training, its being cut off is a mistake."""
        record.node = weakref.ref(node)
        record.may_be_cut_off |= not chainer.config.train
        if isinstance(record, MessageRecord):
            record.may_be_cut_off |= not record.has_gradient
        if not chainer.config.enable_backprop:
            self._decline(record)
            return
        others = self._open.get(record.key, [])
        # One that is cut off stands for all like it: memory stays bounded where nothing is ever back-propagated.
        gone = [other for other in others if other.is_cut_off]
        for other in gone:
            self._decline(other)
        self._open[record.key] = [*gone[:1], *(other for other in others if not other.is_cut_off), record]

    def apply(
        self, node: chainer.FunctionNode, values: Sequence[Any], record: Record, like: Any = ()
    ) -> tuple[chainer.Variable, ...]:
        """Apply a function, with an anchor as its last input, and expect its backward.

        Args:
            node: The function.
            values: Its other inputs, Variables or arrays.
            record: The call.
            like: An array on the device where it is to work, if there are no values.

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
        """Note that the backward of a call has run."""
        self._ran.add(record.key)
        self._forget(record)

    def backward_ended(self) -> None:
        """Look for calls that this backward pass has left out for good; answer for them, and warn."""
        if not self._ran:
            return
        ran, self._ran = self._ran, set()
        gone = self._cut_off()
        for record in gone:
            self._decline(record)
            self._forget(record)
        # The same call ran in this pass: the other one was a pass of its own, for which nobody wanted gradients.
        for record in gone:
            if record.key not in ran:
                self._warn(f"the backward pass has ended, but the backward of {record} never ran; {_ADVICE}", record)

    def look_around(self) -> None:
        """Before a value travels: answer for what is cut off, and read what has come back."""
        for record in self._cut_off():
            self._decline(record)
        for (peer, tag), lane in list(self._lanes.items()):
            if lane.sent:
                self._read_words(peer, tag)
                lane.clear()

    def answer(self, record: MessageRecord, arrays: Sequence[_Array]) -> None:
        """Send the gradient of what a ``recv`` has received; return without waiting for the other rank.

        Args:
            record: The call of ``recv``.
            arrays: The gradients, in host memory.
        """
        record.answered = True
        self._say(GRADIENT, record, arrays)

    def take_gradient(self, record: MessageRecord) -> list[_Array]:
        """Receive the gradient of what a ``send`` has sent; point-to-point.

        Args:
            record: The call of ``send``.

        Returns:
            One array for each of floats that was sent; zeros if the other rank has no gradient.
        """
        for other in self._cut_off():
            self._decline(other)  # its sender may have to go on before this rank can
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
        """Let the sender know that no gradient will come for what a ``recv`` has received."""
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
            return  # forgotten long ago
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
        """Warn of a mistake, once for each call in the user's code, and there."""
        if not record.may_be_cut_off and record.key not in self._warned:
            self._warned.add(record.key)
            record.site.warn(message)

    def pending(self) -> list[str]:
        """Return, in words, the calls whose backward has not run yet."""
        return [str(record) for records in self._open.values() for record in records]

    def read_the_rest(self) -> None:
        """Read what has come back and nobody asks for: MPICH fails when it ends with long messages unread."""
        for (peer, tag), lane in self._lanes.items():
            while lane.sent and self._post.has_word(peer, gradient_tag(tag)):
                self._post.recv_gradient(peer, gradient_tag(tag))


_all: weakref.WeakSet[Traffic] = weakref.WeakSet()
_of_others: weakref.WeakKeyDictionary[CommunicatorBase, Traffic] = weakref.WeakKeyDictionary()


def traffic_of(communicator: CommunicatorBase) -> Traffic:
    """Return what is remembered of a communicator, for as long as that lives.

    Communicators over one MPI communicator share it, since their messages can be received by each other.
    """
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


def _read_the_rest() -> None:
    for traffic in list(_all):
        if not MPI.Is_finalized():
            traffic.read_the_rest()


explain_stalls(_explain)
atexit.register(_read_the_rest)
