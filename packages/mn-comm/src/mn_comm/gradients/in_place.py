"""Steps 3 and 5 for large gradients: they are averaged where they lie, and neither packed nor replaced."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from mn_comm.gradients.bucket import Spec, assign, count, gradients_of
from mn_comm.gradients.select import Named
from mn_comm.intra import Streamed

__all__ = ["InPlaceBucket", "is_streamed"]

_Array = np.ndarray[Any, Any]

# Smaller ones are averaged faster together.
_LEAST_BYTES = 256 * 1024


def is_streamed(spec: Spec, wire_dtype: np.dtype[Any] | None) -> bool:
    """Return whether a gradient of this shape and dtype is worth being averaged in place, and may be."""
    shape, dtype = spec
    if dtype not in (np.float32, np.float64) or wire_dtype not in (None, dtype):
        return False
    return count(shape) * dtype.itemsize >= _LEAST_BYTES


class InPlaceBucket:
    """Large gradients of one dtype, in host memory, that are averaged where they lie.

    Args:
        members: The positions of their parameters among those that take part.
        specs: The shapes and dtypes of the gradients.
        buffer: What averages arrays of their sizes.
    """

    def __init__(self, members: Sequence[int], specs: Sequence[Spec], buffer: Streamed) -> None:
        self.members = members
        self.buffer = buffer
        self._specs = specs
        self._grads: Sequence[_Array] = ()

    def pack(self, params: Sequence[Named], grads: Sequence[Any] | None = None) -> None:
        """Take hold of the gradients; of those that must not be written to, of copies, and of zeros for missing ones.

        After a backward pass two parameters may have the same array for a gradient, or views of one that overlap.
        """
        found = gradients_of(self.members, params, grads)
        arrays = [_writeable(grad, *spec) for grad, spec in zip(found, self._specs, strict=True)]
        for i in _overlapping(arrays):
            arrays[i] = arrays[i].copy()
        self._grads = arrays
        self.buffer.arrays = [array.reshape(-1) for array in arrays]

    def view(self, params: Sequence[Named]) -> None:
        """Make the averaged arrays the gradients, where they are not yet; and let go of them."""
        assign(params, self.members, self._grads)
        self._grads = self.buffer.arrays = ()


def _writeable(grad: _Array | None, shape: tuple[int, ...], dtype: np.dtype[Any]) -> _Array:
    if grad is None:
        return np.zeros(shape, dtype)
    return np.require(grad, requirements=["C", "A", "W"])


def _overlapping(arrays: Sequence[_Array]) -> list[int]:
    """Return the positions of contiguous arrays that share memory with one before them."""
    found = []
    free_from = 0
    for begin, i in sorted((array.ctypes.data, i) for i, array in enumerate(arrays)):
        if begin < free_from:
            found.append(i)
        free_from = max(free_from, begin + arrays[i].nbytes)
    return found
