"""A step that is taken on all ranks or on none, and repeated after a rank was lost; see decision 0012.

Gradients are averaged, all ranks agree that they have succeeded, and only then is anything applied. Everything that a
forward pass changes as a side effect is restored before the pass is repeated.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import chainer
import numpy as np

from mn_comm import RankLost
from mn_optim.schemes.scheme import Defer, Stepper
from mn_optim.side_effects import copy_of, keep_persistents


def commit(stepper: Stepper, model: chainer.Link, attempt: Callable[[Defer], None], can_repeat: bool) -> None:
    """Compute and average gradients until all ranks have succeeded, then take the step; collective.

    Args:
        stepper: Takes the optimizer's steps, with an elastic communicator.
        model: The model.
        attempt: Computes and averages, and records the step if there are means.
        can_repeat: Whether the gradients can be computed again.

    Raises:
        RankLost: A rank was lost, and the gradients cannot be computed again (on every remaining rank).
    """
    has_part, seen, shared = stepper.has_part, stepper.target_params, stepper.shared
    put_back = _keep_side_effects(model, has_part) if can_repeat else None
    deferred: list[Callable[[], None]] = []

    def restore() -> None:
        deferred.clear()
        stepper.has_part, stepper.target_params, stepper.shared = has_part, seen, shared
        if put_back is not None:
            put_back()

    transact: Any = stepper.communicator.transact  # type: ignore[attr-defined]
    try:
        transact(
            lambda: attempt(deferred.append),
            repeat=can_repeat,
            prepare=restore,
            is_step=True,
            name="update without a loss function",
        )
    except RankLost:
        restore()
        raise
    for step in deferred:
        step()


def _keep_side_effects(model: chainer.Link, has_part: bool) -> Callable[[], None]:
    """Copy what a forward and backward pass change as a side effect, before the pass.

    This is NumPy's global random state, persistent values of the model (a batch normalisation's running mean), and
    accumulated gradients.

    Args:
        model: The model.
        has_part: Whether gradients are being accumulated.

    Returns:
        What restores this state; it may be called several times.
    """
    random = np.random.get_state()
    put_back_persistents = keep_persistents(model.links())
    grads = [(param, copy_of(param.grad)) for param in model.params()] if has_part else []

    def put_back() -> None:
        np.random.set_state(random)
        put_back_persistents()
        for param, grad in grads:
            param.grad = copy_of(grad)

    return put_back
