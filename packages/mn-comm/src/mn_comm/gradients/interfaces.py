"""The interfaces by which others take part in averaging: hooks, which are given buckets, and the messages of a join."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

from mn_comm.basis.arithmetic import is_half
from mn_comm.gradients.parts import Arrays
from mn_comm.ranks.background import Future


class AnyBucket(Protocol):
    """The interface of buckets, in host memory and on a device, and the argument of a communication hook.

    Attributes:
        index: Its number; buckets are sent in this order.
        members: The positions of the gradients that it holds completely or partly, among those that take part.
        names: The names of their parameters.
        shapes: The shapes of these gradients or parts.
        flat: The gradients, one after the other: one-dimensional, in the dtype in which they are sent.
        submit: Starts a function, immediately or in the thread that communicates, and returns a future of its result.
        needs_agreement: Whether ranks must have agreed on their gradients before it is averaged.
    """

    index: int
    names: list[str]
    shapes: list[tuple[int, ...]]
    flat: Any
    submit: Callable[[Callable[[], Any]], Future[Any]]
    members: list[int]
    needs_agreement: bool

    @property
    def nbytes(self) -> int:
        """Its size in bytes."""

    def pack(self, arrays: Arrays) -> None:
        """Copy gradients, of any memory layout, into the bucket; ``None`` counts as zeros."""

    def unpack(self, arrays: Arrays, means: Any) -> None:
        """Write the means that this rank needs from the bucket to the gradients."""

    def average_in_place(self, arrays: Arrays) -> None:
        """Overwrite gradients with their means over all ranks; collective."""

    def launch(self) -> Future[Any]:
        """Start to average the packed gradients; collective.

        Returns:
            A future of ``flat``: it then holds the means, and other ranks may still be reading it.
        """

    def average(self, array: Any = None) -> Future[Any]:
        """Start to average an array over all ranks; collective. For a communication hook.

        Args:
            array: One-dimensional, of floats, of equal length and dtype on every rank, on the device of ``flat``; by
                default ``flat``.

        Returns:
            A future of the mean: for ``flat``, this is ``flat`` itself, overwritten; otherwise a new array. You may
            change it.

        Raises:
            TypeError: The array does not hold floats.
        """


def check_floats(array: Any) -> None:
    """Raise TypeError unless an array contains floats: integers have no exact mean."""
    if not (array.dtype.kind == "f" or is_half(array.dtype)):
        raise TypeError(f"comm_hook: expected an array of floats to average, got dtype {array.dtype}")


CommunicationHook = Callable[[AnyBucket], Future[Any]]
"""Starts to average a bucket, and returns a future of the mean of its ``flat``.

If an exception interrupts it, for example that of a signal handler, the backward pass is abandoned on every rank, and
it may be called again with the same bucket: the other ranks wait for what it starts. What it has started before is not
started again.
"""


class JoinMessages(Protocol):
    """The messages of a rank to the others within a join; they are exchanged together with the check.

    Attributes:
        has_news: Whether it has a message to send.
        message: The message; anything that can be pickled.
        factor: The factor by which its owner multiplies the means; 0 if nothing is done with them.
    """

    @property
    def has_news(self) -> bool: ...  # noqa: D102
    @property
    def message(self) -> Any: ...  # noqa: D102
    @property
    def factor(self) -> float: ...  # noqa: D102
    def receive(self, messages: Sequence[Any]) -> None:
        """Process the messages of all ranks; called on every rank if one has news. May raise, on all ranks alike."""
