"""The base class of schemes: a scheme performs a step of training on behalf of the optimizer."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

import chainer

from mn_comm import Change
from mn_comm.building_blocks import CompressionReport
from mn_optim.join_state import JoinState
from mn_optim.sharding import Shards

__all__ = ["Averaging", "Backward", "Scheme", "TakeStep"]

Backward = Callable[[Callable[[chainer.Variable], None] | None], None]
"""Computes the gradients; calls its argument with each gradient as it becomes final."""
TakeStep = Callable[[], None]
"""Makes the actual optimizer take a step with the current gradients of the model."""


class Averaging(Protocol):
    """What averages the gradients of a step.

    Attributes:
        loss_scale: The factor for the loss of a step's gradients; when the step is taken, the factor for its means.
    """

    loss_scale: float | None

    def use_loss_scale(self, loss_scale: float | None, has_loss: bool) -> None:
        """Set the factor for the loss of the next step's gradients, if there is a loss."""

    def exchange_messages(self, model: chainer.Link, until_quiet: bool = False) -> None:
        """Inform the other ranks of a join at their next averaging; collective.

        Args:
            model: The model.
            until_quiet: Whether all ranks call this instead of averaging, and continue only when none has a new
                message.
        """

    def agree_on(self, operation: str, model: chainer.Link, compares: bool = False) -> None:
        """Raise on every rank unless all ranks are about to do the same; collective.

        If a parameter was added on one rank only, the others average the gradients of the parameters that they had
        before, maybe in the background, where nothing else meets them.

        Args:
            operation: What comes next, for messages.
            model: The model.
            compares: Whether its parameters must be the same on all ranks in names, shapes and dtypes.

        Raises:
            ValueError: The ranks differ.
        """


class Scheme:
    """Determines what is averaged over the ranks, and when. By default, nothing is pending between two steps.

    Attributes:
        zero_fill: Whether an initialised parameter without a gradient counts as one of zeros.
        is_meeting: Whether ranks exchanged something in the latest step.
        share_of_meeting: The share of the model that ranks exchange when they do.
        may_diverge: Whether ranks may hold different parameters between two steps.
        join: Within a join, which ranks have data; otherwise ``None``.
        shards: This rank's part of the actual optimizer's state, if the state is sharded.
    """

    zero_fill: bool = True
    is_meeting: bool = True
    share_of_meeting: float = 1.0
    may_diverge: bool = False
    join: JoinState | None = None
    shards: Shards | None = None

    @property
    def has_diverged(self) -> bool:
        """Whether ranks may hold different parameters now."""
        return False

    @property
    def synchronous(self) -> Averaging | None:
        """What averages gradients in the next step; ``None`` if that is a local step."""
        return None

    @property
    def compression_report(self) -> CompressionReport | None:
        """The report of compression for the latest step; ``None`` without compression."""
        return None

    def step(self, model: chainer.Link, backward: Backward | None, take_step: TakeStep) -> None:
        """Compute gradients, and take a step; average before, during or after it.

        Args:
            model: The model.
            backward: Computes its gradients; ``None`` if they are there.
            take_step: Takes the step; need not be called.
        """
        raise NotImplementedError

    def idle(self, model: chainer.Link) -> None:
        """Take part in local steps of the other ranks, without data."""

    def fail(self, model: chainer.Link, error: Exception) -> None:
        """Inform the other ranks that this one has left a join because of an exception, if steps are local."""

    def check(self, model: chainer.Link) -> None:
        """Raise on every rank if the scheme cannot train a model; collective."""

    def restart(self, model: chainer.Link) -> None:
        """Discard pending averages, before the parameters of rank 0 are distributed; collective."""

    def restart_after_loss(self, change: Change) -> None:
        """Discard pending averages, because a rank was lost, in a step or between two steps."""
        self.restart(None)

    def synchronize(self, model: chainer.Link, is_shared: bool) -> bool:
        """Make all ranks' parameters equal; collective.

        Args:
            model: The model.
            is_shared: Whether the parameters of rank 0 have been distributed already.

        Returns:
            Whether they were distributed in the meantime.
        """
        return False

    def serialize(self, serializer: Any, model: chainer.Link) -> None:
        """Save or load the scheme's state, which may be missing where it is loaded; not collective."""
