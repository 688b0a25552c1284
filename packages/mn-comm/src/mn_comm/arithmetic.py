"""How numbers are added up and divided on the host, in one place, so that every strategy rounds alike."""

from __future__ import annotations

from typing import Any

import numpy as np

__all__ = ["divide", "is_half", "sum_dtype"]


def is_half(dtype: np.dtype[Any]) -> bool:
    """Return whether values of ``dtype`` have half precision: float16, or the bfloat16 of ``ml_dtypes``."""
    return dtype == np.float16 or dtype.name == "bfloat16"


def sum_dtype(dtype: np.dtype[Any]) -> np.dtype[Any]:
    """Return the dtype in which values of ``dtype`` are added up: float32 for half precision, else their own.

    A sum of many halves loses digits, and may not fit where the mean would.
    """
    return np.dtype(np.float32) if is_half(dtype) else dtype


def divide(array: np.ndarray[Any, Any], divisor: int) -> None:
    """Divide an array of floats in place.

    Multiplying by the reciprocal of a power of two is exact, and several times faster than dividing.
    """
    if divisor & (divisor - 1):
        np.divide(array, divisor, out=array)
    elif divisor > 1:
        np.multiply(array, array.dtype.type(1 / divisor), out=array)
