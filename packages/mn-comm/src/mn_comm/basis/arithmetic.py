"""Addition and division of numbers on the host, in one place, so that all strategies round in the same way."""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from typing import Any

import numpy as np

_Array = np.ndarray[Any, Any]


@functools.cache  # getting the name of a dtype is slow
def is_half(dtype: np.dtype[Any]) -> bool:
    """Return whether values of ``dtype`` have half precision: float16, or the bfloat16 of ``ml_dtypes``."""
    return dtype == np.float16 or dtype.name == "bfloat16"


def sum_dtype(dtype: np.dtype[Any]) -> np.dtype[Any]:
    """Return the dtype in which values of ``dtype`` are added up: float32 for half precision, otherwise ``dtype``.

    A sum of many half-precision values loses digits, and may overflow although the mean would not.
    """
    return np.dtype(np.float32) if is_half(dtype) else dtype


def divide(array: _Array, divisor: float, out: _Array) -> None:
    """Divide an array of floats; write the result to an array of the same shape and any floating dtype, maybe itself.

    Multiplying by the reciprocal of a power of two is exact, and several times faster than dividing.
    """
    if divisor != 1:
        operation, number = _division(divisor, array.dtype)
        operation(array, number, out, casting="unsafe")  # what NumPy requires between bfloat16 and float16
    elif out is not array:
        out[...] = array


@functools.cache
def _division(divisor: float, dtype: np.dtype[Any]) -> tuple[Any, Any]:
    if math.frexp(divisor)[0] == 0.5:
        return np.multiply, dtype.type(1 / divisor)
    return np.divide, dtype.type(divisor)


def add_up(summands: Sequence[_Array], total: _Array) -> None:
    """Write the sum of arrays of equal shape and dtype, added up in their order, to one of their :func:`sum_dtype`.

    ``total`` may be one of the first two summands, but no other.
    """
    if len(summands) == 1:
        total[...] = summands[0]
        return
    np.add(summands[0], summands[1], total, dtype=total.dtype)
    for other in summands[2:]:
        np.add(total, other, total)
