"""Uncompressed communication: byte messages to all ranks, and exact means that are the same on all of them."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import numpy as np

from mn_comm.basis.placement import array_module
from mn_comm.collectives.transport import Transport
from mn_comm.gradients.parts import bounds
from mn_compress.exchange import Exchange, Memory

_Array = Any  # NumPy's, or CuPy's


def gather_bytes(transport: Transport, message: _Array) -> list[_Array]:
    """Return the messages of all ranks; collective.

    Args:
        transport: The ranks.
        message: This rank's message, of bytes; the lengths may differ.
    """
    ranks, xp = transport.ranks, array_module(message)
    lengths = np.empty(ranks.size, np.int64)
    ranks.Allgather(np.array([message.size], np.int64), lengths)
    messages = [message if rank == ranks.rank else xp.empty(n, np.uint8) for rank, n in enumerate(lengths.tolist())]
    others = other_ranks(transport)
    transport.swap({other: [message] for other in others}, {other: [messages[other]] for other in others}, "Allgatherv")
    return messages


def mean_exactly(transport: Transport, flat: _Array) -> None:
    """Overwrite an array with its mean over the ranks, added up in their order; collective.

    MPI may add up in a different order on another rank, so that the last bits would differ.

    Args:
        transport: The ranks.
        flat: One-dimensional, of float32 or float64, of the same length and dtype on every rank.
    """
    ranks, xp, others = transport.ranks, array_module(flat), other_ranks(transport)
    parts = [flat[begin:end] for begin, end in pairwise(bounds(flat.size, ranks.size))]
    own = parts[ranks.rank]
    received = {other: xp.empty_like(own) for other in others}
    transport.swap(
        {other: [parts[other]] for other in others}, {other: [received[other]] for other in others}, "Reduce_scatter"
    )
    total = xp.zeros_like(own)
    for rank in range(ranks.size):
        total += own if rank == ranks.rank else received[rank]
    xp.multiply(total, own.dtype.type(1 / ranks.size), out=own)
    transport.swap({other: [own] for other in others}, {other: [parts[other]] for other in others}, "Allgather")


def average_exactly(transport: Transport, portion: _Array, memory: Memory) -> None:
    """Overwrite a portion with its exact mean, without a change to what is kept; collective.

    Args:
        transport: The ranks.
        portion: One-dimensional, of floats; those of half precision are sent and added up in float32.
        memory: What the portion's exchange keeps.
    """
    if portion.dtype in (np.float32, np.float64):
        mean_exactly(transport, portion)
    else:
        mean = portion.astype(np.float32)
        mean_exactly(transport, mean)
        portion[...] = mean
    for name, array in memory.new.items():
        array[...] = memory.now[name]


class ExactFirst:
    """An exchange that averages exactly in the first steps, in which gradients change fastest.

    Args:
        after: The exchange for the later steps.
        steps: The number of exact steps.
    """

    def __init__(self, after: Exchange, steps: int) -> None:
        self.memory = after.memory
        self._after = after
        self._steps = steps

    def average(self, transport: Transport, portion: _Array, step: int) -> None:
        """Overwrite a portion with its mean over the ranks; collective."""
        if step >= self._steps:
            self._after.average(transport, portion, step)
        else:
            average_exactly(transport, portion, self.memory)


def other_ranks(transport: Transport) -> list[int]:
    """Return the other ranks, beginning with the next one."""
    rank, size = transport.ranks.rank, transport.ranks.size
    return [(rank + distance) % size for distance in range(1, size)]
