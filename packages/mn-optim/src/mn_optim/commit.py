"""A step that is taken on all ranks or on none, and repeated after a rank was lost; see decision 0012.

Gradients are averaged, all ranks agree that they have succeeded, and only then is anything applied. Everything that a
forward pass changes as a side effect is restored before the pass is repeated.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

import chainer
import numpy as np

from mn_comm import CommunicatorBase, RankLost, is_elastic

__all__ = ["Defer", "Forward", "commit", "refuse_elastic"]

Forward = Callable[[], chainer.Variable]
"""Computes the loss."""
Defer = Callable[[Callable[[], None]], None]
"""Records what is to be done once all ranks have agreed."""


class Attempt(Protocol):
    """Computes and averages gradients; collective."""

    def __call__(self, step: Callable[[], None], defer: Defer) -> None:
        """Register the step to be taken later, if there are means."""
        ...


def commit(
    communicator: CommunicatorBase,
    model: chainer.Link,
    attempt: Attempt,
    step: Callable[[], None],
    restore: Callable[[], None],
    *,
    can_repeat: bool,
    has_part: bool,
) -> Callable[[], None]:
    """Compute and average gradients until all ranks have succeeded; collective.

    Args:
        communicator: An elastic communicator.
        model: The model.
        attempt: Computes and averages, and registers the step.
        step: The actual optimizer's step.
        restore: Restores the state of the multi-node optimizer before another attempt.
        can_repeat: Whether the gradients can be computed again.
        has_part: Whether the model already has accumulated gradients, to which the attempt adds.

    Returns:
        A function that takes the step; it does nothing if there are no means.

    Raises:
        RankLost: A rank was lost, and the gradients cannot be computed again (on every remaining rank).
    """
    before = _Before(model, has_part) if can_repeat else None
    deferred: list[Callable[[], None]] = []

    def prepare() -> None:
        deferred.clear()
        restore()
        if before is not None:
            before.put_back()

    transact: Any = communicator.transact  # type: ignore[attr-defined]
    try:
        transact(
            lambda: attempt(step, deferred.append),
            repeat=can_repeat,
            prepare=prepare,
            is_step=True,
            name="update without a loss function",
        )
    except RankLost:
        restore()
        raise

    def take() -> None:
        for each in deferred:
            each()

    return take


def refuse_elastic(communicator: CommunicatorBase, what: str) -> None:
    """Raise ValueError, on every rank, for options that do not allow a step to be repeated."""
    if is_elastic(communicator):
        raise ValueError(
            f"expected {what} with a communicator made by create_communicator(…, elastic=False), got an elastic one: "
            "ranks whose parameters differ, or that have parts of a state, cannot stand in for one that is lost"
        )


class _Before:
    """The state that a forward and backward pass change as a side effect, before the pass.

    This is NumPy's global random state, persistent values of the model (a batch normalisation's running mean), and
    accumulated gradients.

    Args:
        model: The model.
        has_part: Whether gradients are being accumulated.
    """

    def __init__(self, model: chainer.Link, has_part: bool) -> None:
        self._random = np.random.get_state()
        self._persistent = [
            (link, name, _copy(getattr(link, name)))
            for link in model.links()
            for name in link._persistent  # noqa: SLF001 - Chainer has no public name for it
        ]
        self._grads = [(param, _copy(param.grad)) for param in model.params()] if has_part else []

    def put_back(self) -> None:
        """Restore this state; may be called several times."""
        np.random.set_state(self._random)
        for link, name, value in self._persistent:
            _put(link, name, value)
        for param, grad in self._grads:
            param.grad = _copy(grad)


def _copy(value: Any) -> Any:
    return value.copy() if hasattr(value, "copy") and hasattr(value, "dtype") else value


def _put(link: chainer.Link, name: str, value: Any) -> None:
    found = getattr(link, name)
    if isinstance(found, np.ndarray) and isinstance(value, np.ndarray) and found.shape == value.shape:
        found[...] = value  # the same array: other code may refer to it
    else:
        setattr(link, name, _copy(value))
