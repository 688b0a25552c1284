"""The largest elements and their positions; the other elements wait until they have accumulated."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np

from mn_comm.collectives.transport import Transport
from mn_compress.base import Compression, set_integer, set_number
from mn_compress.exact import gather_bytes
from mn_compress.exchange import Memory, Portion

_Array = Any  # NumPy's, or CuPy's
# A position within a chunk fits into 16 bits.
_CHUNK = 1 << 16
# The number of elements from which the threshold is estimated.
_SAMPLES = 1 << 15
_SMALLEST = float(np.finfo(np.float32).smallest_subnormal)


@dataclass(frozen=True)
class TopK(Compression):
    """Indices and values of the largest elements: 6 bytes for each element that is sent.

    Deep Gradient Compression (Lin et al., arXiv:1712.01887): elements that are not sent accumulate until they are large
    enough. The threshold is estimated from a sample, so that about the requested number of elements is sent. Every node
    receives the elements of every other node, so the number of bytes grows with the number of nodes.

    Args:
        ratio: The part of the elements that is sent, above 0 and at most 1.
        momentum: Momentum correction: instead of gradients, their velocity with this factor (below 1) accumulates. The
            velocity of an element is reset when the element is sent, so a larger ratio shortens the effect. Use it with
            an optimizer without momentum. 0 for none.
        clip: Local clipping: the maximum norm of a bucket's gradients. Each of the ``n`` ranks that exchange
            contributes at most ``clip / sqrt(n)``; ``None`` for no clipping.
        warm_up: The number of steps in which the ratio falls exponentially to its final value.

    Raises:
        TypeError: An argument is not a number.
        ValueError: An argument is out of range.
    """

    on_devices: ClassVar[bool] = True
    ratio: float = 0.01
    momentum: float = 0.0
    clip: float | None = None
    warm_up: int = 0

    def __post_init__(self) -> None:
        set_number(self, "ratio")
        set_number(self, "momentum")
        set_integer(self, "warm_up", 0)
        if not 0 < self.ratio <= 1:
            raise ValueError(f"expected a ratio above 0 and at most 1, got {self.ratio}")
        if not 0 <= self.momentum < 1:
            raise ValueError(f"expected momentum of at least 0 and below 1, got {self.momentum}")
        if self.clip is not None:
            set_number(self, "clip")
            if not self.clip > 0:
                raise ValueError(f"expected clip above 0, got {self.clip}")

    def ratio_at(self, step: int) -> float:
        """Return the part of the elements that is sent in a step, counted from 0."""
        return float(self.ratio ** min(1.0, (step + 1) / (self.warm_up + 1)))

    def exchange(self, portion: Portion) -> TopKExchange:
        """Return an object that averages such a portion."""
        return TopKExchange(self, portion)


class TopKExchange:
    """The averaging of a portion by its largest elements.

    Args:
        numbers: The settings.
        portion: The description of the portion.
    """

    def __init__(self, numbers: TopK, portion: Portion) -> None:
        xp, length = portion.xp, portion.length
        self._xp = xp
        self._numbers = numbers
        self._size = portion.size
        velocity = {"velocity": xp.zeros(length, np.float32)} if numbers.momentum else {}
        self.memory = Memory(omitted={"error": xp.zeros(length, np.float32)}, scaled=velocity)
        # In host memory, data that is processed together stays in a core's cache; on a device, the number of launches
        # matters.
        at_once = min(_CHUNK, length) if xp is np else length
        self._chunks = [slice(begin, min(begin + at_once, length)) for begin in range(0, length, at_once)]
        self._format: _Chunks | _Whole = _Chunks(length) if xp is np else _Whole(length, xp)
        self._room = xp.empty((2, at_once), np.float32)
        self._mask = xp.empty(at_once, np.bool_)

    def average(self, transport: Transport, portion: _Array, step: int) -> None:
        """Overwrite a portion with its mean over the ranks; collective."""
        factor = self._clipping(portion)
        threshold = self._threshold(portion, factor, self._numbers.ratio_at(step))
        message = self._encode(portion, factor, threshold)
        self._decode(gather_bytes(transport, message), portion)

    def _clipping(self, portion: _Array) -> float:
        """Return the factor by which the gradients are multiplied."""
        if self._numbers.clip is None:
            return 1.0
        chunks = (portion[chunk].astype(np.float32) for chunk in self._chunks)
        norm = np.sqrt(sum(float(self._xp.vdot(chunk, chunk)) for chunk in chunks))
        most = self._numbers.clip / np.sqrt(self._size)
        return float(most / norm) if most < norm < np.inf else 1.0

    def _threshold(self, portion: _Array, factor: float, ratio: float) -> float:
        """Return an estimate of the absolute value that is reached by this part of the elements."""
        # An odd stride visits every column of a matrix with an even number of columns.
        every = slice(None, None, max(1, portion.size // _SAMPLES) | 1)
        now = self.memory.now
        sample = portion[every].astype(np.float32) * np.float32(factor)
        if self._numbers.momentum:
            sample += now["velocity"][every] * np.float32(self._numbers.momentum)
        sample += now["error"][every]
        sample = self._xp.abs(sample)
        sample = sample[sample < np.inf]
        if not sample.size:
            return np.inf
        rest = sample.size - max(1, round(ratio * sample.size))
        # Never 0: zeros are not sent.
        return max(float(self._xp.partition(sample, rest)[rest]), _SMALLEST)

    def _encode(self, portion: _Array, factor: float, threshold: float) -> _Array:
        """Return the message with the elements that reach the threshold, and keep the others."""
        xp = self._xp
        places: list[_Array] = []
        values: list[_Array] = []
        for chunk in self._chunks:
            error = self._accumulate(portion, chunk, factor)
            absolute, mask = self._room[0, : error.size], self._mask[: error.size]
            xp.abs(error, out=absolute)
            xp.less(absolute, np.float32(threshold), out=mask)
            xp.logical_not(mask, out=mask)  # so that NaN is sent
            found = xp.flatnonzero(mask)
            places.append(found)
            values.append(error[found])
            for kept in self.memory.new.values():
                kept[chunk][found] = 0
        return self._format.write(places, values)

    def _accumulate(self, portion: _Array, chunk: slice, factor: float) -> _Array:
        """Add the gradients of a chunk, or their velocity, to the omitted part; return the result."""
        xp, now, new = self._xp, self.memory.now, self.memory.new
        error: _Array = new["error"][chunk]
        gradient = portion[chunk]
        if factor != 1:
            scaled = self._room[1, : error.size]
            xp.multiply(gradient, np.float32(factor), out=scaled, casting="unsafe")
            gradient = scaled
        if self._numbers.momentum:
            velocity = new["velocity"][chunk]
            xp.multiply(now["velocity"][chunk], np.float32(self._numbers.momentum), out=velocity)
            xp.add(velocity, gradient, out=velocity, casting="unsafe")
            gradient = velocity
        xp.add(now["error"][chunk], gradient, out=error, casting="unsafe")
        return error

    def _decode(self, messages: list[_Array], portion: _Array) -> None:
        """Overwrite a portion with the mean of the decoded messages, added up in the order of the ranks."""
        parts = [list(self._format.read(message)) for message in messages]
        for i, chunk in enumerate(self._chunks):
            out = portion[chunk]
            total = out if out.dtype == np.float32 else self._room[0, : out.size]
            total[...] = 0
            for each in parts:
                places, values = each[i]
                total[places] += values * np.float32(1 / self._size)
            if total is not out:
                out[...] = total


class _Chunks:
    """Messages in host memory: the number of elements in each chunk, then all values, then all positions within chunks.

    If all elements of a chunk are sent, their positions are omitted.

    Args:
        length: How many elements there are.
    """

    def __init__(self, length: int) -> None:
        self._lengths = [min(_CHUNK, length - begin) for begin in range(0, length, _CHUNK)]

    def write(self, places: list[_Array], values: list[_Array]) -> _Array:
        """Return the message with the positions and values of each chunk."""
        counts = np.array([each.size for each in places], np.uint32)
        told = [
            each.astype(np.uint16) for each, length in zip(places, self._lengths, strict=True) if each.size < length
        ]
        return np.concatenate([part.view(np.uint8) for part in (counts, *values, *told)])

    def read(self, message: _Array) -> Iterator[tuple[Any, _Array]]:
        """Yield the positions and values of each chunk."""
        end = 4 * len(self._lengths)
        counts = message[:end].view(np.uint32).tolist()
        total = end + 4 * sum(counts)
        values = message[end:total].view(np.float32)
        places = message[total:].view(np.uint16)
        first = told = 0
        for count, length in zip(counts, self._lengths, strict=True):
            where: Any = slice(None)
            if count < length:
                where = places[told : told + count]
                told += count
            yield where, values[first : first + count]
            first += count


class _Whole:
    """Messages on a device, for all elements at once: as in host memory, but positions are never omitted.

    Args:
        length: How many elements there are.
        xp: The module of functions for the arrays.
    """

    def __init__(self, length: int, xp: Any) -> None:
        self._xp = xp
        self._chunks = -(-length // _CHUNK)
        self._points = xp.arange(self._chunks + 1) * _CHUNK

    def write(self, places: list[_Array], values: list[_Array]) -> _Array:
        """Return the message with one array of positions and one of values."""
        (found,), (value,) = places, values
        xp, total = self._xp, found.size
        message = xp.empty(4 * self._chunks + 6 * total, np.uint8)
        counts, values_at, told = self._views(message)
        begins = xp.searchsorted(found, self._points)
        counts[...] = begins[1:] - begins[:-1]
        values_at[...] = value
        told[...] = found & (_CHUNK - 1)
        return message

    def read(self, message: _Array) -> Iterator[tuple[_Array, _Array]]:
        """Yield the positions and the values."""
        xp = self._xp
        counts, values, told = self._views(message)
        chunk = xp.searchsorted(xp.cumsum(counts.astype(np.int64)), xp.arange(values.size), side="right")
        yield chunk * _CHUNK + told, values

    def _views(self, message: _Array) -> tuple[_Array, _Array, _Array]:
        first = 4 * self._chunks
        last = first + (message.size - first) // 6 * 4
        return message[:first].view(np.uint32), message[first:last].view(np.float32), message[last:].view(np.uint16)
