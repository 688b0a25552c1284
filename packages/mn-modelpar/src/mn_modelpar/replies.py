"""Replies to a value that was sent: its gradient, or a message that there is none. Sending a reply never waits.

The rank that received a value answers once: with the gradient, or with a message that no backward pass can reach the
value any more. If a rank sends a value and does not need its gradient, it says so before, and gets no answer. All these
messages use separate tags and nonblocking sends, so it does not matter when, or whether, the other rank receives them.
"""

from __future__ import annotations

import pickle
import time
from collections import defaultdict
from collections.abc import Sequence
from functools import partial
from typing import Any, NamedTuple, TypeAlias

import numpy as np

from mn_comm import Communicator, CommunicatorBase, building_blocks
from mn_comm.building_blocks import MPI, activity, as_bytes, operation, pieces
from mn_modelpar.values import Spec, spec_of

GRADIENT = "gradient"
NONE = "none"
UNWANTED = "unwanted"

_SLOW_NETWORK = 100e6  # bytes per second

_Array = np.ndarray[Any, Any]

_under_way: list[tuple[list[MPI.Request], list[_Array]]] = []
"""Buffers that must not be changed or freed before they have been sent; kept here, as they may outlive the
communicator."""


class Word(NamedTuple):
    """A message about the gradient of a value.

    Attributes:
        kind: ``GRADIENT``: the gradients of the value follow. ``NONE``: there will be no gradients. Both are sent to
            the sender of the value. ``UNWANTED``, sent to the receiver of the value: the sender needs no gradients.
        number: The number of the value among those between the two ranks under this tag; both ranks count them.
        specs: Shapes and dtypes of the arrays that follow.
    """

    kind: str
    number: int
    specs: tuple[Spec, ...] = ()


def gradient_tag(tag: int) -> int:
    """Return the tag under which the gradient of a value sent under ``tag`` comes back.

    Raises:
        ValueError: ``tag`` is in the upper half of MPI's tags, which gradients use.
    """
    limit = MPI.COMM_WORLD.Get_attr(MPI.TAG_UB) or 32767  # the minimum that the standard guarantees
    if not 0 <= tag <= limit // 2:
        raise ValueError(f"expected tag in 0..{limit // 2}, got {tag}")
    return int(limit - tag)


class Incoming:
    """A word and its arrays, as far as they have been received."""

    def __init__(self) -> None:
        self.word: list[tuple[Any, ...]] = []
        self.arrays: list[_Array] = []
        self.filled: list[None] = []  # one item for each piece of the arrays


def pieces_of(arrays: Sequence[_Array]) -> list[_Array]:
    """Return views of the bytes of C-contiguous arrays, none of them too long for MPI."""
    return [piece for array in arrays for piece in pieces(as_bytes(array))]


class NonblockingPost:
    """Sends words, and the gradients that follow them, to other ranks, and receives them, by MPI.

    Args:
        ranks: A private communicator: MPICH ends a job if a message on ``MPI_COMM_WORLD`` has not been received at the
            end, and these messages need not be received.
    """

    def __init__(self, ranks: building_blocks.Ranks) -> None:
        self._ranks = ranks
        self._incoming: dict[tuple[int, int], Incoming] = defaultdict(Incoming)

    @property
    def is_closed(self) -> bool:
        """Whether the communicator has been freed."""
        return bool(self._ranks == MPI.COMM_NULL)

    def post(self, word: Word, arrays: Sequence[_Array], peer: int, tag: int) -> None:
        """Start sending a word and its arrays in host memory, which may be changed afterwards.

        Returns when the message has been sent, or will not be sent without the receiver.
        """
        # Copies: the owner may add to a gradient or average it in place afterwards.
        copies = [np.array(array, order="C") for array in arrays]
        # A plain tuple: no Python code runs to unpickle it.
        messages = [np.frombuffer(pickle.dumps(tuple(word)), np.uint8), *pieces_of(copies)]
        requests: list[MPI.Request] = []
        _under_way[:] = [other for other in _under_way if not MPI.Request.Testall(other[0])]
        _under_way.append((requests, messages))
        # One call of C, within which no signal handler can run: the messages stay together, and keep their memory.
        requests.extend(map(partial(MPI.Intracomm.Isend, self._ranks, dest=peer, tag=tag), messages))
        # On some networks, a send makes progress only when this rank calls MPI. If the peer receives the message at
        # all, it has it by then.
        until = time.monotonic() + sum(copy.nbytes for copy in copies) / _SLOW_NETWORK
        while not MPI.Request.Testall(requests) and time.monotonic() < until:
            pass

    def has_word(self, peer: int, tag: int) -> bool:
        """Return whether a word has arrived."""
        return bool(self._ranks.Iprobe(peer, tag))

    @operation
    def recv_gradient(self, source: int, tag: int) -> tuple[Word, list[_Array]]:
        """Wait for a word, and receive its arrays; continue what a signal handler that raised has interrupted."""
        incoming = self._incoming[source, tag]
        # Calls of C put what they receive into lists: no handler can run before it is there.
        if not incoming.word:
            receive = partial(MPI.Intracomm.recv, self._ranks, None, source)
            activity().wait_for(incoming.word.extend, "recv", self._ranks, (map(receive, [tag]),))
        word = Word(*incoming.word[0])
        if not incoming.filled:
            incoming.arrays = [np.empty(shape, dtype) for shape, dtype in word.specs]
            fill = partial(MPI.Intracomm.Recv, self._ranks, source=source, tag=tag)
            activity().wait_for(incoming.filled.extend, "Recv", self._ranks, (map(fill, pieces_of(incoming.arrays)),))
        del self._incoming[source, tag]
        return word, incoming.arrays


class BlockingPost:
    """Does the same by the methods of a foreign communicator: it sends only gradients, and waits for the receiver.

    Args:
        communicator: The communicator.
    """

    is_closed = False

    def __init__(self, communicator: CommunicatorBase) -> None:
        self._communicator = communicator

    def post(self, word: Word, arrays: Sequence[_Array], peer: int, tag: int) -> None:
        """Send a gradient; skip any other word."""
        if word.kind == GRADIENT:
            self._communicator.send((*arrays, np.array(word.number)), peer, tag)

    def has_word(self, peer: int, tag: int) -> bool:
        """Return ``False``: there is no way to ask."""
        del peer, tag
        return False

    def recv_gradient(self, source: int, tag: int) -> tuple[Word, list[_Array]]:
        """Receive a gradient."""
        *arrays, number = self._communicator.recv(source, tag)
        return Word(GRADIENT, int(number), tuple(map(spec_of, arrays))), arrays


Post: TypeAlias = NonblockingPost | BlockingPost


def post_of(communicator: CommunicatorBase) -> Post:
    """Return the object that sends gradients among the ranks of a communicator."""
    if isinstance(communicator, Communicator):
        return NonblockingPost(communicator.ranks)
    return BlockingPost(communicator)
