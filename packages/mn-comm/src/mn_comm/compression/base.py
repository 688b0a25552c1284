"""The common parts of all compressions: the exchanged part of a bucket, and the memory for the omitted part."""

from __future__ import annotations

import dataclasses
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple, Protocol

import numpy as np

from mn_comm.placement import array_module

if TYPE_CHECKING:
    from mn_comm.ranks import Ranks

__all__ = [
    "TAG",
    "Compression",
    "Exchange",
    "Link",
    "Memory",
    "Messages",
    "Piece",
    "Portion",
    "set_integer",
    "set_number",
]

_Array = Any  # NumPy's, or CuPy's
TAG = 7
"""Of all messages of compression."""
# MPI counts bytes with 31 bits.
_MOST_BYTES = 1 << 30


class Piece(NamedTuple):
    """Consecutive elements of one gradient.

    Attributes:
        begin: Its first element in the portion.
        end: Where it ends.
        shape: The shape of the whole gradient.
        start: Which element of the flattened gradient it begins with.
    """

    begin: int
    end: int
    shape: tuple[int, ...]
    start: int


class Portion(NamedTuple):
    """The part of a bucket that one rank exchanges: the whole bucket, or its share.

    Attributes:
        length: How many elements it has.
        pieces: The pieces of gradients that it consists of.
        rank: The number of this rank among those that exchange.
        size: How many ranks exchange.
        xp: The module of functions for its array: NumPy, or CuPy for one on a device.
    """

    length: int
    pieces: Sequence[Piece]
    rank: int
    size: int
    xp: Any = np


class Memory:
    """Arrays that are kept for a portion from step to step, and arrays that replace them if the step succeeds.

    Args:
        arrays: The arrays by name; in the same memory as the portions: host memory or the device.

    Attributes:
        now: The arrays after the last step; they must not be changed.
        new: Memory for the arrays after this step. Every exchange overwrites all of it.
    """

    def __init__(self, **arrays: _Array) -> None:
        self.now = arrays
        self.new = {name: array_module(array).empty_like(array) for name, array in arrays.items()}

    def commit(self) -> None:
        """Keep the arrays of this step."""
        self.now, self.new = self.new, self.now


class Link:
    """The ranks that exchange, the transport between them for arrays in host memory, and a count of the bytes sent.

    For arrays on devices see :mod:`mn_comm.device.links`.

    Attributes:
        ranks: The ranks.
        sent: How many bytes this rank has sent to others.
    """

    def __init__(self, ranks: Ranks) -> None:
        self.ranks = ranks
        self.sent = 0

    def swap(self, outgoing: Messages, incoming: Messages, what: str) -> None:
        """Send arrays to other ranks, and receive some from them; collective.

        Args:
            outgoing: For each rank that receives arrays, these arrays: one-dimensional and contiguous.
            incoming: For each rank that sends arrays, arrays of the same lengths and dtypes, to be overwritten.
            what: The name of the operation that it is a part of.
        """
        requests = [self.ranks.Irecv(piece, other, TAG) for other, piece in _pieces(incoming)]
        requests += [self.ranks.Isend(piece, other, TAG) for other, piece in _pieces(outgoing)]
        for request in requests:
            self.ranks.wait_with_pauses(request, what)
        self.count(outgoing)

    def count(self, outgoing: Messages) -> None:
        """Record the number of bytes sent."""
        self.sent += sum(array.nbytes for arrays in outgoing.values() for array in arrays)


Messages = Mapping[int, Sequence[_Array]]


def _pieces(messages: Messages) -> Iterator[tuple[int, _Array]]:
    for other, arrays in messages.items():
        for message in (array.view(np.uint8) for array in arrays):
            for begin in range(0, message.size, _MOST_BYTES):
                yield other, message[begin : begin + _MOST_BYTES]


class Exchange(Protocol):
    """The compressed averaging of one portion.

    Attributes:
        memory: The arrays that are kept from step to step.
    """

    memory: Memory

    def average(self, link: Link, portion: _Array, step: int) -> None:
        """Overwrite a portion with its mean over the ranks, the same bit for bit on all of them; collective.

        Args:
            link: The ranks.
            portion: One-dimensional, of floats, of the same length and dtype on every rank.
            step: The number of steps before this one.
        """
        ...


@dataclasses.dataclass(frozen=True)
class Compression(ABC):
    """A way to compress gradients: an immutable object with its settings, the same on every rank.

    Attributes:
        on_devices: Whether its exchanges can also average portions on a device, with CuPy as ``Portion.xp``. Otherwise,
            gradients on a device are copied to host memory and compressed there.
        is_launched: Whether such an exchange only puts work on the current stream and never waits for the device,
            because the lengths of its messages are known before.
    """

    on_devices: ClassVar[bool] = False
    is_launched: ClassVar[bool] = False

    @abstractmethod
    def exchange(self, portion: Portion) -> Exchange:
        """Return an object that averages such a portion; not collective.

        Args:
            portion: The description of the portion.
        """


def set_integer(settings: Compression, name: str, least: int) -> None:
    """Make a setting an ``int``, so that equal settings also have the same ``repr``; raise unless it is an integer.

    Raises:
        TypeError: It is not an integer.
        ValueError: It is too small.
    """
    value = getattr(settings, name)
    if isinstance(value, bool) or not isinstance(value, (int, np.integer)):
        raise TypeError(f"expected an integer for {name}, got {type(value).__name__}: {value!r:.80}")
    if value < least:
        raise ValueError(f"expected {name} of at least {least}, got {value}")
    object.__setattr__(settings, name, int(value))


def set_number(settings: Compression, name: str) -> None:
    """Make a setting a ``float``; raise ``TypeError`` unless it is a real number."""
    value = getattr(settings, name)
    if isinstance(value, bool) or not isinstance(value, (int, float, np.integer, np.floating)):
        raise TypeError(f"expected a number for {name}, got {type(value).__name__}: {value!r:.80}")
    object.__setattr__(settings, name, float(value))
