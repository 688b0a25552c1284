"""Steps 3 and 5: gradients are copied into one buffer, and afterwards they *are* that buffer, as views of it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import numpy as np

from mn_comm.gradients.select import Named
from mn_comm.intra import Buffer

__all__ = ["Bucket", "make_buckets", "split"]

_Array = np.ndarray[Any, Any]
Allocate = Callable[[int, np.dtype[Any]], Buffer]
WireDtype = Callable[["np.dtype[Any]"], "np.dtype[Any]"]


def split(flat: _Array, shapes: Iterable[tuple[int, ...]]) -> Iterator[_Array]:
    """Yield one view of a one-dimensional array after another, of the given shapes."""
    begin = 0
    for shape in shapes:
        end = begin + int(np.prod(shape, dtype=np.int64))
        yield flat[begin:end].reshape(shape)
        begin = end


class Bucket:
    """Gradients of one dtype that travel together.

    Args:
        members: The positions of its parameters among those that take part.
        grads: Their gradients, all of one dtype.
        wire_dtype: The dtype in which they are averaged.
        allocate: Returns a buffer of a length and dtype, in memory of the strategy's choice.
    """

    def __init__(
        self, members: Sequence[int], grads: Sequence[_Array], wire_dtype: np.dtype[Any], allocate: Allocate
    ) -> None:
        shapes = [grad.shape for grad in grads]
        length = sum(grad.size for grad in grads)
        dtype = grads[0].dtype
        self.buffer = allocate(length, wire_dtype)
        wire = self.buffer.array
        self._members = members
        self._packed = list(split(wire, shapes))
        # Only where the gradients are averaged in another dtype than theirs do they need a memory of their own.
        self._grads = wire if wire_dtype == dtype else np.empty(length, dtype)
        self._views = list(split(self._grads, shapes))

    def pack(self, params: Sequence[Named]) -> None:
        """Copy the gradients, of any memory layout, into the buffer, in its dtype."""
        # All are floats; "unsafe" is what NumPy calls it to go between bfloat16 and float16.
        for member, packed in zip(self._members, self._packed, strict=True):
            np.copyto(packed, params[member][1].grad, casting="unsafe")

    def view(self, params: Sequence[Named]) -> None:
        """Make the gradients views of the averaged buffer, in their own dtype."""
        if self._grads is not self.buffer.array:
            np.copyto(self._grads, self.buffer.array, casting="unsafe")
        for member, view in zip(self._members, self._views, strict=True):
            params[member][1].grad = view


def make_buckets(
    grads: Sequence[_Array],
    wire_dtype: Callable[[np.dtype[Any]], np.dtype[Any]],
    allocate: Allocate,
    one_each: bool,
) -> list[Bucket]:
    """Share the gradients out among buckets: one for each dtype, or one for each gradient.

    Args:
        grads: The gradients, in an order that is the same on every rank.
        wire_dtype: Returns the dtype in which gradients of a dtype are averaged.
        allocate: As for :class:`Bucket`.
        one_each: Whether every gradient gets a bucket of its own.

    Returns:
        The buckets, in the same order on every rank.
    """
    groups: dict[Any, list[int]] = {}
    for position, grad in enumerate(grads):
        groups.setdefault(position if one_each else grad.dtype, []).append(position)
    return [
        Bucket(members, [grads[m] for m in members], wire_dtype(grads[members[0]].dtype), allocate)
        for members in groups.values()
    ]
