"""Step 1: which parameters take part, in an order that is the same on every rank."""

from __future__ import annotations

from operator import itemgetter
from typing import Any

from mn_comm.protocols import Model, Parameter

__all__ = ["Named", "select", "sorted_parameters"]

Named = tuple[str, Parameter]


def sorted_parameters(model: Model) -> list[Named]:
    """Return the model's parameters with their names, sorted by name."""
    return sorted(model.namedparams(), key=itemgetter(0))


def select(model: Model, zero_fill: bool) -> tuple[list[Named], list[Any], list[Any]]:
    """Return the parameters whose gradients are to be averaged, sorted by name.

    Args:
        model: The model.
        zero_fill: Whether an initialised parameter without a gradient takes part, with one of zeros.

    Returns:
        Names and parameters; for each an array that has the shape and dtype of its gradient, be that there or not; and
        the gradients that there are now, or ``None``.
    """
    params, likes, grads = [], [], []
    for named in sorted_parameters(model):
        param = named[1]
        grad = param.grad
        like = param.data if grad is None and zero_fill else grad
        if like is not None:
            params.append(named)
            likes.append(like)
            grads.append(grad)
    return params, likes, grads
