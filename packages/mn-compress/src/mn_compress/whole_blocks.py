"""The averaging of :mod:`mn_compress.blocks`, with a few operations on whole ranges: for devices.

On a device, launching a kernel takes longer than processing a block, and memory is fast. So all ranges are quantised
and sent at once.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from mn_comm.collectives.transport import Transport
from mn_compress.blocks import BlockCodec, BlockExchange, Codec, ranges
from mn_compress.exact import other_ranks
from mn_compress.exchange import Exchange, Memory, Portion

_Array = Any  # CuPy's; NumPy's in tests


class WholeBlockExchange:
    """Averages a portion as described in the module's docstring.

    Args:
        codec: How blocks are quantised; a message must have 4 bytes for each scale, then the elements. The codec only
            puts work on the current stream: nothing depends on the contents of an array.
        portion: The description of the portion.
        seed: For stochastic rounding; ``None`` for none.
    """

    def __init__(self, codec: Codec, portion: Portion, seed: int | None) -> None:
        self._xp = portion.xp
        self.memory = Memory(omitted={"error": self._xp.zeros(portion.length, np.float32)})
        self._codec = codec
        self._seed = seed
        self._rank, self._size = portion.rank, portion.size
        self._ranges = ranges(portion.length, codec.block, portion.size)

    def average(self, transport: Transport, portion: _Array, step: int) -> None:
        """Overwrite a portion with its mean over the ranks; collective."""
        random = None if self._seed is None else np.random.default_rng([self._seed, step, self._rank, portion.size])
        before, error = self.memory.now["error"], self.memory.new["error"]
        self._xp.add(portion, before, out=error)
        message = self._room(portion.size)
        self._codec.encode(error, message, random)
        others = other_ranks(transport)
        parts = [self._cut(message, portion.size, *each) for each in self._ranges]
        begin, end = self._ranges[self._rank]
        length = end - begin
        summands = {other: self._room(length) for other in others}
        pieces = {other: self._cut(summand, length, 0, length) for other, summand in summands.items()}
        transport.swap({other: parts[other] for other in others}, pieces, "Reduce_scatter")
        own = self._room(length)
        if length:
            mean = error[begin:end]
            self._xp.add(self._mean(portion[begin:end], summands), before[begin:end], out=mean)
            self._codec.encode(mean, own, random)
        told = self._cut(own, length, 0, length)
        transport.swap({other: told for other in others}, {other: parts[other] for other in others}, "Allgather")
        for part, piece in zip(parts[self._rank], told, strict=True):
            part[...] = piece
        self._decode(message, portion)

    def _mean(self, own: _Array, summands: dict[int, _Array]) -> _Array:
        """Return the mean over all ranks, added up in their order."""
        room, other = (self._xp.empty(own.size, np.float32) for _ in range(2))
        total = own
        for rank in range(self._size):
            summand = own
            if rank != self._rank:
                summand = other if rank else room
                self._codec.decode(summands[rank], summand)
            total = self._xp.add(total, summand, out=room) if rank else summand
        total *= np.float32(1 / self._size)
        return total

    def _decode(self, message: _Array, portion: _Array) -> None:
        if portion.dtype == np.float32:
            self._codec.decode(message, portion)
        else:
            values = self._xp.empty(portion.size, np.float32)
            self._codec.decode(message, values)
            portion[...] = values

    def _cut(self, message: _Array, length: int, begin: int, end: int) -> list[_Array]:
        """Return the scales and the elements of a range in the message for a given number of elements, as bytes."""
        first, last, all_of_them = (-(-point // self._codec.block) for point in (begin, end, length))
        codes = message[4 * all_of_them :]
        points = self._codec.nbytes(begin) - 4 * first, self._codec.nbytes(end) - 4 * last
        return [message[4 * first : 4 * last], codes[points[0] : points[1]]]

    def _room(self, length: int) -> _Array:
        return self._xp.empty(self._codec.nbytes(length), np.uint8)


def block_exchange(portion: Portion, on_host: BlockCodec, on_device: Codec, seed: int | None = None) -> Exchange:
    """Return what averages a portion in blocks, where it is; ``seed`` is for stochastic rounding."""
    if portion.xp is np:
        return BlockExchange(on_host, portion, seed)
    return WholeBlockExchange(on_device, portion, seed)
