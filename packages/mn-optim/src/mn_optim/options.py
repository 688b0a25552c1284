"""Options for ranks that do not communicate in every step: the values of ``local_steps`` and ``asynchronous``."""

from __future__ import annotations

import operator
from dataclasses import dataclass, field
from typing import Any, ClassVar

import chainer

__all__ = ["Asynchronous", "DiLoCo", "LocalSGD", "StreamingDiLoCo", "as_asynchronous", "as_local_steps", "describe"]


def _default_outer() -> chainer.Optimizer:
    return chainer.optimizers.NesterovAG(lr=0.7, momentum=0.9)


@dataclass(frozen=True)
class LocalSGD:
    """Local SGD: each rank takes local steps, then all ranks continue from the mean of their parameters.

    Stich 2018, arXiv 1805.09767; with ``start_after`` the post-local SGD of Lin et al. 2018, arXiv 1808.07217.

    Args:
        steps: How many steps a rank takes between two meetings.
        average_state: Whether the optimizer's state (momentum, Adam's moments) is averaged as well.
        start_after: The number of exact steps at the beginning, with gradients averaged in each.

    Raises:
        TypeError: An argument is not an integer.
        ValueError: ``steps`` is below 1, or ``start_after`` below 0.
    """

    steps: int
    average_state: bool = False
    start_after: int = 0

    fragments: ClassVar[int] = 1
    delay: ClassVar[int] = 0
    alpha: ClassVar[float] = 1.0

    @property
    def outer(self) -> chainer.Optimizer:
        """An outer optimizer that applies the mean unchanged."""
        return chainer.optimizers.SGD(lr=1.0)

    def __post_init__(self) -> None:
        _expect_at_least(1, "local_steps", self.steps)
        _expect_at_least(0, "start_after", self.start_after)


@dataclass(frozen=True)
class DiLoCo:
    """DiLoCo: the mean change of the ranks' parameters is the gradient of a second, outer optimizer.

    Douillard et al. 2023, arXiv 2311.08105. The outer optimizer holds the parameters that all ranks have in common;
    after its step, every rank continues from these.

    Args:
        steps: How many steps a rank takes between two meetings.
        outer: The outer optimizer, not set up; it is copied. By default Nesterov's, with the paper's numbers.
        start_after: The number of exact steps at the beginning, with gradients averaged in each.

    Raises:
        TypeError: An argument is not an integer, or ``outer`` is not an optimizer of Chainer.
        ValueError: ``steps`` is below 1, or ``start_after`` below 0.
    """

    steps: int
    outer: chainer.Optimizer = field(default_factory=_default_outer)
    start_after: int = 0

    fragments: ClassVar[int] = 1
    delay: ClassVar[int] = 0
    alpha: ClassVar[float] = 1.0
    average_state: ClassVar[bool] = False

    def __post_init__(self) -> None:
        _expect_at_least(1, "local_steps", self.steps)
        _expect_at_least(0, "start_after", self.start_after)
        _expect_optimizer(self.outer)


@dataclass(frozen=True)
class StreamingDiLoCo:
    """Streaming DiLoCo: DiLoCo with a model in fragments, which are exchanged one by one during training.

    Douillard et al. 2025, arXiv 2501.18512. Each fragment has one meeting every ``steps`` steps. The exchange runs in
    the background. The outer optimizer takes its step ``delay`` steps after the exchange began, and the result is
    combined with the rank's own parameters.

    Args:
        steps: The number of steps between two meetings of the same fragment.
        outer: The outer optimizer, not set up; each fragment has a copy. By default Nesterov's, with the paper's
            numbers.
        fragments: The number of fragments, of about equal size, into which the model is divided; parameters are not
            split.
        delay: How many steps an exchange may take. With 0, the rank waits for it immediately.
        alpha: The share of the common parameters in a rank's new parameters. With 1, it takes the common parameters,
            and loses the changes that it made during the delay. The paper's factor is the complement, the share of the
            rank's own parameters.
        start_after: The number of exact steps at the beginning, with gradients averaged in each.

    Raises:
        TypeError: An argument is not an integer, or ``outer`` is not an optimizer of Chainer.
        ValueError: ``steps`` is below 1, ``start_after`` below 0, ``fragments`` not in 1..steps, ``delay`` not in
            0..steps-1, or ``alpha`` outside (0, 1].
    """

    steps: int
    outer: chainer.Optimizer = field(default_factory=_default_outer)
    fragments: int = 4
    delay: int = 1
    alpha: float = 0.5
    start_after: int = 0

    average_state: ClassVar[bool] = False

    def __post_init__(self) -> None:
        _expect_at_least(1, "local_steps", self.steps)
        _expect_at_least(0, "start_after", self.start_after)
        _expect_optimizer(self.outer)
        if not 1 <= operator.index(self.fragments) <= self.steps:
            raise ValueError(
                f"expected fragments in 1..{self.steps}, as each needs a step to meet; got {self.fragments}"
            )
        if not 0 <= operator.index(self.delay) < self.steps:
            raise ValueError(
                f"expected delay in 0..{self.steps - 1}, so that an exchange ends before the next one; got {self.delay}"
            )
        if not 0 < self.alpha <= 1:
            raise ValueError(f"expected alpha in (0, 1], got {self.alpha}")


