"""The state of an optimizer, such as momentum, averaged over all ranks."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import chainer

from mn_comm import CommunicatorBase
from mn_optim.schemes.arrays import average_arrays
from mn_optim.schemes.parameters import value_of

__all__ = ["OptimizerState"]


class OptimizerState:
    """Averages the arrays that the update rules of a model's parameters keep, in their own dtypes.

    Args:
        communicator: The ranks that train together. Creating it is collective.
    """

    def __init__(self, communicator: CommunicatorBase) -> None:
        self._reducer = communicator.gradient_reducer(own_dtype=True)

    def average(self, model: chainer.Link, counts: bool, scale: float) -> None:
        """Average; collective.

        Args:
            model: The model, whose parameters have update rules.
            counts: Whether this rank's state counts in the mean.
            scale: The number of ranks, divided by the number of ranks whose state counts.

        Raises:
            ValueError: The ranks' states differ in names, shapes or dtypes (on every rank).
        """
        if not counts:
            _begin_state(model)  # it may not have taken any step
        arrays = dict(_state_of(model))
        if not counts:
            for array in arrays.values():
                array[...] = 0
        average_arrays(self._reducer, arrays)
        if scale != 1:
            for array in arrays.values():
                array *= scale


def _state_of(model: chainer.Link) -> Iterator[tuple[str, Any]]:
    for name, param in model.namedparams():
        state = getattr(param.update_rule, "state", None) or {}
        for key, value in state.items():
            if getattr(getattr(value, "dtype", None), "kind", None) == "f" and value.ndim:
                yield f"{name}/{key}", value


def _begin_state(model: chainer.Link) -> None:
    """Begin the state of the parameters that a step would update, as their first step would."""
    for param in model.params(include_uninit=False):
        rule = param.update_rule
        if rule is not None and rule.enabled and rule.state is None:
            rule._init_states(chainer.Parameter(value_of(param)))  # noqa: SLF001 - there is no public name
