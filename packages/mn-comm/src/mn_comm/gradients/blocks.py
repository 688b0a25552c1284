"""The blocks of a bucket: what the ranks of a node add up at a time, so that it stays in a core's cache."""

from __future__ import annotations

import itertools
from bisect import bisect_right
from collections.abc import Callable, Iterator, Sequence
from operator import itemgetter
from typing import Any, NamedTuple

import numpy as np

from mn_comm.basis.arithmetic import sum_dtype
from mn_comm.gradients.parts import Arrays, Part, Ranges, Spec
from mn_comm.gradients.strategy import Strategy

_Array = np.ndarray[Any, Any]

# The bytes that a rank adds up at a time: with the same part of a few neighbors, they fit into a core's second-level
# cache.
_BLOCK_BYTES = 256 * 1024
# Smaller parts of gradients are packed and unpacked together; larger ones are read and written in place.
_LARGE_BYTES = 16 * 1024


class Block(NamedTuple):
    """Consecutive elements of a bucket that are processed together, while they are in the cache.

    If they belong to one gradient, all memory has the shape of this part; otherwise it is one-dimensional.
    """

    select: Callable[[Arrays], Any]  # selects its arrays from all gradients; the array itself if there is only one
    adder: int  # the rank of the node that adds it up
    owner: int  # the rank whose memory holds the sum
    segments: list[_Array]  # the memory for it of every rank of the node, or of only this rank
    mine: _Array  # this rank's memory for it
    sum: _Array  # the owner's memory, or scratch memory if only the rank that adds it up needs the sum
    room: _Array  # scratch memory of the bucket's dtype
    total: _Array  # scratch memory of the dtype in which it is added up
    pieces: list[_Array]  # views of `room` that have the shapes of the arrays; empty if there is only one
    is_kept: bool  # whether this rank needs the mean


def scratch_memory(strategy: Strategy) -> _Array:
    """Return memory for one block: in the dtype in which it is sent, and in the one in which it is added up."""
    return np.empty(3 * _BLOCK_BYTES if strategy.shares_memory else 0, np.uint8)


def cut_into_blocks(
    parts: Sequence[Part],
    specs: Sequence[Spec],
    ranges: Ranges,
    segments: Sequence[_Array],
    room: _Array,
    strategy: Strategy,
    lasting: bool,
) -> tuple[list[Block], set[int]]:
    """Return the blocks of a bucket, and the positions of the gradients of which a block holds only a part.

    ``segments`` is the memory for it of every rank of the node, or of only this rank, and ``room`` what
    :func:`scratch_memory` returns. A ``lasting`` bucket keeps its memory.
    """
    length, dtype, mine, rank = segments[0].size, segments[0].dtype, strategy.place, strategy.context.topology.rank
    adders: Sequence[int] = [0]
    shares: Sequence[int] = [0]
    points = {0, length, *(begin for begin, _ in ranges.owners)}
    if strategy.shares_memory:
        shares = ranges.shares
        adders = shares if strategy.takes_one_step else strategy.adders_of(length, shares)
        step = _BLOCK_BYTES // dtype.itemsize
        steps = [point for begin, end in itertools.pairwise(adders) for point in range(begin, end, step)]
        large = [part for part in parts if (part.end - part.begin) * dtype.itemsize >= _LARGE_BYTES]
        points.update(adders, shares, steps, (p.begin for p in large), (p.end for p in large))
    blocks: list[Block] = []
    flattened: set[int] = set()
    for begin, end, inside in cut(parts, sorted(points)):
        views = [segment[begin:end] for segment in segments]
        if strategy.shares_memory:
            views += [room[:_BLOCK_BYTES].view(dtype), room[_BLOCK_BYTES:].view(sum_dtype(dtype))]
        else:  # no other rank reads its memory
            views += [views[mine], views[mine]]
        pieces = [views[-2][part.begin - begin : part.end - begin].reshape(part.shape(specs)) for part in inside]
        shape = inside[0].shape(specs) if len(inside) == 1 else (end - begin,)
        *memory, scratch, total = [view[: end - begin].reshape(shape) for view in views]
        adder, owner = bisect_right(adders, begin) - 1, bisect_right(shares, begin) - 1
        pieces = pieces if len(inside) > 1 else []
        is_kept = ranges.are_kept(begin, rank)
        # A sum that is written directly to the gradient needs no shared memory.
        is_private = strategy.takes_one_step and ranges.are_shares and not lasting
        result = memory[owner] if not is_private else total if total.dtype == dtype else scratch
        sources = memory, memory[mine], result
        blocks.append(Block(_selector(inside), adder, owner, *sources, scratch, total, pieces, is_kept))
        flattened.update(part.member for part in inside if part.within is not ...)
    return blocks, flattened


def _selector(parts: Sequence[Part]) -> Callable[[Arrays], Any]:
    """Return a function that selects parts of all gradients: a single part as it is, several as a sequence."""
    if all(part.within is ... for part in parts):
        return itemgetter(*(part.member for part in parts))  # much faster than a list comprehension
    if len(parts) == 1:
        (member, within, *_) = parts[0]
        return lambda arrays: arrays[member][within]
    return lambda arrays: [arrays[part.member][part.within] for part in parts]


def cut(parts: Sequence[Part], points: Sequence[int]) -> Iterator[tuple[int, int, tuple[Part, ...]]]:
    """Cut a bucket at ascending points, from 0 to its length; yield where each piece begins and ends, and its parts."""
    first = 0
    for begin, end in itertools.pairwise(points):
        while first < len(parts) and parts[first].end <= begin:
            first += 1
        inside = []
        for part in parts[first:]:
            if part.begin >= end:
                break
            low, high = max(begin, part.begin), min(end, part.end)
            if (low, high) == (part.begin, part.end):
                inside.append(part)
            elif low < high:
                start = (part.within.start if isinstance(part.within, slice) else 0) - part.begin
                inside.append(Part(part.member, slice(start + low, start + high), low, high))
        yield begin, end, tuple(inside)
