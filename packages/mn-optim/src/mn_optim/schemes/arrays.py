"""Arrays that are averaged like the gradients of a model, such as the state of an optimizer."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import chainer

from mn_comm.building_blocks import GradientReducer
from mn_optim.schemes.parameters import value_of


class Arrays(chainer.Link):  # type: ignore[misc]  # Chainer has no types
    """Parameters with any names, each on the device of its array.

    Args:
        arrays: The parameters' arrays by name.
    """

    def __init__(self, arrays: Mapping[str, Any]) -> None:
        super().__init__()
        self._by_name = {name: chainer.Parameter(array) for name, array in arrays.items()}

    def params(self, include_uninit: bool = True) -> Iterator[chainer.Parameter]:
        """Yield the parameters."""
        return iter(self._by_name.values())

    def namedparams(self, include_uninit: bool = True) -> Iterator[tuple[str, chainer.Parameter]]:
        """Yield names and parameters."""
        return iter(self._by_name.items())


def average_arrays(reducer: GradientReducer, arrays: Mapping[str, Any]) -> None:
    """Overwrite arrays with their means over all ranks; collective.

    Args:
        reducer: Averages them.
        arrays: The arrays, of floats, by name.

    Raises:
        ValueError: The ranks' arrays differ in names, shapes or dtypes (on every rank).
    """
    model = Arrays(arrays)
    for param in model.params():
        param.grad = param.data
    reducer.average(model)
    for param in model.params():
        if param.grad is not param.data:  # an array that shares memory with another one gets a new gradient
            param.data[...] = param.grad


def average_state_of(model: chainer.Link, reducer: GradientReducer, counts: bool, scale: float) -> None:
    """Average the arrays that the update rules of a model's parameters keep; collective.

    Args:
        model: The model, whose parameters have update rules.
        reducer: Averages the arrays, in their own dtypes.
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
    average_arrays(reducer, arrays)
    if scale != 1:
        for array in arrays.values():
            array *= scale


def _state_of(model: chainer.Link) -> Iterator[tuple[str, Any]]:
    for name, param in model.namedparams():
        state = getattr(param.update_rule, "state", None) or {}
        for key, value in state.items():
            if isinstance(value, chainer.get_array_types()) and value.dtype.kind == "f":
                yield f"{name}/{key}", value


def _begin_state(model: chainer.Link) -> None:
    """Begin the state of the parameters that a step would update, as their first step would."""
    for param in model.params(include_uninit=False):
        rule = param.update_rule
        if rule is not None and rule.enabled and rule.state is None:
            rule._init_states(chainer.Parameter(value_of(param)))  # noqa: SLF001 - there is no public name
