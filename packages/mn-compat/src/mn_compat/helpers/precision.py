"""Conversions of scalars whose dtype NumPy 2 would keep."""

from __future__ import annotations

from typing import Any

import numpy


def double(value: Any) -> Any:
    """Return a real NumPy scalar or 0-d array as float64, and anything else unchanged.

    NumPy 1 did this when such a scalar was combined with a Python number.
    """
    if not isinstance(value, (numpy.generic, numpy.ndarray)) or value.ndim:
        return value
    # A long double already has more digits.
    return numpy.float64(value) if value.dtype.kind in "biuf" and value.itemsize <= 8 else value


def widened(value: Any) -> Any:
    """Return a number that is summed in double precision, on the host or on a device.

    A 0-d array on a device becomes float64 where it is: fetching it would wait for the device.
    """
    if isinstance(value, (numpy.generic, numpy.ndarray)):
        return double(value)
    if getattr(value, "ndim", None) != 0 or value.dtype.kind not in "biuf":
        return value
    # A chainer.Variable has no astype. It is not meant to be summed as a scalar, but scripts may try.
    astype = getattr(value, "astype", None)
    return value if astype is None else astype(numpy.float64)


def set_python_scalar(self: object, name: str, value: Any) -> None:
    """Set an attribute to the Python number for a NumPy scalar; a Python number takes any array's dtype."""
    object.__setattr__(self, name, value.item() if isinstance(value, numpy.generic) else value)
