"""Step 1: which parameters take part, in an order that is the same on every rank."""

from __future__ import annotations

import numpy as np

from mn_comm.protocols import Model, Parameter

__all__ = ["Named", "select", "sorted_parameters"]

Named = tuple[str, Parameter]


def sorted_parameters(model: Model) -> list[Named]:
    """Return the model's parameters with their names, sorted by name."""
    return sorted(model.namedparams(), key=lambda named: named[0])


def select(model: Model, zero_fill: bool) -> list[Named]:
    """Return the parameters whose gradients are to be averaged, sorted by name.

    Args:
        model: The model, after its backward pass.
        zero_fill: Whether an initialised parameter without a gradient gets one of zeros; otherwise it is left out.

    Returns:
        Names and parameters, each of which has a gradient.
    """
    named = sorted_parameters(model)
    if zero_fill:
        for _, param in named:
            if param.grad is None and param.data is not None:
                param.grad = np.zeros_like(param.data)
    return [(name, param) for name, param in named if param.grad is not None]
