"""What goes back for a value that was sent: its gradient, or word that there is none. Nobody waits to say so.

The rank that received a value answers once: with the gradient, or that no backward pass can reach the value any more. A
rank that sends a value whose gradient nobody there needs says so ahead of it, and gets no answer. All this travels
under tags of its own, by nonblocking sends: whether the other side looks at it is the other side's business.
"""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from mn_comm import MPI, Communicator, CommunicatorBase, Ranks, operation
from mn_modelpar.functions.values import Spec, spec_of

__all__ = ["GRADIENT", "NONE", "UNWANTED", "Post", "Word", "gradient_tag", "post_of"]

GRADIENT = "gradient"
NONE = "none"
UNWANTED = "unwanted"

_PIECE_BYTES = 1 << 30  # Open MPI refuses a count above 2**31-1
_SLOW_NETWORK = 100e6  # bytes per second

_Array = np.ndarray[Any, Any]

_under_way: list[tuple[list[MPI.Request], list[_Array]]] = []
"""What was posted and may not be changed or freed before it has left; here, since it may outlive its communicator."""


class Word(NamedTuple):
    """What goes back, or ahead.

    Attributes:
        kind: ``GRADIENT``: the arrays that follow are the value's. ``NONE``: there will be none. Both go back to the
            sender of the value. ``UNWANTED``: to its receiver, the sender needs none.
        number: Which value between the two ranks under this tag is meant: both count alike.
        specs: Shapes and dtypes of the arrays that follow.
    """

    kind: str
    number: int
    specs: tuple[Spec, ...] = ()


def gradient_tag(tag: int) -> int:
    """Return the tag under which the gradient of a value sent under ``tag`` comes back.

    Raises:
        ValueError: ``tag`` lies in the upper half of MPI's tags, which gradients use.
    """
    limit = MPI.COMM_WORLD.Get_attr(MPI.TAG_UB) or 32767  # the least that the standard promises
    if not 0 <= tag <= limit // 2:
        raise ValueError(f"expected tag in 0..{limit // 2}, got {tag}")
    return int(limit - tag)


class Post(ABC):
    """How words, and the gradients that follow them, travel to another rank and from there."""

    @abstractmethod
    def post(self, word: Word, arrays: Sequence[_Array], peer: int, tag: int) -> None:
        """Send a word and its arrays, in host memory, which may change afterwards."""

    @abstractmethod
    def has_word(self, peer: int, tag: int) -> bool:
        """Return whether a word has arrived."""

    @abstractmethod
    def recv_gradient(self, source: int, tag: int) -> tuple[Word, list[_Array]]:
        """Wait for a word, and receive its arrays."""


class NonblockingPost(Post):
    """By MPI.

    Args:
        ranks: The communicator's own: MPICH ends a job in which ``MPI_COMM_WORLD`` is left with a message that nobody
            has received, and nobody has to receive these.
    """

    def __init__(self, ranks: Ranks) -> None:
        self._ranks = ranks

    def post(self, word: Word, arrays: Sequence[_Array], peer: int, tag: int) -> None:
        """Start sending; return when that is done, or cannot be expected to be done by itself."""
        # Copies: whoever owns them goes on, and may add to a gradient or average it in place.
        copies = [np.array(array, order="C") for array in arrays]
        requests = [self._ranks.isend(word, peer, tag)]
        requests += [self._ranks.Isend(piece, peer, tag) for copy in copies for piece in _pieces(copy)]
        _under_way[:] = [other for other in _under_way if not MPI.Request.Testall(other[0])]
        _under_way.append((requests, copies))
        # On some networks nothing moves unless this side asks. A peer that takes it has it by then; another never will.
        until = time.monotonic() + sum(copy.nbytes for copy in copies) / _SLOW_NETWORK
        while not MPI.Request.Testall(requests) and time.monotonic() < until:
            pass

    def has_word(self, peer: int, tag: int) -> bool:
        """Ask MPI."""
        return bool(self._ranks.Iprobe(peer, tag))

    @operation
    def recv_gradient(self, source: int, tag: int) -> tuple[Word, list[_Array]]:
        """Receive."""
        word = Word(*self._ranks.recv(source=source, tag=tag))
        arrays = [np.empty(shape, dtype) for shape, dtype in word.specs]
        for array in arrays:
            for piece in _pieces(array):
                self._ranks.Recv(piece, source, tag)
        return word, arrays


class BlockingPost(Post):
    """By the methods of a communicator that is none of ours: only gradients travel, and each waits to be received.

    Args:
        communicator: The communicator.
    """

    def __init__(self, communicator: CommunicatorBase) -> None:
        self._communicator = communicator

    def post(self, word: Word, arrays: Sequence[_Array], peer: int, tag: int) -> None:
        """Send a gradient; leave out any other word."""
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


def post_of(communicator: CommunicatorBase) -> Post:
    """Return how gradients travel among the ranks of a communicator."""
    if isinstance(communicator, Communicator):
        return NonblockingPost(communicator.ranks)
    return BlockingPost(communicator)


def _pieces(array: _Array) -> list[_Array]:
    flat = array.reshape(-1).view(np.uint8)
    return [flat[begin : begin + _PIECE_BYTES] for begin in range(0, flat.size, _PIECE_BYTES)]
