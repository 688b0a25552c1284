"""How numbers are added up and divided on the host, in one place, so that every strategy rounds alike."""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from typing import Any

import numpy as np

__all__ = ["add_up", "divide", "is_half", "sum_dtype"]

_Array = np.ndarray[Any, Any]


@functools.cache  # a dtype takes its time to say its name
def is_half(dtype: np.dtype[Any]) -> bool:
    """Return whether values of ``dtype`` have half precision: float16, or the bfloat16 of ``ml_dtypes``."""
    return dtype == np.float16 or dtype.name == "bfloat16"


def sum_dtype(dtype: np.dtype[Any]) -> np.dtype[Any]:
    """Return the dtype in which values of ``dtype`` are added up: float32 for half precision, else their own.

    A sum of many halves loses digits, and may not fit where the mean would.
    """
    return np.dtype(np.float32) if is_half(dtype) else dtype


def divide(array: _Array, divisor: float, out: _Array) -> None:
    """Write an array of floats, divided, to another one of the same shape, of any floating dtype; it may be itself.

    Multiplying by the reciprocal of a power of two is exact, and several times faster than dividing.
    """
    if divisor != 1:
        operation, number = _division(divisor, array.dtype)
        operation(array, number, out, casting="unsafe")  # as NumPy calls the way between bfloat16 and float16
    elif out is not array:
        out[...] = array


@functools.cache
def _division(divisor: float, dtype: np.dtype[Any]) -> tuple[Any, Any]:
    if math.frexp(divisor)[0] == 0.5:
        return np.multiply, dtype.type(1 / divisor)
    return np.divide, dtype.type(divisor)


def add_up(summands: Sequence[_Array], total: _Array) -> None:
    """Write the sum of arrays, added up in their order, to another array.

    Args:
        summands: One-dimensional arrays of equal length and dtype.
        total: Where the sum goes, of their length and their :func:`sum_dtype`. It must be none of them but, at most,
            one of the first two.
    """
    if len(summands) == 1:
        total[...] = summands[0]
        return
    np.add(summands[0], summands[1], total, dtype=total.dtype)
    for other in summands[2:]:
        np.add(total, other, total)
