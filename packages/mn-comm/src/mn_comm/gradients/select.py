"""Step 1: which parameters take part, in an order that is the same on every rank."""

from __future__ import annotations

from typing import Any

from mn_comm.protocols import Model, Parameter

__all__ = ["Named", "like", "select", "sorted_parameters"]

Named = tuple[str, Parameter]


def sorted_parameters(model: Model) -> list[Named]:
    """Return the model's parameters with their names, sorted by name."""
    return sorted(model.namedparams(), key=lambda named: named[0])


def select(model: Model, zero_fill: bool) -> list[Named]:
    """Return the parameters whose gradients are to be averaged, sorted by name.

    Args:
        model: The model.
        zero_fill: Whether an initialised parameter without a gradient takes part, with one of zeros.

    Returns:
        Names and parameters.
    """
    return [
        (name, param)
        for name, param in sorted_parameters(model)
        if param.grad is not None or (zero_fill and param.data is not None)
    ]


def like(param: Parameter) -> Any:
    """Return an array that has the shape and dtype of a parameter's gradient, be that there or not."""
    grad = param.grad
    return param.data if grad is None else grad
