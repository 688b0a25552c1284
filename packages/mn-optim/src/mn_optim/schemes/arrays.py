"""Arrays that are averaged like the gradients of a model."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import chainer

from mn_comm.building_blocks import GradientReducer

__all__ = ["Arrays", "average_arrays"]


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
