"""What both ways to communicate within a node offer to the strategies."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import numpy as np

from mn_comm.intra.buffer import Buffer
from mn_comm.intra.streamed import Streamed

__all__ = ["Stage"]


class Stage(Protocol):
    """Sums over the processes of one node.

    A buffer is thought of as cut into shards, one for each of the first processes of the node; :func:`shard_bounds`
    says where.
    """

    def allocate(self, length: int, dtype: np.dtype[Any]) -> Buffer:
        """Return memory for ``length`` elements; collective within the node."""
        ...

    def streamed(self, lengths: Sequence[int], dtype: np.dtype[Any]) -> Streamed | None:
        """Return what averages arrays of these lengths where they lie, if that is faster; collective in the node."""
        ...

    def reduce_scatter(self, buffer: Buffer, shards: int, divisor: int) -> np.ndarray[Any, Any]:
        """Add up, over the node, the shard that belongs to this process; collective within the node.

        Args:
            buffer: What is to be added up; its contents are lost but for this process's shard.
            shards: How many shards there are, at most as many as the node has processes.
            divisor: What the sum is divided by, before it is rounded to the buffer's dtype.

        Returns:
            The shard, a view of the buffer; empty on a process that has none.
        """
        ...

    def all_gather(self, buffer: Buffer, shards: int) -> None:
        """Give every process the shards of all; collective within the node."""
        ...

    def mean(self, buffer: Buffer, divisor: int) -> None:
        """Overwrite a buffer with its sum over the node, divided; collective within the node."""
        ...

    def close(self) -> None:
        """Give back what the stage holds; collective within the node."""
        ...
