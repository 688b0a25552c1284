"""The interface of schemes: a scheme performs a step of training on behalf of the optimizer."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Protocol

import chainer

from mn_comm import CompressionReport
from mn_optim.join_state import JoinState

if TYPE_CHECKING:
    from mn_optim.schemes.synchronous import Synchronous

__all__ = ["Backward", "Scheme", "TakeStep"]

Backward = Callable[[Callable[[chainer.Variable], None] | None], None]
"""Computes the gradients; calls its argument with each gradient as it becomes final."""
TakeStep = Callable[[], None]
"""Makes the actual optimizer take a step with the current gradients of the model."""


class Scheme(Protocol):
    """Determines what is averaged over the ranks, and when.

    Attributes:
        zero_fill: Whether an initialised parameter without a gradient counts as one of zeros.
        is_meeting: Whether ranks exchanged something in the latest step.
        may_diverge: Whether ranks may hold different parameters between two steps.
        join: Within a join, which ranks have data; otherwise ``None``.
    """

    zero_fill: bool
    is_meeting: bool
    may_diverge: bool
    join: JoinState | None

    @property
    def compression_report(self) -> CompressionReport | None:
        """The report of compression for the latest step, if the scheme itself compresses."""
        ...

    @property
    def has_diverged(self) -> bool:
        """Whether ranks may hold different parameters now."""
        ...

    @property
    def synchronous(self) -> Synchronous | None:
        """The scheme that averages gradients in the next step; ``None`` if that is a local step."""
        ...

    def step(self, model: chainer.Link, backward: Backward | None, take_step: TakeStep) -> None:
        """Compute gradients, and take a step; average before, during or after it.

        Args:
            model: The model.
            backward: Computes its gradients; ``None`` if they are there.
            take_step: Takes the step; need not be called.
        """
        ...

    def idle(self, model: chainer.Link) -> None:
        """Take part in local steps of the other ranks, without data."""
        ...

    def fail(self, error: Exception) -> None:
        """Inform the other ranks that this one has left a join because of an exception, if steps are local."""
        ...

    def restart(self, model: chainer.Link) -> None:
        """Discard pending averages, before the parameters of rank 0 are distributed; collective."""
        ...

    def synchronize(self, model: chainer.Link, is_shared: bool) -> bool:
        """Make all ranks' parameters equal; collective.

        Args:
            model: The model.
            is_shared: Whether the parameters of rank 0 have been distributed already.

        Returns:
            Whether they were distributed in the meantime.
        """
        ...

    def serialize(self, serializer: Any, model: chainer.Link) -> None:
        """Save or load the state, which may be missing where it is loaded; not collective."""
        ...
