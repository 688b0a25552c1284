"""Steps 3 and 5: gradients are copied into one buffer, and afterwards they *are* that buffer, as views of it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, Protocol, TypeVar

import numpy as np

from mn_comm.gradients.select import Named
from mn_comm.intra import Buffer

__all__ = ["AnyBucket", "Bucket", "Spec", "assign", "count", "gradients_of", "make_buckets", "split"]

_Array = np.ndarray[Any, Any]
_Dtype = np.dtype[Any]
_B = TypeVar("_B")
_K = TypeVar("_K")
Spec = tuple[tuple[int, ...], _Dtype]
"""The shape and dtype of a gradient."""


def split(flat: _Array, shapes: Iterable[tuple[int, ...]]) -> Iterator[_Array]:
    """Yield one view of a one-dimensional array after another, of the given shapes."""
    begin = 0
    for shape in shapes:
        end = begin + count(shape)
        yield flat[begin:end].reshape(shape)
        begin = end


class AnyBucket(Protocol):
    """What buckets in host memory and on a device have in common.

    Attributes:
        members: The positions of its parameters among those that take part.
        buffer: The memory in which they are averaged.
    """

    members: Sequence[int]
    buffer: Any

    def pack(self, params: Sequence[Named], grads: Sequence[Any] | None) -> None:
        """Copy the gradients into the buffer.

        Args:
            params: Names and parameters that take part.
            grads: Their gradients, if they were asked for theirs before.
        """
        ...

    def view(self, params: Sequence[Named]) -> None:
        """Make the gradients views of the averaged buffer, in their own dtype."""
        ...


class Bucket:
    """Gradients of one dtype that travel together, in host memory.

    Args:
        members: The positions of its parameters among those that take part.
        shapes: The shapes of their gradients.
        dtype: The dtype of their gradients.
        buffer: The memory in which they are averaged, in the dtype in which they travel.
    """

    def __init__(
        self, members: Sequence[int], shapes: Sequence[tuple[int, ...]], dtype: _Dtype, buffer: Buffer
    ) -> None:
        self.members = members
        self.buffer = buffer
        self._shapes = shapes
        # Only where the gradients travel in another dtype than theirs do they need a memory of their own.
        self._grads = buffer.array if buffer.array.dtype == dtype else np.empty(buffer.array.size, dtype)
        self._views = list(split(self._grads, shapes))

    def pack(self, params: Sequence[Named], grads: Sequence[Any] | None = None) -> None:
        """Copy the gradients, of any memory layout, into the buffer, in its dtype; a missing one as zeros."""
        mine = gradients_of(self.members, params, grads)
        for i, grad in enumerate(mine):
            if grad is None:
                mine[i] = np.zeros(self._shapes[i], self.buffer.array.dtype)
        # One call, since thousands take longer than the copying itself. All are floats; "unsafe" is what NumPy calls it
        # to go between bfloat16 and float16.
        np.concatenate(mine, axis=None, out=self.buffer.array, casting="unsafe")

    def view(self, params: Sequence[Named]) -> None:
        """Make the gradients views of the averaged buffer, in their own dtype."""
        if self._grads is not self.buffer.array:
            np.copyto(self._grads, self.buffer.array, casting="unsafe")
        assign(params, self.members, self._views)


def gradients_of(members: Sequence[int], params: Sequence[Named], grads: Sequence[Any] | None) -> list[Any]:
    """Return the gradients of some parameters; from ``grads`` if given, since a parameter takes its time to answer."""
    return [params[member][1].grad for member in members] if grads is None else [grads[member] for member in members]


def assign(params: Sequence[Named], members: Sequence[int], grads: Sequence[_Array]) -> None:
    """Make arrays, of the shapes and dtypes of the gradients that they replace, the gradients of some parameters."""
    for member, grad in zip(members, grads, strict=True):
        param = params[member][1]
        # Chainer's parameters check every gradient they are given, which takes longer than to average a small one. They
        # offer to leave that out, and here the shape and dtype are known to be right.
        unchecked = getattr(param, "_set_grad_without_check", None)
        if unchecked is None:
            param.grad = grad
        else:
            unchecked(grad)


def make_buckets(
    specs: Sequence[Spec],
    order: Iterable[int],
    most_bytes: int | None,
    wire_dtype: _Dtype | None,
    allocate: Callable[[int, _Dtype], _B],
    kind: Callable[[Sequence[int], Sequence[tuple[int, ...]], _Dtype, _B], _K] = Bucket,  # type: ignore[assignment]
) -> list[_K]:
    """Share gradients out among buckets.

    Args:
        specs: The shapes and dtypes of the gradients.
        order: Their positions, in the order in which they are to travel; the same on every rank.
        most_bytes: Of how many bytes a bucket may be, if it holds more than one gradient; ``None`` for any number.
        wire_dtype: The dtype in which they travel; ``None`` for their own.
        allocate: Returns a buffer of a length and dtype; collective.
        kind: Makes a bucket of members, shapes, dtype and buffer.

    Returns:
        The buckets, in the order in which their last members appear.
    """
    groups = _groups(specs, order, most_bytes)
    return [
        kind(
            group,
            [specs[member][0] for member in group],
            specs[group[0]][1],
            allocate(sum(count(specs[member][0]) for member in group), wire_dtype or specs[group[0]][1]),
        )
        for group in groups
    ]


def _groups(specs: Sequence[Spec], order: Iterable[int], most_bytes: int | None) -> list[list[int]]:
    closed: list[list[int]] = []
    filling: dict[_Dtype, tuple[list[int], int]] = {}
    for position in order:
        shape, dtype = specs[position]
        nbytes = count(shape) * dtype.itemsize
        group, held = filling.get(dtype, ([], 0))
        if group and most_bytes is not None and held + nbytes > most_bytes:
            closed.append(group)
            group, held = [], 0
        group.append(position)
        filling[dtype] = (group, held + nbytes)
    return closed + [group for group, _ in filling.values()]


def count(shape: tuple[int, ...]) -> int:
    """Return how many elements an array of this shape has."""
    return int(np.prod(shape, dtype=np.int64))
