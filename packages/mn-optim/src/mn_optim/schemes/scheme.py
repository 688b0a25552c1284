"""What a scheme is: a step of training, of which the optimizer knows no more than that it comes to pass."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Protocol

import chainer

from mn_comm import CompressionReport
from mn_optim.roll import Roll

if TYPE_CHECKING:
    from mn_optim.schemes.exact import Exact

__all__ = ["Backward", "Scheme", "TakeStep"]

Backward = Callable[[Callable[[chainer.Variable], None] | None], None]
"""Computes the gradients; what it is given is told of each as it becomes final."""
TakeStep = Callable[[], None]
"""Has the actual optimizer take a step with the gradients that the model has then."""


class Scheme(Protocol):
    """What is averaged over the ranks, and when.

    Attributes:
        zero_fill: Whether an initialised parameter without a gradient counts as one of zeros.
        is_meeting: Whether ranks exchanged something in the latest step.
        may_diverge: Whether ranks may hold different parameters between two steps.
        roll: Who has data, within a join; else ``None``.
    """

    zero_fill: bool
    is_meeting: bool
    may_diverge: bool
    roll: Roll | None

    @property
    def compression_report(self) -> CompressionReport | None:
        """What compression did in the latest step, where the scheme itself sees to it."""
        ...

    @property
    def has_diverged(self) -> bool:
        """Whether ranks may hold different parameters now."""
        ...

    @property
    def exact(self) -> Exact | None:
        """What averages gradients in the next step; ``None`` if that is a step of a rank's own."""
        ...

    def step(self, model: chainer.Link, backward: Backward | None, take_step: TakeStep) -> None:
        """Compute gradients, and take a step; average before, after or meanwhile what is to be averaged.

        Args:
            model: The model.
            backward: Computes its gradients; ``None`` if they are there.
            take_step: Takes the step; need not be called.
        """
        ...

    def idle(self, model: chainer.Link) -> None:
        """Take part in a step of the other ranks' own, without data."""
        ...

    def fail(self, error: Exception) -> None:
        """Tell the other ranks that this one has left a join by an exception, where steps are a rank's own."""
        ...

    def restart(self, model: chainer.Link) -> None:
        """Forget what was under way, before the parameters of rank 0 are shared out; collective."""
        ...

    def synchronize(self, model: chainer.Link, is_shared: bool) -> bool:
        """Make all ranks' parameters equal; collective.

        Args:
            model: The model.
            is_shared: Whether the parameters of rank 0 were shared out before.

        Returns:
            Whether they were meanwhile.
        """
        ...

    def serialize(self, serializer: Any, model: chainer.Link) -> None:
        """Save or load the state, which may be missing where it is loaded; not collective."""
        ...
