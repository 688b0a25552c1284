"""The common parts of all compressions: the exchanged part of a bucket, and the memory for the omitted part."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any, NamedTuple, Protocol

import numpy as np

from mn_comm.basis.placement import array_module
from mn_comm.collectives.transport import Transport

_Array = Any  # NumPy's, or CuPy's


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

    All arrays are given by name, no name twice, in the same memory as the portions: host memory or the device.

    Args:
        omitted: Parts of the gradients that have not been sent yet. Their norm is reported.
        scaled: Other arrays that are proportional to the gradients, such as a momentum.
        unscaled: Arrays that do not depend on the size of the gradients, such as a count of steps.

    Attributes:
        now: The arrays after the last step; they must not be changed.
        new: Memory for the arrays after this step. Every exchange overwrites all of it.
        omitted: The names of the parts that have not been sent yet.
        unscaled: The names of arrays that stay as they are when the loss scale changes.
    """

    def __init__(
        self,
        omitted: Mapping[str, _Array] = MappingProxyType({}),
        scaled: Mapping[str, _Array] = MappingProxyType({}),
        unscaled: Mapping[str, _Array] = MappingProxyType({}),
    ) -> None:
        self.now: dict[str, _Array] = {**omitted, **scaled, **unscaled}
        self.new = {name: array_module(array).empty_like(array) for name, array in self.now.items()}
        self.omitted = frozenset(omitted)
        self.unscaled = frozenset(unscaled)

    def commit(self) -> None:
        """Keep the arrays of this step."""
        self.now, self.new = self.new, self.now


class Exchange(Protocol):
    """The compressed averaging of one portion.

    Attributes:
        memory: The arrays that are kept from step to step.
    """

    memory: Memory

    def average(self, transport: Transport, portion: _Array, step: int) -> None:
        """Overwrite a portion with its mean over the ranks, the same bit for bit on all of them; collective.

        Args:
            transport: The ranks, and how arrays are sent between them.
            portion: One-dimensional, of floats, of the same length and dtype on every rank.
            step: The number of steps before this one.
        """
        ...
