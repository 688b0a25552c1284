"""The parts of gradients of which buckets consist, and the ranges of a bucket that ranks own."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Mapping, Sequence
from itertools import pairwise
from operator import itemgetter
from types import EllipsisType
from typing import Any, NamedTuple

import numpy as np

Spec = tuple[str, tuple[int, ...], np.dtype[Any]]  # the name, shape and dtype of a gradient
Arrays = Sequence[Any] | Mapping[int, Any]  # gradients by their positions among those that take part

# A rank of a node adds up what it owns if this is at most this many times the mean over the node's ranks.
_MOST_UNEVEN = 1.25


class Part(NamedTuple):
    """A gradient in a bucket, or consecutive elements of one."""

    member: int  # the position of the gradient among those that take part
    within: slice | EllipsisType  # the elements of the flattened gradient; `...` for the whole gradient with its shape
    begin: int  # where it begins in the bucket, in elements
    end: int  # where it ends

    def shape(self, specs: Sequence[Spec]) -> tuple[int, ...]:
        """Return its shape, given the names, shapes and dtypes of all gradients."""
        return specs[self.member][1] if self.within is ... else (self.end - self.begin,)


class Exchanged(NamedTuple):
    """The part of a bucket that a rank exchanges."""

    layout: int  # the number of the bucket's layout
    parts: Sequence[Part]  # the parts of gradients in the bucket
    specs: Sequence[Spec]  # the names, shapes and dtypes of all gradients
    begin: int  # where the part begins in the bucket, in elements


class Ranges(NamedTuple):
    """The ranges of a bucket that each rank gets."""

    owners: Sequence[tuple[int, int]]  # for each range its beginning and its owner; empty if all ranks get all means
    # For each rank of this node that communicates with other nodes, where its share begins, and where the last one
    # ends; on a single node, the ranges that the ranks add up.
    shares: Sequence[int]
    # For each of the ranks, one of each node, between which this rank's share is exchanged, the range of the share that
    # belongs to its node; empty if this rank does not communicate with other nodes.
    destinations: Sequence[slice]

    def are_kept(self, begin: int, rank: int) -> bool:
        """Return whether a rank gets the elements at a position."""
        index = bisect_right(self.owners, begin, key=itemgetter(0)) - 1
        return index < 0 or self.owners[index][1] == rank

    @property
    def are_shares(self) -> bool:
        """Return whether each rank gets exactly its share."""
        return [begin for begin, _ in self.owners] == list(self.shares[:-1])


def count(shape: tuple[int, ...]) -> int:
    """Return how many elements an array of this shape has."""
    return int(np.prod(shape, dtype=np.int64))


def bounds(length: int, shares: int) -> list[int]:
    """Return where each of almost equal shares of ``length`` elements begins, and where the last one ends."""
    return [length * i // shares for i in range(shares + 1)]


def even_or(shares: Sequence[int], equal: Sequence[int]) -> Sequence[int]:
    """Return where each rank's part begins: its share, unless one share is much larger than the others, or too few.

    One more barrier takes less time than waiting for that rank.
    """
    most = max((end - begin for begin, end in pairwise(shares)), default=0)
    is_even = len(shares) == len(equal) and most * (len(equal) - 1) <= _MOST_UNEVEN * equal[-1] + len(equal)
    return shares if is_even else equal
