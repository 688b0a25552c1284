"""What the compressions have in common: the part of a bucket that is exchanged, and the memory of what was left out."""

from __future__ import annotations

import dataclasses
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import numpy as np

if TYPE_CHECKING:
    from mn_comm.ranks import Ranks

__all__ = ["Compression", "Exchange", "Link", "Memory", "Piece", "Portion", "check_integer", "check_number"]

_Array = np.ndarray[Any, Any]


class Piece(NamedTuple):
    """Consecutive elements of one gradient.

    Attributes:
        begin: Where it begins in the portion, in elements.
        end: Where it ends.
        shape: The shape of the whole gradient.
        start: Which element of the flattened gradient it begins with.
    """

    begin: int
    end: int
    shape: tuple[int, ...]
    start: int


class Portion(NamedTuple):
    """What one rank exchanges of a bucket: all of it, or its share.

    Attributes:
        length: How many elements it has.
        pieces: What it consists of.
        rank: This rank among those that exchange.
        size: How many ranks exchange.
    """

    length: int
    pieces: Sequence[Piece]
    rank: int
    size: int


class Memory:
    """What is kept of a portion from step to step: arrays, and the ones that replace them if the step succeeds.

    Args:
        arrays: The arrays by name.

    Attributes:
        now: What the last step has left; only read.
        new: Memory for what this step leaves. Every exchange overwrites all of it.
    """

    def __init__(self, **arrays: _Array) -> None:
        self.now = arrays
        self.new = {name: np.empty_like(array) for name, array in arrays.items()}

    def commit(self) -> None:
        """Keep what this step has left."""
        self.now, self.new = self.new, self.now


class Link:
    """The ranks that exchange, and a count of what this one has sent them.

    Attributes:
        ranks: The ranks.
        sent: How many bytes this rank has sent to others.
    """

    def __init__(self, ranks: Ranks) -> None:
        self.ranks = ranks
        self.sent = 0


class Exchange(Protocol):
    """The compressed averaging of one portion.

    Attributes:
        memory: What is kept from step to step.
    """

    memory: Memory

    def average(self, link: Link, portion: _Array, step: int) -> None:
        """Overwrite a portion with its mean over the ranks, bit for bit the same on all of them; collective.

        Args:
            link: The ranks.
            portion: One-dimensional, of floats, of the same length and dtype on every rank.
            step: How many steps were taken before this one.
        """
        ...


@dataclasses.dataclass(frozen=True)
class Compression(ABC):
    """A way to compress gradients: an immutable object of numbers, the same on every rank."""

    @abstractmethod
    def exchange(self, portion: Portion) -> Exchange:
        """Return what averages such a portion; not collective.

        Args:
            portion: Its description.
        """


def check_integer(name: str, value: Any, least: int) -> None:
    """Raise unless ``value`` is an integer of at least ``least``.

    Raises:
        TypeError: It is no integer.
        ValueError: It is too small.
    """
    if isinstance(value, bool) or not isinstance(value, (int, np.integer)):
        raise TypeError(f"expected an integer for {name}, got {type(value).__name__}: {value!r:.80}")
    if value < least:
        raise ValueError(f"expected {name} of at least {least}, got {value}")


def check_number(name: str, value: Any) -> None:
    """Raise ``TypeError`` unless ``value`` is a real number."""
    if isinstance(value, bool) or not isinstance(value, (int, float, np.integer, np.floating)):
        raise TypeError(f"expected a number for {name}, got {type(value).__name__}: {value!r:.80}")
