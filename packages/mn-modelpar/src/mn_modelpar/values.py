"""Helpers of the functions: checks of inputs, and zeros in place of missing gradients."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import chainer
import numpy as np
from chainer import backend

Spec = tuple[tuple[int, ...], np.dtype[Any]]
"""Shape and dtype of an array."""


def spec_of(array: Any) -> Spec:
    """Return shape and dtype of an array or Variable."""
    return tuple(array.shape), np.dtype(array.dtype)


def has_floats(spec: Spec) -> bool:
    """Return whether arrays of a shape and dtype can have a gradient."""
    return bool(spec[1].kind == "f")


def is_array(value: Any) -> bool:
    """Return whether a value is a Variable or an array, on any device."""
    return isinstance(value, (chainer.Variable, chainer.get_array_types()))


def problem_with(values: Sequence[Any]) -> str:
    """Return the problem with inputs that must be Variables or arrays on one device; empty if there is none."""
    for value in values:
        if not is_array(value):
            return f"expected a chainer.Variable, got {type(value).__name__}: {value!r:.80}"
    arrays = [chainer.as_variable(value).array for value in values]
    if any(array is None for array in arrays):
        return "expected a chainer.Variable that holds an array, got one without"
    if not chainer.is_arrays_compatible(arrays):
        return f"expected arrays on one device, got {', '.join(type(array).__name__ for array in arrays)}"
    return ""


def parts_of(values: Any) -> Sequence[Any]:
    """Return one input for each rank: the items of a tuple or list, or of an array or Variable along its first axis.

    Anything else is returned as a single input, for :func:`problem_with` to refuse.
    """
    if isinstance(values, (tuple, list)):
        return values
    # A Variable without an array has no dimensions either.
    if is_array(values) and getattr(values, "ndim", None):
        return [values[i, ...] for i in range(len(values))]
    return [values]


def require_floats(specs: Iterable[Spec], what: str) -> None:
    """Raise unless all arrays can have a gradient.

    Raises:
        TypeError: An array contains integers.
    """
    for shape, dtype in specs:
        if not has_floats((shape, dtype)):
            raise TypeError(f"expected floats in the backward of {what}, got shape {shape} and dtype {dtype}")


def fill(grads: Sequence[Any], specs: Sequence[Spec], like: Any) -> list[Any]:
    """Return the gradients, with zeros for missing ones.

    Args:
        grads: Variables, or ``None``.
        specs: Shape and dtype of each.
        like: An array on the device where to create the zeros.
    """
    xp = backend.get_array_module(like)
    return [xp.zeros(shape, dtype) if grad is None else grad for grad, (shape, dtype) in zip(grads, specs, strict=True)]


def total(arrays: Sequence[np.ndarray[Any, Any]]) -> np.ndarray[Any, Any]:
    """Add arrays up, in their order, half precision in float32.

    Args:
        arrays: At least one; of one shape and dtype.

    Returns:
        The sum, of their shape and dtype.

    Raises:
        ValueError: Their shapes differ.
    """
    for array in arrays:
        if array.shape != arrays[0].shape:
            raise ValueError(f"expected arrays of one shape to add up, got {arrays[0].shape} and {array.shape}")
    dtype = arrays[0].dtype
    result = arrays[0].astype(np.float32 if dtype == np.float16 else dtype)
    for array in arrays[1:]:
        result += array
    return result.astype(dtype, copy=False)
