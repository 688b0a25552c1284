"""What the functions remember of each other's messages, so that a mistake has a name.

Three things go wrong in models that span processes, and each is silent by nature:

- A part of the graph is cut off: its ``send`` never receives its gradient. When a backward pass ends, every ``send``
  and ``recv`` whose node is gone without its backward having run, while others of the communicator ran, is reported.
- Gradients come back in another order than the values went: each carries the number of its value, and is kept until
  the ``send`` of that number asks for it.
- A gradient is taken for a value of the next pass: gradients travel under tags of their own.
"""

from __future__ import annotations

import weakref
from collections import Counter, defaultdict
from collections.abc import Sequence
from typing import Any

import chainer
import numpy as np

from mn_comm import MPI, Communicator, CommunicatorBase, explain_stalls, waiting_for
from mn_modelpar.callsite import CallSite, call_site
from mn_modelpar.staging import empty_like

__all__ = ["Anchor", "MessageRecord", "Record", "Traffic", "gradient_tag", "traffic_of"]

_Array = np.ndarray[Any, Any]

_ADVICE = (
    "connect it to what is back-propagated: pass what send() returned on as the delegate_variable of the next recv(), "
    "join it by pseudo_connect(), or return it; what is not meant to be back-propagated belongs into "
    "chainer.no_backprop_mode()"
)


def gradient_tag(tag: int) -> int:
    """Return the tag under which the gradient of a value sent under ``tag`` comes back.

    Raises:
        ValueError: ``tag`` lies in the upper half of MPI's tags, which gradients use.
    """
    limit = MPI.COMM_WORLD.Get_attr(MPI.TAG_UB) or 32767  # the least that the standard promises
    if not 0 <= tag <= limit // 2:
        raise ValueError(f"expected tag in 0..{limit // 2}, got {tag}")
    return int(limit - tag)


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


class Traffic:
    """The messages between this rank and the others on one communicator."""

    def __init__(self) -> None:
        self._counts: Counter[tuple[object, ...]] = Counter()
        self._arrived: dict[tuple[int, int], dict[int, list[_Array]]] = defaultdict(dict)
        self._open: dict[tuple[object, ...], list[Record]] = {}
        self._ran: set[tuple[object, ...]] = set()

    def number(self, direction: str, peer: int, tag: int) -> int:
        """Return which message this is to or from a peer under a tag: both sides count alike."""
        key = (direction, peer, tag)
        self._counts[key] += 1
        return self._counts[key]

    def opened(self, record: Record, node: chainer.FunctionNode) -> None:
        """Expect the backward of a call, if it is part of a graph; in training, its being cut off is a mistake."""
        record.node = weakref.ref(node)
        record.may_be_cut_off |= not chainer.config.train
        if chainer.config.enable_backprop:
            others = self._open.get(record.key, [])
            # One that is cut off stands for all like it: memory stays bounded where nothing is ever back-propagated.
            gone = [other for other in others if other.is_cut_off]
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
        others = [other for other in self._open.get(record.key, []) if other is not record]
        if others:
            self._open[record.key] = others
        else:
            self._open.pop(record.key, None)

    def backward_ended(self) -> None:
        """Look for calls that this backward pass has left out for good.

        Raises:
            RuntimeError: There are some.
        """
        if not self._ran:
            return
        ran, self._ran = self._ran, set()
        gone = [record for records in self._open.values() for record in records if record.is_cut_off]
        for record in gone:
            self._forget(record)
        # The same call ran in this pass: the other one was a pass of its own, for which nobody wanted gradients.
        mistakes = [record for record in gone if record.key not in ran and not record.may_be_cut_off]
        if mistakes:
            calls = "; ".join(map(str, mistakes))
            raise RuntimeError(f"the backward pass has ended, but the backward of {calls} never ran; {_ADVICE}")

    def check_arrivals(self, communicator: CommunicatorBase) -> None:
        """Look, before a value travels, for gradients that came back to a call which is cut off.

        Raises:
            RuntimeError: There is one.
        """
        if not isinstance(communicator, Communicator):
            return  # a script's own may have no MPI communicator to look at
        for records in list(self._open.values()):
            for record in list(records):
                if isinstance(record, MessageRecord) and record.operation == "send" and record.is_cut_off:
                    self._collect_waiting(communicator, record)

    def _collect_waiting(self, communicator: CommunicatorBase, record: MessageRecord) -> None:
        waiting = self._arrived[record.peer, record.tag]
        while communicator.mpi_comm.Iprobe(record.peer, gradient_tag(record.tag)):
            self._receive(communicator, record.peer, record.tag)
        if waiting.pop(record.number, None) is not None:
            self._forget(record)
            raise RuntimeError(
                f"the gradient of {record} came back from rank {record.peer}, but nothing here leads to it any more; "
                f"{_ADVICE}"
            )

    def take_gradient(self, communicator: CommunicatorBase, record: MessageRecord) -> list[_Array]:
        """Receive the gradient of what a ``send`` has sent; point-to-point.

        Args:
            communicator: The communicator it was sent on.
            record: The call of ``send``.

        Returns:
            One array for each that was sent.
        """
        waiting = self._arrived[record.peer, record.tag]
        with waiting_for(lambda: f"the gradient of {record}"):
            while record.number not in waiting:
                number = self._receive(communicator, record.peer, record.tag)
                if number != record.number and not self._is_expected(record, number):
                    raise RuntimeError(
                        f"the gradient of {record}: rank {record.peer} sent that of value number {number}, expected "
                        f"{record.number}; what the function send() sends must be received by recv(), not by a method "
                        "of the communicator"
                    )
        return waiting.pop(record.number)

    def _receive(self, communicator: CommunicatorBase, peer: int, tag: int) -> int:
        *arrays, number = communicator.recv(peer, gradient_tag(tag))
        self._arrived[peer, tag][int(number)] = arrays
        return int(number)

    def _is_expected(self, like: MessageRecord, number: int) -> bool:
        """Whether another call, of the same peer and tag, waits for the gradient of that number."""
        return any(
            isinstance(other, MessageRecord)
            and (other.operation, other.peer, other.tag, other.number) == ("send", like.peer, like.tag, number)
            and not other.is_cut_off
            for records in self._open.values()
            for other in records
        )

    def _forget(self, record: Record) -> None:
        left = [other for other in self._open[record.key] if other is not record]
        if left:
            self._open[record.key] = left
        else:
            del self._open[record.key]

    def pending(self) -> list[str]:
        """Return, in words, the calls whose backward has not run yet."""
        return [str(record) for records in self._open.values() for record in records]


class MessageRecord(Record):
    """One call of ``send``, or of ``recv``: a value that a gradient belongs to.

    Args:
        operation: Which of the two.
        peer: The other rank.
        tag: The tag under which the value travels.
    """

    def __init__(self, operation: str, peer: int, tag: int) -> None:
        super().__init__(operation, f"rank={peer}, tag={tag}", may_be_cut_off=False)
        self.peer = peer
        self.tag = tag
        self.number = 0  # which message this is, known once it has travelled


_traffic: weakref.WeakKeyDictionary[CommunicatorBase, Traffic] = weakref.WeakKeyDictionary()


def traffic_of(communicator: CommunicatorBase) -> Traffic:
    """Return what is remembered of a communicator, for as long as that lives."""
    found = _traffic.get(communicator)
    if found is None:
        found = _traffic[communicator] = Traffic()
    return found


def _explain() -> Sequence[str]:
    pending = [text for traffic in list(_traffic.values()) for text in traffic.pending()]
    return [f"its backward has not run: {text}" for text in pending]


explain_stalls(_explain)
