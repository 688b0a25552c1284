"""Learning rates for large batches, as extensions of Chainer's trainer: functions of the epoch, equal on all ranks."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any

from chainer.training import PRIORITY_EDITOR, Extension

from mn_optim.rmsprop_warmup import sgd_share

Schedule = Callable[[float], float]
"""A function that returns the learning rate for a number of epochs, which may be fractional."""

SLOW_START = ((0, 0.5), (40, 0.075), (70, 0.01), (85, 0.001))
"""Pairs of an epoch and the factor for the base learning rate from then on, for 90 epochs of training.

The slow-start learning rate schedule of Akiba, Suzuki and Fukuda 2017 (arXiv 1711.04325, in the section of that name):
0.5 for 40 epochs, 0.075 for 30, 0.01 for 15 and 0.001 for 5. The base is that of :func:`linear_scaling`, 12.8 for
batches of 32,768.
"""


def linear_scaling(lr: float, batch_size: int, reference: int = 256) -> float:
    """Return a learning rate proportional to the batch size (Goyal et al. 2017, arXiv 1706.02677, section 2.1).

    Args:
        lr: The learning rate for ``reference`` samples.
        batch_size: The total number of samples in the mini-batches of all ranks.
        reference: The number of samples that ``lr`` is for.

    Raises:
        ValueError: A number of samples is below 1.
    """
    if batch_size < 1 or reference < 1:
        raise ValueError(f"expected batches of at least 1 sample, got {batch_size} and {reference}")
    return lr * batch_size / reference


def gradual_warmup(lr: float | Schedule, start: float, epochs: float) -> Schedule:
    """Return a schedule that increases linearly, and then follows another one (arXiv 1706.02677, section 2.2).

    Args:
        lr: The learning rate after the warm-up, or a schedule.
        start: The learning rate at the beginning.
        epochs: The length of the warm-up.

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
    """Return a schedule with a constant rate from each of some epochs on.

    Args:
        lr: The base learning rate.
        steps: Pairs of an epoch, ascending from 0, and the factor for the base learning rate from then on; for example
            :data:`SLOW_START`.

    Raises:
        ValueError: The epochs do not ascend from 0.
    """
    epochs = [epoch for epoch, _ in steps]
    if not epochs or epochs[0] != 0 or any(a >= b for a, b in pairwise(epochs)):
        raise ValueError(f"expected epochs that ascend from 0, got {epochs}")
    return lambda epoch: lr * next(factor for begin, factor in reversed(steps) if begin <= max(epoch, 0))


class LearningRateSchedule(Extension):  # type: ignore[misc]  # Chainer has no types
    """Sets the learning rate before each update, according to a schedule.

    It depends only on ``updater.epoch_detail``, so that training resumed from a snapshot continues with the right
    learning rate.

    Args:
        schedule: Returns the learning rate for a number of epochs, which may be fractional: the result of
            :func:`gradual_warmup` or :func:`piecewise`, or your own function.
        attr: The attribute of the optimizer; by default ``lr``, or ``alpha`` if there is no ``lr``, as in Adam.
        optimizer: The optimizer; by default the main one of the updater.

    Raises:
        AttributeError: The optimizer has no such attribute, when the training begins.
    """

    trigger = 1, "iteration"
    # Extensions run after an update, so this sets the learning rate of the next one. Before extensions that write.
    priority = PRIORITY_EDITOR

    def __init__(self, schedule: Schedule, attr: str | None = None, optimizer: Any = None) -> None:
        self._schedule = schedule
        self._attr = attr
        self._optimizer = optimizer

    def initialize(self, trainer: Any) -> None:
        """Set the learning rate for the first update."""
        self(trainer)

    def __call__(self, trainer: Any) -> None:
        """Set the learning rate for the next update."""
        optimizer = trainer.updater.get_optimizer("main") if self._optimizer is None else self._optimizer
        # Adam's attribute lr has a different meaning, and so has RMSprop's alpha.
        attr = self._attr or ("lr" if hasattr(optimizer.hyperparam, "lr") else "alpha")
        _expect_attribute(optimizer, attr)
        setattr(optimizer, attr, self._schedule(trainer.updater.epoch_detail))


class RMSpropWarmupSchedule(Extension):  # type: ignore[misc]
    """Moves :class:`mn_optim.RMSpropWarmup` from RMSprop to momentum SGD.

    The RMSprop warm-up of Akiba, Suzuki and Fukuda 2017 (arXiv 1711.04325, in the section of that name), whose values
    are the defaults.

    The share of SGD grows exponentially from almost 0 to one half, and then linearly to 1. The remaining share is
    RMSprop's, which has its own learning rate: ``alpha_rmsprop`` is this learning rate, divided by that of the
    optimizer, times the remaining share. An extension that sets ``lr`` must have a higher priority, as
    :class:`LearningRateSchedule` has.

    Args:
        lr_rmsprop: The learning rate of RMSprop.
        center: The epoch in which both shares are one half.
        period: How many epochs the transition takes; see :func:`mn_optim.sgd_share`.
        optimizer: The optimizer; by default the main one of the updater.

    Raises:
        AttributeError: The optimizer has no such attribute, when the training begins.
    """

    trigger = 1, "iteration"
    priority = PRIORITY_EDITOR - 1  # after the learning rate

    def __init__(
        self, lr_rmsprop: float = 3e-4, center: float = 10.0, period: float = 5.0, optimizer: Any = None
    ) -> None:
        self._lr_rmsprop = lr_rmsprop
        self._center = center
        self._period = period
        self._optimizer = optimizer

    def initialize(self, trainer: Any) -> None:
        """Set both shares for the first update."""
        self(trainer)

    def __call__(self, trainer: Any) -> None:
        """Set both shares for the next update."""
        optimizer = trainer.updater.get_optimizer("main") if self._optimizer is None else self._optimizer
        _expect_attribute(optimizer, "alpha_rmsprop")
        share = sgd_share(trainer.updater.epoch_detail, self._center, self._period)
        optimizer.alpha_sgd = share
        # If a warm-up begins at 0, nothing changes in that step.
        optimizer.alpha_rmsprop = (1 - share) * self._lr_rmsprop / optimizer.lr if optimizer.lr else 0.0


def _expect_attribute(optimizer: Any, attr: str) -> None:
    """Raise if setting an attribute would have no effect."""
    if not hasattr(optimizer, attr):
        actual = getattr(optimizer, "actual_optimizer", optimizer)
        raise AttributeError(f"expected an optimizer that has {attr}, got {type(actual).__name__}")
