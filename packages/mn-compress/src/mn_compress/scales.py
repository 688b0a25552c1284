"""Scales of blocks: their position in a message, and how each is applied to all elements of its block."""

from __future__ import annotations

from typing import Any, ClassVar

import numpy as np

LONGEST = 1 << 30  # block; kernels count its elements in 32 bits

_Array = Any  # NumPy's, or CuPy's


class ScaledBlocks:
    """The layout of a message: 4 bytes for the scale of each block, then a number of bits for each element.

    Args:
        block: How many elements share a scale.

    Attributes:
        bits: How many bits each element has.
    """

    bits: ClassVar[int]

    def __init__(self, block: int) -> None:
        self.block = block
        self._room = np.empty((2, 0), np.float32)

    def nbytes(self, length: int) -> int:
        """Return the size in bytes of the message for this number of elements."""
        return 4 * -(-length // self.block) + -(-length * self.bits // 8)

    def split(self, message: _Array, length: int) -> tuple[_Array, _Array]:
        """Return views of a message of bytes: the scales of its blocks, of float32, and the bytes that follow."""
        end = 4 * -(-length // self.block)
        return message[:end].view(np.float32), message[end:]

    def room(self, length: int) -> tuple[_Array, _Array]:
        """Return two temporary arrays in host memory; they are kept, as allocating costs more than the computation."""
        if self._room.shape[1] < length:
            self._room = np.empty((2, length), np.float32)
        return self._room[0, :length], self._room[1, :length]


def expand(scales: _Array, block: int, out: _Array) -> _Array:
    """Write each block's scale once for each of its elements; NumPy copies rows faster than it multiplies by them."""
    whole = out.size // block
    out[: whole * block].reshape(whole, block)[...] = scales[:whole, np.newaxis]
    out[whole * block :] = scales[-1:] if whole * block < out.size else 0
    return out
