"""One bit for each element: its sign, and a scale for each block."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np

from mn_compress.base import Compression, set_integer
from mn_compress.exact import ExactFirst
from mn_compress.exchange import Portion
from mn_compress.kernels import OneBitKernels
from mn_compress.scales import LONGEST, ScaledBlocks, expand
from mn_compress.whole_blocks import block_exchange

_Array = np.ndarray[Any, Any]
_SIGN = np.uint32(1 << 31)
# For each byte the signs of the eight numbers that it represents, the first one in its highest bit.
_SIGNS = np.unpackbits(np.arange(256, dtype=np.uint8)[:, np.newaxis], axis=1).astype(np.uint32) << np.uint32(31)
_SIGNS_AT_ONCE = np.ascontiguousarray(_SIGNS).view("V32").reshape(256)


@dataclass(frozen=True)
class OneBit(Compression):
    """The signs, and for each block the mean of its absolute values: a thirtieth of the bytes.

    1-bit SGD (Seide et al., Interspeech 2014) with one scale for each block, as in EF-signSGD (Karimireddy et al.,
    arXiv:1901.09847). Without error feedback, training with signs does not converge. Some trainings need exact steps at
    the beginning: 1-bit Adam (Tang et al., arXiv:2102.02888) has them in the first 15 to 25 percent.

    Args:
        block: How many elements share a scale of 4 bytes; a multiple of 8.
        start_iter: The number of steps that are averaged exactly before compression starts.

    Raises:
        TypeError: An argument is not an integer.
        ValueError: ``block`` is not a multiple of 8, below 8 or above 2**30, or ``start_iter`` is below 0.
    """

    on_devices: ClassVar[bool] = True
    is_launched: ClassVar[bool] = True
    block: int = 1024
    start_iter: int = 0

    def __post_init__(self) -> None:
        set_integer(self, "block", 8, LONGEST)
        if self.block % 8:
            raise ValueError(f"expected a multiple of 8 for block, got {self.block}")
        set_integer(self, "start_iter", 0)

    def exchange(self, portion: Portion) -> ExactFirst:
        """Return an object that averages such a portion."""
        after = block_exchange(portion, OneBitCodec(self.block), OneBitKernels(self.block))
        return ExactFirst(after, self.start_iter)


class OneBitCodec(ScaledBlocks):
    """Quantises blocks to signs; a message holds the scales, then the bits.

    A block that contains an infinity is infinite, and a block that contains a NaN is NaN.

    Args:
        block: How many elements share a scale.
    """

    bits = 1

    def encode(
        self, values: _Array, message: _Array, random: np.random.Generator | None, said: _Array | None = None
    ) -> None:
        """Write a message, and leave in ``values`` the part that it omits."""
        scales, codes = self.split(message, values.size)
        signed, factors = self.room(values.size)
        if said is not None:
            signed = said
        bits = factors.view(np.bool_)[: values.size]
        np.less(values.view(np.int32), 0, out=bits)  # the sign bit, also of -0.0 and NaN
        codes[...] = np.packbits(bits)
        np.abs(values, out=signed)
        self._means(signed, scales)
        signs = signed.view(np.uint32)
        np.bitwise_and(values.view(np.uint32), _SIGN, out=signs)
        np.bitwise_or(signs, expand(scales, self.block, factors).view(np.uint32), out=signs)
        np.subtract(values, signed, out=values)
        if not np.isfinite(scales).all():
            for i in np.flatnonzero(~np.isfinite(scales)):
                values[i * self.block : (i + 1) * self.block] = 0  # an error that is not finite would stay forever

    def decode(self, message: _Array, values: _Array) -> None:
        """Overwrite ``values`` with the content of a message."""
        scales, codes = self.split(message, values.size)
        _, factors = self.room(values.size)
        whole = values.size // 8 * 8
        np.take(_SIGNS_AT_ONCE, codes[: whole // 8], out=values[:whole].view("V32"), mode="clip")
        signs = values.view(np.uint32)
        if whole < values.size:
            signs[whole:] = _SIGNS[codes[-1], : values.size - whole]
        np.bitwise_or(signs, expand(scales, self.block, factors).view(np.uint32), out=signs)

    def _means(self, absolute: _Array, scales: _Array) -> None:
        """Write the mean of each block."""
        whole, last = divmod(absolute.size, self.block)
        done = whole * self.block
        np.add.reduce(absolute[:done].reshape(whole, self.block), axis=1, out=scales[:whole])
        scales[:whole] *= np.float32(1 / self.block)
        if last:
            scales[whole] = absolute[done:].sum() / np.float32(last)
