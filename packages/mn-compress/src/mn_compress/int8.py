"""Eight bits for each element, and a scale for each block of elements."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np

from mn_compress.base import Compression, set_integer
from mn_compress.exchange import Exchange, Portion
from mn_compress.kernels import Int8Kernels
from mn_compress.scales import LONGEST, ScaledBlocks, expand
from mn_compress.whole_blocks import block_exchange

_Array = np.ndarray[Any, Any]
_GREATEST = np.float32(127)
_NAN = np.int8(-128)
_ZERO = np.float32(0)
# Adding this to a number of at most 22 bits rounds the number to an integer, which is then in the lowest bits.
_ROUNDS = np.float32(1.5 * 2**23)
# The largest number that is still finite when it is divided by 127, rounded, and multiplied again.
_MOST = np.nextafter(np.finfo(np.float32).max, _ZERO)
_ROUNDINGS = ("nearest", "stochastic")


@dataclass(frozen=True)
class Int8(Compression):
    """Blocks of 8-bit integers with one scale each: a quarter of the bytes.

    Like ZeRO++ (Wang et al., arXiv:2306.10209) and Bagua's ByteGrad: a quantised reduce-scatter, which adds up in
    float32, then a quantised all-gather. A block's scale is its greatest absolute value (Dettmers, arXiv:1511.04561).

    Args:
        block: How many elements share a scale of 4 bytes.
        rounding: ``"nearest"``, or ``"stochastic"``: up or down at random, so that the mean of many roundings is the
            value. Error feedback corrects either; in host memory, drawing random numbers takes several times as long
            as everything else.
        seed: The seed for stochastic rounding.

    Raises:
        TypeError: An argument is not a number.
        ValueError: ``block`` is below 1 or above 2**30, ``seed`` below 0, or there is no such rounding.
    """

    on_devices: ClassVar[bool] = True
    is_launched: ClassVar[bool] = True
    block: int = 256
    rounding: str = "nearest"
    seed: int = 0

    def __post_init__(self) -> None:
        set_integer(self, "block", 1, LONGEST)
        set_integer(self, "seed", 0)
        if self.rounding not in _ROUNDINGS:
            raise ValueError(f"expected rounding 'nearest' or 'stochastic', got {self.rounding!r}")

    def exchange(self, portion: Portion) -> Exchange:
        """Return an object that averages such a portion."""
        seed = self.seed if self.rounding == "stochastic" else None
        return block_exchange(portion, Int8Codec(self.block), Int8Kernels(self.block), seed)


class Int8Codec(ScaledBlocks):
    """Quantises blocks in host memory to integers from -127 to 127.

    A message holds the scales, then the integers. A block that is not finite has an infinite scale, and encodes only
    which values are infinite and which are NaN.

    Args:
        block: How many elements share a scale.
    """

    bits = 8

    def encode(
        self, values: _Array, message: _Array, random: np.random.Generator | None, said: _Array | None = None
    ) -> None:
        """Write a message, and leave in ``values`` the part that it omits."""
        scales, codes = self.split(message, values.size)
        # NumPy is twice as fast if a result overwrites an operand.
        scaled, factors = self.room(values.size)
        np.abs(values, out=factors)
        np.maximum.reduceat(factors, _starts(values.size, self.block), out=scales)
        if not scales.max() < np.inf:
            self._encode_special(values, message, random)
            if said is not None:
                self._decode_special(message, said)
            return
        unit, inverse = _units(scales)
        np.multiply(values, expand(inverse, self.block, scaled), out=scaled)
        _round(scaled, codes.view(np.int8), random)
        if said is None:
            said = scaled
        np.multiply(scaled, expand(unit, self.block, factors), out=said)
        np.subtract(values, said, out=values)
        scales[...] = unit

    def decode(self, message: _Array, values: _Array) -> None:
        """Overwrite ``values`` with the content of a message."""
        scales, codes = self.split(message, values.size)
        if not np.isfinite(scales).all():
            self._decode_special(message, values)
            return
        _, factors = self.room(values.size)
        np.copyto(values, codes.view(np.int8))
        np.multiply(values, expand(scales, self.block, factors), out=values)

    def _encode_special(self, values: _Array, message: _Array, random: np.random.Generator | None) -> None:
        """Encode values of which some are not finite."""
        scales, codes = self.split(message, values.size)
        rows = self._as_rows(values)
        is_finite = np.isfinite(rows)
        are_finite = np.logical_and.reduce(is_finite, axis=1)
        scaled = np.where(is_finite, rows, _ZERO)
        unit, inverse = _units(np.where(are_finite, np.abs(scaled).max(axis=1), _ZERO))
        error = np.where(are_finite[:, np.newaxis], scaled, _ZERO)
        scaled *= inverse[:, np.newaxis]
        quantised = np.empty(scaled.shape, np.int8)
        _round(scaled, quantised, random)
        special = np.where(np.isnan(rows), _NAN, np.where(np.signbit(rows), np.int8(-1), np.int8(1)))
        codes.view(np.int8)[...] = np.where(is_finite, quantised, special).reshape(-1)[: values.size]
        scaled *= unit[:, np.newaxis]
        error -= scaled
        values[...] = error.reshape(-1)[: values.size]
        scales[...] = np.where(are_finite, unit, np.float32(np.inf))

    def _decode_special(self, message: _Array, values: _Array) -> None:
        """Decode blocks of which some have an infinite scale."""
        scales, codes = self.split(message, values.size)
        rows = self._as_rows(codes.view(np.int8))
        product = rows.astype(np.float32)
        product *= scales[:, np.newaxis]
        product[rows == _NAN] = np.nan
        product[rows == 0] = 0  # also in a block with an infinity
        values[...] = product.reshape(-1)[: values.size]

    def _as_rows(self, values: _Array) -> _Array:
        """Return elements in rows of one block each, padded with zeros: a view if possible, otherwise a copy."""
        if values.size % self.block == 0:
            return values.reshape(-1, self.block)
        rows = np.zeros((-(-values.size // self.block), self.block), values.dtype)
        rows.reshape(-1)[: values.size] = values
        return rows


def _round(scaled: _Array, codes: _Array, random: np.random.Generator | None) -> None:
    """Round numbers from -127 to 127 to integers, and write these also to ``codes``."""
    if random is None:
        scaled += _ROUNDS
        np.copyto(codes, scaled.view(np.int32), casting="unsafe")
        scaled -= _ROUNDS
    else:
        scaled += random.random(scaled.shape, np.float32)
        np.floor(scaled, out=scaled)
        np.clip(scaled, -_GREATEST, _GREATEST, out=scaled)
        np.copyto(codes, scaled, casting="unsafe")


def _units(greatest: _Array) -> tuple[_Array, _Array]:
    """Return the value of the integer 1 in each block, and its inverse; 0 if they are not in the range of float32."""
    with np.errstate(all="ignore"):
        usable = greatest >= _GREATEST * np.finfo(np.float32).tiny
        unit = np.where(usable, np.minimum(greatest, _MOST) / _GREATEST, _ZERO)
        return unit, np.where(usable, 1 / unit, _ZERO)


@functools.lru_cache(64)
def _starts(length: int, block: int) -> _Array:
    return np.arange(0, length, block)
