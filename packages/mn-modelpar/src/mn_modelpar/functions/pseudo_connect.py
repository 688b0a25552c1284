"""Pseudo-connect: values pass through, and the backward pass reaches something else as well."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import chainer
import numpy as np
from chainer import backend

from mn_modelpar.functions.values import fill, spec_of

__all__ = ["connect", "pseudo_connect"]


class PseudoConnect(chainer.FunctionNode):  # type: ignore[misc]  # Chainer has no types
    """Delegate and values go in, the values come out."""

    def forward(self, inputs: tuple[Any, ...]) -> tuple[Any, ...]:
        """Return all inputs but the first."""
        return inputs[1:]

    def backward(self, indexes: tuple[int, ...], grad_outputs: tuple[Any, ...]) -> tuple[Any, ...]:
        """Return the gradients, and zeros where there are none: what gets ``None`` would not be reached."""
        del indexes
        # The array of an input may be gone by now; its node knows shape and dtype.
        device = next((node.data for node in self.inputs if node.data is not None), ())
        return tuple(
            _zeros(node, device) if grad is None and np.dtype(node.dtype).kind == "f" else grad
            for grad, node in zip((None, *grad_outputs), self.inputs, strict=True)
        )


class Connected(chainer.Variable):  # type: ignore[misc]  # Chainer has no types
    """What ``pseudo_connect`` returns for one value: a Variable that can also be unpacked like a tuple of it.

    ChainerMN 1.0 returned the Variable, later ones a tuple of one; scripts rely on either.
    """

    value: chainer.Variable

    def __iter__(self) -> Iterator[chainer.Variable]:
        return iter((self.value,))

    def __getitem__(self, index: Any) -> Any:
        return self.value if isinstance(index, int) and index in (0, -1) else self.value[index]


def _zeros(node: Any, device: Any) -> chainer.Variable:
    return chainer.as_variable(fill([None], [spec_of(node)], device)[0])


def connect(delegate: chainer.Variable, *values: Any) -> tuple[chainer.Variable, ...]:
    """Return Variables that equal ``values``, and whose backward pass reaches ``delegate`` too."""
    outputs: tuple[chainer.Variable, ...] = PseudoConnect().apply((delegate, *values))
    return outputs


def pseudo_connect(delegate_variable: chainer.Variable | None, *actual_variables: Any) -> Any:
    """Make the backward pass that reaches some values reach a delegate as well.

    A rank's graph falls apart where values leave it and others come back: the backward pass of what comes back does not
    know of what left. The result of this function stands for both.

    Args:
        delegate_variable: What is to be reached: usually what ``send`` returned. ``None`` for nothing.
        actual_variables: The values, Variables or arrays of any shape and dtype. An integer one passes through, but no
            gradient comes back through it, and so the delegate is not reached through it either.

    Returns:
        Variables that hold the values: a tuple of them, or for one value a Variable that can also be unpacked like a
        tuple of one.

    Raises:
        ValueError: There are no values.
    """
    if not actual_variables:
        raise ValueError("pseudo_connect: expected at least one value besides the delegate, got none")
    if delegate_variable is None:
        xp = backend.get_array_module(*(chainer.as_variable(value).array for value in actual_variables))
        delegate_variable = xp.empty(0, np.float32)
    outputs = connect(delegate_variable, *actual_variables)
    if len(outputs) > 1:
        return outputs
    (single,) = connect(delegate_variable, outputs[0])
    # A function's outputs are plain Variables; only their class can be told afterwards.
    single.__class__ = Connected
    single.value = outputs[0]
    return single
