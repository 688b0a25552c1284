"""Eight bits for each element, and a scale for each block of elements."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np

from mn_compress.base import Compression, set_integer
from mn_compress.exchange import Exchange, Portion
from mn_compress.scales import INFINITE, MAGNITUDE, ScaledBlocks, expand
from mn_compress.whole_blocks import block_exchange

_Array = np.ndarray[Any, Any]
_GREATEST = np.float32(127)
_NAN = np.int8(-128)
_ZERO = np.float32(0)
# Adding this to a number of at most 22 bits rounds the number to an integer, which is then in the lowest bits.
_ROUNDS = np.float32(1.5 * 2**23)
_ROUNDINGS = ("nearest", "stochastic")


@dataclass(frozen=True)
class Int8(Compression):
    """Blocks of 8-bit integers with one scale each: a quarter of the bytes.

    Like ZeRO++ (Wang et al., arXiv:2306.10209) and Bagua's ByteGrad: a quantised reduce-scatter, which adds up in
    float32, then a quantised all-gather. A block's scale is its greatest absolute value (Dettmers, arXiv:1511.04561).

    Args:
        block: How many elements share a scale of 4 bytes.
        rounding: ``"nearest"``, or ``"stochastic"``: up or down at random, so that the mean of many roundings is the
            value. Error feedback corrects either; drawing random numbers takes several times as long as everything
            else.
        seed: The seed for stochastic rounding.

    Raises:
        TypeError: An argument is not a number.
        ValueError: ``block`` is below 1, ``seed`` below 0, or there is no such rounding.
    """

    on_devices: ClassVar[bool] = True
    is_launched: ClassVar[bool] = True
    block: int = 256
    rounding: str = "nearest"
    seed: int = 0

    def __post_init__(self) -> None:
        set_integer(self, "block", 1)
        set_integer(self, "seed", 0)
        if self.rounding not in _ROUNDINGS:
            raise ValueError(f"expected rounding 'nearest' or 'stochastic', got {self.rounding!r}")

    def exchange(self, portion: Portion) -> Exchange:
        """Return an object that averages such a portion."""
        seed = self.seed if self.rounding == "stochastic" else None
        return block_exchange(portion, Int8Codec(self.block), Int8Rows(self.block, portion.xp), seed)


class Int8Rows(ScaledBlocks):
    """Quantises blocks to integers from -127 to 127, with operations on all blocks of a range: for devices.

    A message holds the scales, then the integers. A block that is not finite has an infinite scale, and encodes only
    which values are infinite and which are NaN.

    Args:
        block: How many elements share a scale.
        xp: The module of functions for the arrays.
    """

    bits = 8

    def encode(self, values: Any, message: Any, random: Any) -> None:
        """Write a message, and leave in ``values`` the part that it omits."""
        xp = self.xp
        scales, codes = self.split(message, values.size)
        rows = self.as_rows(values)
        bits = rows.view(np.int32)
        sign = (bits >> np.int32(31) | np.int32(1)).astype(np.int8)
        bits = bits & MAGNITUDE  # as integers, magnitudes have the same order, and NaN is the largest
        special = xp.where(bits > INFINITE, _NAN, sign)
        is_finite = bits < INFINITE
        greatest = bits.max(axis=1)
        are_finite = greatest < INFINITE
        unit, inverse = _units(xp, greatest.view(np.float32))
        scaled = xp.where(is_finite, rows, _ZERO)
        error = xp.where(are_finite[:, np.newaxis], scaled, _ZERO)
        scaled *= inverse[:, np.newaxis]
        quantised = xp.empty(scaled.shape, np.int8)
        self._round(scaled, quantised, random)
        codes.view(np.int8)[...] = xp.where(is_finite, quantised, special).reshape(-1)[: values.size]
        scaled *= unit[:, np.newaxis]
        error -= scaled
        values[...] = error.reshape(-1)[: values.size]
        scales[...] = xp.where(are_finite, unit, np.float32(np.inf))

    def decode(self, message: Any, values: Any) -> None:
        """Overwrite ``values`` with the content of a message."""
        xp = self.xp
        scales, codes = self.split(message, values.size)
        rows = self.as_rows(codes.view(np.int8))
        product = rows.astype(np.float32)
        product *= scales[:, np.newaxis]
        product = xp.where(rows == _NAN, np.float32(np.nan), product)
        product = xp.where(rows == np.int8(0), _ZERO, product)  # also in a block with an infinity
        values[...] = product.reshape(-1)[: values.size]

    def _round(self, scaled: Any, codes: Any, random: Any) -> None:
        """Round numbers from -127 to 127 to integers, and write these also to ``codes``."""
        xp = self.xp
        if random is None:
            scaled += _ROUNDS
            xp.copyto(codes, scaled.view(np.int32), casting="unsafe")
            scaled -= _ROUNDS
        else:
            scaled += random.random(scaled.shape, np.float32)
            xp.floor(scaled, out=scaled)
            xp.clip(scaled, -_GREATEST, _GREATEST, out=scaled)
            xp.copyto(codes, scaled, casting="unsafe")


class Int8Codec(Int8Rows):
    """Quantises in host memory, to the same bits: faster, if everything is finite.

    Args:
        block: How many elements share a scale.
    """

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
            super().encode(values, message, random)
            if said is not None:
                super().decode(message, said)
            return
        unit, inverse = _units(np, scales)
        np.multiply(values, expand(inverse, self.block, scaled), out=scaled)
        self._round(scaled, codes.view(np.int8), random)
        if random is not None:
            scaled += _ZERO  # the message cannot represent -0.0
        if said is None:
            said = scaled
        np.multiply(scaled, expand(unit, self.block, factors), out=said)
        np.subtract(values, said, out=values)
        scales[...] = unit

    def decode(self, message: _Array, values: _Array) -> None:
        """Overwrite ``values`` with the content of a message."""
        scales, codes = self.split(message, values.size)
        if not np.isfinite(scales).all():
            super().decode(message, values)
            return
        _, factors = self.room(values.size)
        np.copyto(values, codes.view(np.int8))
        np.multiply(values, expand(scales, self.block, factors), out=values)


def _units(xp: Any, greatest: Any) -> tuple[Any, Any]:
    """Return the value of the integer 1 in each block, and its inverse; 0 if they are not in the range of float32."""
    with np.errstate(all="ignore"):
        usable = (greatest >= _GREATEST * np.finfo(np.float32).tiny) & (greatest < np.inf)
        unit = xp.where(usable, greatest / _GREATEST, _ZERO)
        return unit, xp.where(usable, 1 / unit, _ZERO)


@functools.lru_cache(64)
def _starts(length: int, block: int) -> _Array:
    return np.arange(0, length, block)
