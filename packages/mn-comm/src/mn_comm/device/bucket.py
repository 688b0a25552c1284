"""Gradients on a device that travel together: packed by one launch, and afterwards views of the averaged buffer."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from mn_comm.device.buffer import DeviceBuffer
from mn_comm.device.kernels import Table, pack
from mn_comm.gradients.bucket import assign, gradients_of, split
from mn_comm.gradients.select import Named

__all__ = ["DeviceBucket"]


class DeviceBucket:
    """Gradients of one dtype, on one device, that travel together.

    Args:
        members: The positions of its parameters among those that take part.
        shapes: The shapes of their gradients.
        dtype: The dtype of their gradients.
        buffer: The memory in which they are averaged, in the dtype in which they travel.
        batched: Returns whether they are packed by one launch, rather than by one for each.
    """

    def __init__(
        self,
        members: Sequence[int],
        shapes: Sequence[tuple[int, ...]],
        dtype: np.dtype[Any],
        buffer: DeviceBuffer,
        batched: Callable[[], bool],
    ) -> None:
        import cupy

        self.members = members
        self.buffer = buffer
        self._dtype = dtype
        self._batched = batched
        wire = buffer.array
        self._packed = list(split(wire, shapes))
        # Only where the gradients travel in another dtype than theirs do they need a memory of their own.
        self._grads = wire if wire.dtype == dtype else cupy.empty(wire.size, dtype)
        self._views = list(split(self._grads, shapes))
        self._tables: dict[bool, list[tuple[list[int], int, Table]]] = {}

    def pack(self, params: Sequence[Named], grads: Sequence[Any] | None = None) -> None:
        """Copy the gradients, of any memory layout, into the buffer, in its dtype and divided; a missing one as zeros.

        Raises:
            ValueError: A gradient has moved to another device than the one that the buffer is on.
        """
        with self.buffer.array.device:
            gradients = [self._source(grad, i) for i, grad in enumerate(gradients_of(self.members, params, grads))]
            for chosen, begin, table in self._tables_for(self._batched()):
                sources = [gradients[i] for i in chosen]
                pack(table, sources, self._dtype, self.buffer.array[begin:], self.buffer.divisor)

    def view(self, params: Sequence[Named]) -> None:
        """Make the gradients views of the averaged buffer, in their own dtype."""
        if self._grads is not self.buffer.array:
            with self.buffer.array.device:
                self._grads[...] = self.buffer.array
        assign(params, self.members, self._views)

    def _source(self, grad: Any, i: int) -> Any:
        """Return what the kernel can read a gradient from."""
        import cupy

        if grad is None:
            return None
        wire: Any = self.buffer.array
        place: Any = self._packed[i]
        if grad.device.id != wire.device.id:
            raise ValueError(f"expected gradients on device {wire.device.id}, got one on device {grad.device.id}")
        begin = wire.data.ptr
        if begin <= grad.data.ptr < begin + wire.nbytes and grad.data.ptr != place.data.ptr:
            return grad.copy()  # another parameter's place, which may be overwritten before it is read
        return cupy.ascontiguousarray(grad)

    def _tables_for(self, batched: bool) -> list[tuple[list[int], int, Table]]:
        """Return, for each launch, which members it packs, from where on, and its table."""
        if batched not in self._tables:
            sizes = [view.size for view in self._packed]
            begins = [int(end) - size for end, size in zip(np.cumsum(sizes), sizes, strict=True)]
            filled = [i for i, size in enumerate(sizes) if size]
            groups = [filled] if batched else [[i] for i in filled]
            self._tables[batched] = [
                (
                    group,
                    begins[group[0]],
                    Table([begins[i] - begins[group[0]] for i in group], sum(sizes[i] for i in group)),
                )
                for group in groups
                if group
            ]
        return self._tables[batched]
