"""Random numbers that are the same in host memory and on every device, bit for bit."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np


class Draws:
    """Numbers from 0 to below 1 that depend on a seed and on how many were drawn before: integers, hashed twice.

    To continue from a snapshot with the same numbers, a CuPy generator would have to be set up in every step, which
    takes longer than this.

    Args:
        xp: The module of functions for the arrays: NumPy or CuPy.
        seed: Integers of at least 0.
    """

    def __init__(self, xp: Any, seed: Sequence[int]) -> None:
        self._xp = xp
        self._keys = np.random.SeedSequence(seed).generate_state(2, np.uint32)
        self._drawn = 0

    def random(self, shape: tuple[int, ...], dtype: Any = np.float32) -> Any:
        """Return the next numbers, like NumPy's generators, which are faster in host memory."""
        count = int(np.prod(shape))
        bits = self._xp.arange(self._drawn, self._drawn + count, dtype=np.uint32)
        self._drawn += count
        for key in self._keys:
            bits ^= key
            # A bijection of 32 bits with little bias, found by search: "lowbias32" of Chris Wellons' hash-prospector.
            bits ^= bits >> np.uint32(16)
            bits *= np.uint32(0x7FEB352D)
            bits ^= bits >> np.uint32(15)
            bits *= np.uint32(0x846CA68B)
            bits ^= bits >> np.uint32(16)
        return ((bits >> np.uint32(8)).astype(dtype) * dtype(2**-24)).reshape(shape)
