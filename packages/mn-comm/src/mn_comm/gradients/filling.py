"""Which gradients go into which bucket, and in which order: as they are sent, or so that means reach their owners."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from mn_comm.collectives.halving import order_of_ranges
from mn_comm.gradients.parts import Part, Ranges, Spec, count
from mn_comm.gradients.strategy import Strategy

_Dtype = np.dtype[Any]


def fill_buckets(
    specs: Sequence[Spec], order: Sequence[int], most_bytes: int | None, *, whole: bool
) -> Iterator[list[Part]]:
    """Yield the parts of each bucket, in the order in which the last of them appear.

    Gradients without elements are in no bucket. ``order`` has the positions of the others in the order in which they
    are to be sent, the same on every rank. With ``whole``, gradients are not split; then a bucket may hold a single
    gradient that is larger than ``most_bytes``.
    """
    filling: dict[_Dtype, list[Part]] = {}
    for member in order:
        _, shape, dtype = specs[member]
        length, done = count(shape), 0
        while done < length:
            parts = filling.setdefault(dtype, [])
            held = parts[-1].end if parts else 0
            room = length if most_bytes is None else max(1, most_bytes // dtype.itemsize) - held
            taken = length if whole else min(length - done, room)
            if not taken or (parts and taken > room):
                yield filling.pop(dtype)
                continue
            within = ... if taken == length else slice(done, done + taken)
            parts.append(Part(member, within, held, held + taken))
            done += taken
    yield from filling.values()


class Owners(NamedTuple):
    """Which rank alone needs the mean of which gradient; the same on every rank, which is checked.

    Attributes:
        of: The owners by the names of parameters. All ranks need the means of parameters that are not listed.
        note: Other data that must be the same on every rank.
    """

    of: Mapping[str, int]
    note: object = None


class Ownership:
    """Fills buckets so that all elements that a rank owns are adjacent; creating it is collective.

    A bucket consists of shares, one for each rank of a node that communicates with other nodes. A share consists of
    ranges, one for each node, with elements that the ranks of that node own. Ranks that share no memory count as one
    node each.
    """

    def __init__(self, strategy: Strategy, owners: Owners, specs: Sequence[Spec]) -> None:
        topology = strategy.context.topology
        self._strategy = strategy
        self._owner_of = {i: owners.of[name] for i, (name, *_) in enumerate(specs) if name in owners.of}
        self._places: list[tuple[int, int]] = strategy.context.ranks.allgather(
            (topology.inter_rank, topology.intra_rank)
        )

    def has(self, member: int) -> bool:
        """Return whether a gradient has an owner."""
        return member in self._owner_of

    def fill(
        self, specs: Sequence[Spec], order: Sequence[int], most_bytes: int, *, whole: bool
    ) -> Iterator[list[Part]]:
        """Distribute gradients over buckets; see :func:`fill_buckets`.

        Gradients without an owner are in no bucket. Unless gradients must not be split, all buckets of a dtype have the
        same proportion of elements for each owner.
        """
        # All ranks in the order in which the elements that they own are placed in a bucket.
        owners = [owner for nodes in self._groups() for node in nodes for owner in node]
        order = [member for member in order if self.has(member)]
        if whole:
            for parts in fill_buckets(specs, order, most_bytes, whole=True):
                yield _join([[part for part in parts if self._owner_of[part.member] == owner] for owner in owners])
            return
        for dtype in dict.fromkeys(specs[member][2] for member in order):
            of_owner: dict[int, list[int]] = {owner: [] for owner in owners}
            for member in order:
                if specs[member][2] == dtype:
                    of_owner[self._owner_of[member]].append(member)
            lengths = [sum(count(specs[member][1]) for member in members) for members in of_owner.values()]
            n_buckets = max(1, -(-sum(lengths) * dtype.itemsize // most_bytes))
            streams = [
                fill_buckets(specs, members, -(-length // n_buckets) * dtype.itemsize, whole=False)
                for members, length in zip(of_owner.values(), lengths, strict=True)
            ]
            for together in itertools.zip_longest(*streams, fillvalue=[]):
                yield _join(together)

    def ranges(self, parts: Sequence[Part]) -> Ranges:
        """Return the ranges of a bucket that each rank gets."""
        begin, owners, ends = 0, [], [0]
        destinations: list[slice] = []
        held = dict.fromkeys(range(len(self._places)), 0)
        for part in parts:
            held[self._owner_of[part.member]] += part.end - part.begin
        for leader, nodes in enumerate(self._groups()):
            begins = []
            for node in nodes:
                begins.append(begin - ends[-1])
                for owner in node:
                    owners.append((begin, owner))
                    begin += held[owner]
            if leader == self._strategy.place:
                destinations = _by_rank([*begins, begin - ends[-1]])
            ends.append(begin)
        # If no rank communicates with other nodes, these are the ranges that the ranks add up.
        shares = self._strategy.adders_of(begin, ends) if self._strategy.takes_one_step else ends
        return Ranges(owners, shares, destinations)

    def _groups(self) -> list[list[list[int]]]:
        """Return, for each communicating rank of a node and each node, the ranks whose ranges it exchanges."""
        shares_memory = self._strategy.shares_memory
        places = self._places if shares_memory else [(rank, 0) for rank in range(len(self._places))]
        n_leaders = self._strategy.n_leaders if shares_memory else 1
        groups: list[list[list[int]]] = [[[] for _ in range(max(places)[0] + 1)] for _ in range(n_leaders)]
        for rank, (node, number) in enumerate(places):
            groups[number % n_leaders][node].append(rank)
        return [[nodes[node] for node in order_of_ranges(len(nodes))] for nodes in groups]


def _by_rank(begins: Sequence[int]) -> list[slice]:
    """Return the range of each rank, given where they begin in the order in which they lie, and where the last ends."""
    order = order_of_ranges(len(begins) - 1)
    found = {rank: slice(*ends) for rank, ends in zip(order, itertools.pairwise(begins), strict=True)}
    return [found[rank] for rank in range(len(order))]


def _join(groups: Sequence[Sequence[Part]]) -> list[Part]:
    """Join the parts of several groups, one after the other, in one bucket."""
    joined: list[Part] = []
    for part in itertools.chain.from_iterable(groups):
        begin = joined[-1].end if joined else 0
        joined.append(part._replace(begin=begin, end=begin + part.end - part.begin))
    return joined
