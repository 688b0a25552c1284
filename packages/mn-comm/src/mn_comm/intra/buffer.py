"""The memory of one bucket, as the processes of a node see it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

__all__ = ["Buffer", "shard_bounds"]

_Array = np.ndarray[Any, Any]


@dataclass(frozen=True, eq=False)
class Buffer:
    """One-dimensional memory that gradients are packed into and averaged in.

    Attributes:
        array: This process's.
        segments: That of every process of the node, by ``intra_rank``, where they share memory; else only this one's.
    """

    array: _Array
    segments: tuple[_Array, ...]

    @property
    def nbytes(self) -> int:
        """How many bytes of this process's are averaged."""
        return self.array.nbytes

    @classmethod
    def private(cls, length: int, dtype: np.dtype[Any]) -> Buffer:
        """Return a buffer in this process's own memory, of a length in elements."""
        array: _Array = np.empty(length, dtype)
        return cls(array, (array,))


def shard_bounds(length: int, shards: int) -> list[tuple[int, int]]:
    """Return where each of ``shards`` almost equal parts of ``length`` elements begins and ends."""
    return [(length * i // shards, length * (i + 1) // shards) for i in range(shards)]
