"""Learning rates for large batches, as extensions of Chainer's trainer: functions of the epoch, alike on all ranks."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any

from chainer.training import PRIORITY_EDITOR, Extension

from mn_optim.rmsprop_warmup import sgd_share

__all__ = [
    "SLOW_START",
    "LearningRateSchedule",
    "RMSpropWarmupSchedule",
    "gradual_warmup",
    "linear_scaling",
    "piecewise",
]

Schedule = Callable[[float], float]
"""Returns a learning rate for a number of epochs, with their fraction."""

SLOW_START = ((0, 0.5), (40, 0.075), (70, 0.01), (85, 0.001))
"""From which epoch on what the base learning rate is multiplied by, in a training of 90 epochs.

The slow-start learning rate schedule of Akiba, Suzuki and Fukuda 2017 (arXiv 1711.04325, in the section of that name):
0.5 for 40 epochs, 0.075 for 30, 0.01 for 15 and 0.001 for 5. The base is that of :func:`linear_scaling`, 12.8 for
batches of 32,768.
"""


def linear_scaling(lr: float, batch_size: int, reference: int = 256) -> float:
    """Return the learning rate for a large batch: it grows with it (Goyal et al. 2017, arXiv 1706.02677, section 2.1).

    Args:
        lr: What is good for ``reference`` samples.
        batch_size: The samples of all ranks' mini-batches together.
        reference: The samples that ``lr`` is for.

    Raises:
        ValueError: A number of samples is below 1.
    """
    if batch_size < 1 or reference < 1:
        raise ValueError(f"expected batches of at least 1 sample, got {batch_size} and {reference}")
    return lr * batch_size / reference


def gradual_warmup(lr: float | Schedule, start: float, epochs: float) -> Schedule:
    """Return a schedule that goes up in a line before another takes over (arXiv 1706.02677, section 2.2).

    Args:
        lr: The learning rate afterwards, or a schedule.
        start: The learning rate at the beginning.
        epochs: How long it takes.

    Raises:
        ValueError: ``epochs`` is below 0.
    """
    if epochs < 0:
        raise ValueError(f"expected epochs of at least 0, got {epochs}")

    def schedule(epoch: float) -> float:
        after = lr(max(epoch, epochs)) if callable(lr) else lr
        return after if epoch >= epochs else start + (after - start) * epoch / epochs

    return schedule


def piecewise(lr: float, steps: Sequence[tuple[float, float]]) -> Schedule:
    """Return a schedule of a constant rate from each of some epochs on.

    Args:
        lr: The base learning rate.
        steps: Epochs, ascending, the first one 0, and by what to multiply the base learning rate from then on; as
            :data:`SLOW_START`.

    Raises:
        ValueError: The epochs do not ascend from 0.
    """
    epochs = [epoch for epoch, _ in steps]
    if not epochs or epochs[0] != 0 or any(a >= b for a, b in pairwise(epochs)):
        raise ValueError(f"expected epochs that ascend from 0, got {epochs}")
    return lambda epoch: lr * next(factor for begin, factor in reversed(steps) if begin <= max(epoch, 0))


class LearningRateSchedule(Extension):  # type: ignore[misc]  # Chainer has no types
    """Sets the learning rate before each update, by a schedule.

    It depends on ``updater.epoch_detail`` only, so that a training that goes on from a snapshot goes on with the
    learning rate it would have had.

    Args:
        schedule: Returns the learning rate for a number of epochs, with their fraction: :func:`gradual_warmup`,
            :func:`piecewise`, or a function of one's own.
        attr: Which attribute of the optimizer that is; by default ``lr``, or ``alpha`` where there is none, as in Adam.
        optimizer: The optimizer; by default the main one of the updater.

    Raises:
        AttributeError: The optimizer has no such attribute, when the training begins.
    """

    trigger = 1, "iteration"
    # Extensions run after an update: the learning rate is that of the next one. Before those that write.
    priority = PRIORITY_EDITOR

    def __init__(self, schedule: Schedule, attr: str | None = None, optimizer: Any = None) -> None:
        self._schedule = schedule
        self._attr = attr
        self._optimizer = optimizer

    def initialize(self, trainer: Any) -> None:
        """Set it for the first update."""
        self(trainer)

    def __call__(self, trainer: Any) -> None:
        """Set it for the next update."""
        optimizer = trainer.updater.get_optimizer("main") if self._optimizer is None else self._optimizer
        # Adam's attribute lr is something else; RMSprop's alpha is, too.
        attr = self._attr or ("lr" if hasattr(optimizer.hyperparam, "lr") else "alpha")
        _expect_attribute(optimizer, attr)
        setattr(optimizer, attr, self._schedule(trainer.updater.epoch_detail))


class RMSpropWarmupSchedule(Extension):  # type: ignore[misc]
    """Passes :class:`mn_optim.RMSpropWarmup` from RMSprop to momentum SGD.

    The RMSprop warm-up of Akiba, Suzuki and Fukuda 2017 (arXiv 1711.04325, in the section of that name), whose values
    are the defaults.

    The share of SGD grows from almost nothing to one half, exponentially, and on to 1, in a line. The rest is
    RMSprop's, at a learning rate of its own: ``alpha_rmsprop`` is that, divided by the optimizer's, times the rest.
    What sets ``lr`` must have a higher priority, as :class:`LearningRateSchedule` has.

    Args:
        lr_rmsprop: The learning rate of RMSprop.
        center: In which epoch both have one half.
        period: How many epochs the passage takes: see :func:`mn_optim.sgd_share`.
        optimizer: The optimizer; by default the main one of the updater.

    Raises:
        AttributeError: The optimizer has no such attribute, when the training begins.
    """

    trigger = 1, "iteration"
    priority = PRIORITY_EDITOR - 1  # behind the learning rate

    def __init__(
        self, lr_rmsprop: float = 3e-4, center: float = 10.0, period: float = 5.0, optimizer: Any = None
    ) -> None:
        self._lr_rmsprop = lr_rmsprop
        self._center = center
        self._period = period
        self._optimizer = optimizer

    def initialize(self, trainer: Any) -> None:
        """Set both for the first update."""
        self(trainer)

    def __call__(self, trainer: Any) -> None:
        """Set both for the next update."""
        optimizer = trainer.updater.get_optimizer("main") if self._optimizer is None else self._optimizer
        _expect_attribute(optimizer, "alpha_rmsprop")
        share = sgd_share(trainer.updater.epoch_detail, self._center, self._period)
        optimizer.alpha_sgd = share
        # Where a warm-up begins at 0, nothing moves in that step.
        optimizer.alpha_rmsprop = (1 - share) * self._lr_rmsprop / optimizer.lr if optimizer.lr else 0.0


def _expect_attribute(optimizer: Any, attr: str) -> None:
    """Raise where to set an attribute would change nothing."""
    if not hasattr(optimizer, attr):
        actual = getattr(optimizer, "actual_optimizer", optimizer)
        raise AttributeError(f"expected an optimizer that has {attr}, got {type(actual).__name__}")
