"""The averaging of a portion as quantised blocks: a reduce-scatter, then an all-gather (ZeRO++, arXiv:2306.10209).

Each rank owns a range of the blocks. It receives the other ranks' summands of that range in quantised form, adds them
up in float32 in the order of the ranks, and sends the mean, quantised again, to all ranks. So every element is
quantised twice, whether there are two nodes or a hundred. The errors of both quantisations are kept and added in the
next step: for another rank's range the error of the summand, for the rank's own range the error of the mean. So one
array holds both.

Messages are small, and sent as soon as they are quantised, so that the network is busy while the next ones are
quantised.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from mn_comm.collectives.transport import TAG, Transport
from mn_compress.exact import other_ranks
from mn_compress.exchange import Memory, Portion

if TYPE_CHECKING:
    from mpi4py import MPI

_Array = np.ndarray[Any, Any]
# Together with scratch memory of the same size, it stays in a core's second-level cache.
_CHUNK = 64 * 1024


class Codec(Protocol):
    """Quantises consecutive elements, block by block, in host memory or on a device.

    Attributes:
        block: How many elements share a scale. Message lengths are multiples of it.
    """

    block: int

    def nbytes(self, length: int) -> int:
        """Return the size in bytes of the message for this number of elements."""
        ...

    def encode(self, values: Any, message: Any, random: Any) -> None:
        """Write a message, and leave in ``values`` the part that it omits: never a value that is not finite.

        Args:
            values: Of float32, one-dimensional and contiguous; not empty.
            message: An array of :meth:`nbytes` bytes.
            random: For stochastic rounding, a generator of random numbers; ``None`` unless the codec asks for it.
        """
        ...

    def decode(self, message: Any, values: Any) -> None:
        """Overwrite ``values``, of float32, with the content of a message; the same on every machine, bit for bit."""
        ...


class BlockCodec(Codec, Protocol):
    """Quantises elements in host memory."""

    def encode(self, values: _Array, message: _Array, random: Any, said: _Array | None = None) -> None:
        """Do what :meth:`Codec.encode` does.

        Args:
            values: See there.
            message: See there.
            random: See there; NumPy's.
            said: Memory for the result of :meth:`decode` for this message, the same bit for bit; ``None`` if it is not
                needed.
        """
        ...


class BlockExchange:
    """Averages a portion as described in the module's docstring.

    Args:
        codec: How blocks are quantised.
        portion: The description of the portion.
        seed: For stochastic rounding; ``None`` for none.
    """

    def __init__(self, codec: BlockCodec, portion: Portion, seed: int | None) -> None:
        self.memory = Memory(omitted={"error": np.zeros(portion.length, np.float32)})
        self._codec = codec
        self._seed = seed
        self._rank, self._size = portion.rank, portion.size
        self._ranges = [list(_chunks(*each, codec.block)) for each in ranges(portion.length, codec.block, portion.size)]
        longest = max((chunk.stop - chunk.start for chunks in self._ranges for chunk in chunks), default=0)
        self._total = np.empty(longest, np.float32)
        self._summand = np.empty(longest, np.float32)
        own = self._ranges[self._rank]
        self._incoming = [[self._room(chunk) for chunk in own] for _ in range(self._size)]
        self._outgoing = [[self._room(chunk) for chunk in chunks] for chunks in self._ranges]
        self._means = [[self._room(chunk) for chunk in chunks] for chunks in self._ranges]

    def average(self, transport: Transport, portion: _Array, step: int) -> None:
        """Overwrite a portion with its mean over the ranks; collective."""
        random = None if self._seed is None else np.random.default_rng([self._seed, step, self._rank, portion.size])
        others = other_ranks(transport)
        # Messages of the same rank arrive in the order in which they were requested: summands, then means.
        summands = {other: self._receive(transport, self._incoming[other], other) for other in others}
        means = {other: self._receive(transport, self._means[other], other) for other in others}
        sent = [request for other in others for request in self._send_summands(transport, portion, other, random)]
        sent += self._send_means(transport, portion, summands, random)
        for other in others:
            for chunk, message, request in zip(self._ranges[other], self._means[other], means[other], strict=True):
                transport.ranks.wait_with_pauses(request, "Allgather")
                self._decode(message, portion[chunk])
        for request in sent:
            transport.ranks.wait_with_pauses(request, "Allgather")

    def _send_summands(
        self, transport: Transport, portion: _Array, owner: int, random: np.random.Generator | None
    ) -> Iterator[MPI.Request]:
        before, after = self.memory.now["error"], self.memory.new["error"]
        for chunk, message in zip(self._ranges[owner], self._outgoing[owner], strict=True):
            error = after[chunk]
            np.add(portion[chunk], before[chunk], out=error, casting="unsafe")
            self._codec.encode(error, message, random)
            yield self._send(transport, message, owner)

    def _send_means(
        self,
        transport: Transport,
        portion: _Array,
        incoming: dict[int, list[MPI.Request]],
        random: np.random.Generator | None,
    ) -> list[MPI.Request]:
        before, after = self.memory.now["error"], self.memory.new["error"]
        requests = []
        for i, chunk in enumerate(self._ranges[self._rank]):
            own, error, message = portion[chunk], after[chunk], self._means[self._rank][i]
            total = self._add_up(transport, own, incoming, i)
            total *= np.float32(1 / self._size)
            np.add(total, before[chunk], out=error)
            said = own if own.dtype == np.float32 else self._summand[: own.size]
            self._codec.encode(error, message, random, said)
            requests += [self._send(transport, message, other) for other in incoming]
            if said is not own:
                np.copyto(own, said, casting="unsafe")
        return requests

    def _add_up(self, transport: Transport, own: _Array, incoming: dict[int, list[MPI.Request]], i: int) -> _Array:
        """Return the sum of a chunk over all ranks, added up in their order."""
        rooms = self._total[: own.size], self._summand[: own.size]
        total = own
        for rank in range(self._size):
            each = own
            if rank != self._rank:
                transport.ranks.wait_with_pauses(incoming[rank][i], "Reduce_scatter")
                each = rooms[total is rooms[0]]
                self._codec.decode(self._incoming[rank][i], each)
            if not rank:
                total = each
            else:  # NumPy is twice as fast if a result overwrites an operand
                total = np.add(total, each, out=each if total is own else total, casting="unsafe")
        return total

    def _decode(self, message: _Array, out: _Array) -> None:
        if out.dtype == np.float32:
            self._codec.decode(message, out)
        else:
            values = self._summand[: out.size]
            self._codec.decode(message, values)
            np.copyto(out, values, casting="unsafe")

    def _send(self, transport: Transport, message: _Array, other: int) -> MPI.Request:
        transport.sent += message.size
        request = transport.ranks.Isend(message, other, TAG)
        request.Test()  # MPI makes progress only when it is called, and quantising the next chunk takes time
        return request

    def _receive(self, transport: Transport, messages: list[_Array], other: int) -> list[MPI.Request]:
        return [transport.ranks.Irecv(message, other, TAG) for message in messages]

    def _room(self, chunk: slice) -> _Array:
        return np.empty(self._codec.nbytes(chunk.stop - chunk.start), np.uint8)


def ranges(length: int, block: int, size: int) -> list[tuple[int, int]]:
    """Return where the range of each rank begins and ends, in elements: whole blocks, except for the last one."""
    blocks = -(-length // block)
    points = [min(length, blocks * rank // size * block) for rank in range(size + 1)]
    return list(pairwise(points))


def _chunks(begin: int, end: int, block: int) -> Iterator[slice]:
    step = max(1, _CHUNK // block) * block
    for first in range(begin, end, step):
        yield slice(first, min(first + step, end))
