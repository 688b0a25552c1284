"""Which calls of MPI a rank makes to average gradients: a function of the strategy, the ranks and the gradients.

:mod:`simulation.recorder` records the calls of real runs; they must be equal to these. So these can stand for runs on
more ranks than one machine can start.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import NamedTuple

__all__ = ["CHECK_BYTES", "INT8_BLOCK", "Call", "calls", "leaders_of", "neighbours"]

CHECK_BYTES = 72  # of the check that all ranks have the same gradients: nine integers
OWN_BUCKET_BYTES, SHARED_BUCKET_BYTES = 4 * 1024 * 1024, 16 * 1024 * 1024
ITEM = 4  # all gradients are float32
INT8_BLOCK = 256  # elements that share a scale
INT8_CHUNK = 64 * 1024  # elements of a message


class Call(NamedTuple):
    """A call of MPI.

    Attributes:
        kind: The name of MPI's function; of two ranks that exchange a message, only the sender is recorded.
        ranks: The ranks of its communicator; of a message, the receiver; as numbers among all ranks.
        nbytes: The size of the array.
    """

    kind: str
    ranks: tuple[int, ...]
    nbytes: int


def calls(
    strategy: str, hosts: Sequence[int], rank: int, lengths: Sequence[int], compression: str = ""
) -> Iterator[Call]:
    """Yield the calls of a rank in one average.

    Args:
        strategy: The communicator's name.
        hosts: How many ranks each node has; several nodes. They are numbered node by node.
        rank: The rank.
        lengths: The number of elements of each gradient, in the order of their names; all of them float32.
        compression: ``Int8``, or nothing.
    """
    world = tuple(range(sum(hosts)))
    yield Call("Iallreduce", world, CHECK_BYTES)
    within, across = neighbours(hosts, rank)
    leaders = leaders_of(strategy, hosts)
    shares_memory = leaders > 0 and max(hosts) > 1
    if not shares_memory:
        for length in _buckets(strategy, lengths, shares_memory):
            yield from _average(world, rank, length, compression)
        return
    place = within.index(rank)
    for length in _buckets(strategy, lengths, shares_memory):
        shares = [length * i // leaders for i in range(leaders + 1)]
        yield Call("Barrier", within, 0)
        if leaders != len(within):  # ranks add up parts of a share that another rank owns
            yield Call("Barrier", within, 0)
        share = shares[place + 1] - shares[place] if place < leaders else 0
        if share:
            yield from _average(across, rank, share, compression)
        yield Call("Barrier", within, 0)


def leaders_of(strategy: str, hosts: Sequence[int]) -> int:
    """Return how many ranks of each node communicate with other nodes; 0 if nodes play no role."""
    return {"naive": 0, "flat": 0, "hierarchical": 1, "two_dimensional": min(hosts)}[strategy]


def neighbours(hosts: Sequence[int], rank: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Return the ranks of a rank's node, and the ranks that have its place on all nodes with such a place."""
    begins = [sum(hosts[:i]) for i in range(len(hosts))]
    node = max(i for i, begin in enumerate(begins) if begin <= rank)
    place = rank - begins[node]
    across = tuple(begin + place for begin, size in zip(begins, hosts, strict=True) if place < size)
    return tuple(range(begins[node], begins[node] + hosts[node])), across


def _buckets(strategy: str, lengths: Sequence[int], shares_memory: bool) -> Iterator[int]:
    """Yield the number of elements of each bucket."""
    if strategy == "naive":
        yield from lengths
        return
    most = (SHARED_BUCKET_BYTES if shares_memory else OWN_BUCKET_BYTES) // ITEM
    left = sum(lengths)
    while left:
        yield min(left, most)
        left -= min(left, most)


def _average(ranks: tuple[int, ...], rank: int, length: int, compression: str) -> Iterator[Call]:
    """Yield the calls that average an array over ranks."""
    if not compression:
        yield Call("Allreduce", ranks, ITEM * length)
    elif compression == "Int8":
        yield from _int8(ranks, ranks.index(rank), length)
    else:
        raise ValueError(f"expected compression Int8 or none, got {compression}")


def _int8(ranks: tuple[int, ...], place: int, length: int) -> Iterator[Call]:
    """Yield the messages of quantised blocks: summands to the owner of each range, then means to all other ranks."""
    size = len(ranks)
    blocks = -(-length // INT8_BLOCK)
    points = [min(length, blocks * i // size * INT8_BLOCK) for i in range(size + 1)]
    others = [(place + distance) % size for distance in range(1, size)]
    for other in others:
        for nbytes in _chunks(points[other + 1] - points[other]):
            yield Call("Isend", (ranks[other],), nbytes)
    for nbytes in _chunks(points[place + 1] - points[place]):
        for other in others:
            yield Call("Isend", (ranks[other],), nbytes)


def _chunks(length: int) -> Iterator[int]:
    """Yield the bytes of each message for a range: the elements, and the scales of their blocks."""
    for begin in range(0, length, INT8_CHUNK):
        elements = min(INT8_CHUNK, length - begin)
        yield elements + 4 * math.ceil(elements / INT8_BLOCK)