@dataclass(frozen=True)
class Asynchronous:
    """Repeated averaging of the parameters in the background, for which no rank waits.

    Each rank continues to train in the meantime, and then adds the difference between the mean and the parameters that
    it sent. Bagua calls this asynchronous model average; Lian et al. 2017, arXiv 1710.06952, analyse its pairwise form.

    Args:
        warmup_steps: The number of exact steps at the beginning, with gradients averaged in each.
        max_staleness: A rank that has taken this many steps since it last sent its parameters waits for their mean.
            This limits how far ranks drift apart when the network is slow; no rank waits for a slow rank.
        interval: The number of seconds between the end of an average and the start of the next.

    Raises:
        TypeError: An argument is not a number.
        ValueError: ``warmup_steps`` is below 0, ``max_staleness`` below 1, or ``interval`` below 0.
    """

    warmup_steps: int = 0
    max_staleness: int = 100
    interval: float = 0.01

    def __post_init__(self) -> None:
        _expect_at_least(0, "warmup_steps", self.warmup_steps)
        _expect_at_least(1, "max_staleness", self.max_staleness)
        if not 0 <= self.interval < float("inf"):
            raise ValueError(f"expected interval of at least 0 seconds, got {self.interval}")


def as_local_steps(value: Any) -> LocalSGD | DiLoCo | StreamingDiLoCo:
    """Return the options for the argument ``local_steps``.

    Raises:
        TypeError: It is neither a number of steps nor one of the three classes.
        ValueError: It is a number below 1.
    """
    if isinstance(value, LocalSGD | DiLoCo | StreamingDiLoCo):
        return value
    if isinstance(value, bool) or not hasattr(value, "__index__"):
        raise TypeError(
            "expected a number of steps, LocalSGD, DiLoCo or StreamingDiLoCo for local_steps, got "
            f"{type(value).__name__}: {value!r:.80}"
        )
    return LocalSGD(operator.index(value))


def as_asynchronous(value: Any) -> Asynchronous:
    """Return the options for the argument ``asynchronous``.

    Raises:
        TypeError: It is neither a bool nor an ``Asynchronous``.
    """
    if isinstance(value, Asynchronous):
        return value
    if value is not True:
        raise TypeError(f"expected a bool or Asynchronous for asynchronous, got {type(value).__name__}: {value!r:.80}")
    return Asynchronous()


def describe(options: Any) -> str:
    """Describe the options that must be the same on all ranks, as text."""
    values = {name: getattr(options, name) for name in options.__dataclass_fields__}
    outer = values.pop("outer", None)  # whose repr would contain its address
    if outer is not None:
        numbers = dict(sorted(outer.hyperparam.get_dict().items())) if hasattr(outer, "hyperparam") else {}
        values["outer"] = f"{type(outer).__name__}({', '.join(f'{k}={v}' for k, v in numbers.items())})"
    return f"{type(options).__name__}({', '.join(f'{name}={value}' for name, value in values.items())})"


def _expect_at_least(lowest: int, name: str, value: Any) -> None:
    if isinstance(value, bool) or not hasattr(value, "__index__"):
        raise TypeError(f"expected an integer for {name}, got {type(value).__name__}: {value!r:.80}")
    if value < lowest:
        raise ValueError(f"expected {name} of at least {lowest}, got {value}")


def _expect_optimizer(outer: Any) -> None:
    if not isinstance(outer, chainer.Optimizer):
        raise TypeError(f"expected a chainer.Optimizer for outer, got {type(outer).__name__}: {outer!r:.80}")
    if getattr(outer, "target", None) is not None:
        raise ValueError("expected an outer optimizer that is not set up, got one that has a model")
