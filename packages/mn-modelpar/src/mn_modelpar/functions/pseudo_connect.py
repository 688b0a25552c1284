"""Pseudo-connect: values pass through unchanged, and the backward pass reaches a delegate variable as well."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import chainer
import numpy as np
from chainer import backend

from mn_modelpar.staging import empty_like
from mn_modelpar.values import fill, spec_of


class PseudoConnect(chainer.FunctionNode):  # type: ignore[misc]  # Chainer has no types
    """Takes a delegate and values, and returns the values."""

    def forward(self, inputs: tuple[Any, ...]) -> tuple[Any, ...]:
        """Return all inputs but the first."""
        # Where to create zeros: in the backward pass, the arrays of all inputs may have been freed.
        self.empty = empty_like(inputs[0])
        return inputs[1:]

    def backward(self, indexes: tuple[int, ...], grad_outputs: tuple[Any, ...]) -> tuple[Any, ...]:
        """Return the gradients, with zeros for missing ones: an input that gets ``None`` would not be reached."""
        del indexes
        return tuple(
            _zeros(node, self.empty) if grad is None and np.dtype(node.dtype).kind == "f" else grad
            for grad, node in zip((None, *grad_outputs), self.inputs, strict=True)
        )


class Connected(tuple[chainer.Variable]):
    """The result of ``pseudo_connect`` for one value: a tuple of one that can also be used as the Variable itself.

    ChainerMN 1 returned the Variable, and later versions a tuple of one; there are scripts for both. Where the two
    differ, it behaves like a tuple: its length, its elements, and ``+`` with another tuple.
    """

    # Chainer uses isinstance to find out whether something is a Variable.
    __class__ = property(lambda self: chainer.Variable)

    def __getattr__(self, name: str) -> Any:
        return getattr(self[0], name)

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(self[0], name, value)

    def __add__(self, other: Any) -> Any:
        return tuple(self) + other if type(other) is tuple else self[0] + other


def _forwarded(name: str) -> Callable[..., Any]:
    method = getattr(chainer.Variable, name)

    def call(self: Connected, *others: Any) -> Any:
        return method(self[0], *others)

    return call


for _name in ("neg", "sub", "rsub", "mul", "rmul", "truediv", "rtruediv", "pow", "rpow", "matmul", "rmatmul", "radd"):
    setattr(Connected, f"__{_name}__", _forwarded(f"__{_name}__"))


def _zeros(node: Any, device: Any) -> chainer.Variable:
    return chainer.as_variable(fill([None], [spec_of(node)], device)[0])


def connect(delegate: chainer.Variable, *values: Any) -> tuple[chainer.Variable, ...]:
    """Return Variables that equal ``values``, and whose backward pass reaches ``delegate`` too."""
    outputs: tuple[chainer.Variable, ...] = PseudoConnect().apply((delegate, *values))
    return outputs


def pseudo_connect(delegate_variable: chainer.Variable | None, *actual_variables: Any) -> Any:
    """Connect a delegate to values, so that a backward pass that reaches the values also reaches the delegate.

    If a rank sends values and later receives others, its graph consists of two unconnected pieces. This function
    connects them.

    Args:
        delegate_variable: The Variable that the backward pass must reach, usually the result of ``send``; may be
            ``None``.
        actual_variables: The values, Variables or arrays of any shape and dtype. Integers pass through unchanged, but
            have no gradient, so the delegate is not reached through them.

    Returns:
        A tuple of Variables with the values. A tuple of one can also be used like the Variable in it, because ChainerMN
        1 returned that Variable.

    Raises:
        ValueError: There are no values.

    Example:
        >>> x = chainer.Variable(np.ones(3, np.float32))
        >>> if comm.rank == 0:
        ...     delegate = chainermn.functions.send(x, comm, rank=1)
        ...     F.sum(chainermn.functions.pseudo_connect(delegate, x * 2)).backward()
        ... else:
        ...     F.sum(chainermn.functions.recv(comm, rank=0)).backward()
    """
    if not actual_variables:
        raise ValueError("pseudo_connect: expected at least one value besides the delegate, got none")
    if delegate_variable is None:
        xp = backend.get_array_module(*(chainer.as_variable(value).array for value in actual_variables))
        delegate_variable = xp.empty(0, np.float32)
    outputs = connect(delegate_variable, *actual_variables)
    return Connected(outputs) if len(outputs) == 1 else outputs
