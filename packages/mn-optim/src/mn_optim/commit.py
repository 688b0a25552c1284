"""A step that is taken on all ranks or on none, and repeated after a rank was lost; see decision 0012.

Gradients are averaged, all ranks agree that they have succeeded, and only then is anything applied. Everything that a
forward pass changes as a side effect is restored before the pass is repeated.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import chainer
import numpy as np

from mn_comm import CommunicatorBase, RankLost, is_elastic
from mn_optim.side_effects import KeptPersistents, copy_of

__all__ = ["Defer", "Forward", "commit", "refuse_elastic"]

Forward = Callable[[], chainer.Variable]
"""Computes the loss."""
Defer = Callable[[Callable[[], None]], None]
"""Records what is to be done once all ranks have agreed."""


def commit(
    communicator: CommunicatorBase,
    model: chainer.Link,
    attempt: Callable[[Defer], None],
    restore: Callable[[], None],
    *,
    can_repeat: bool,
    has_part: bool,
) -> None:
    """Compute and average gradients until all ranks have succeeded, then take the step; collective.

    Args:
        communicator: An elastic communicator.
        model: The model.
        attempt: Computes and averages, and records the step if there are means.
        restore: Restores the state of the multi-node optimizer before another attempt.
        can_repeat: Whether the gradients can be computed again.
        has_part: Whether the model already has accumulated gradients, to which the attempt adds.

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
            lambda: attempt(deferred.append),
            repeat=can_repeat,
            prepare=prepare,
            is_step=True,
            name="update without a loss function",
        )
    except RankLost:
        restore()
        raise
    for step in deferred:
        step()


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
        self._persistents = KeptPersistents(model.links())
        self._grads = [(param, copy_of(param.grad)) for param in model.params()] if has_part else []

    def put_back(self) -> None:
        """Restore this state; may be called several times."""
        np.random.set_state(self._random)
        self._persistents.put_back()
        for param, grad in self._grads:
            param.grad = copy_of(grad)
