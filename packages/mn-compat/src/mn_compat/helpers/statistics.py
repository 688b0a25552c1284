"""Sums, means and variances over several axes, as batch normalization needs them; fast also on a device.

CuPy adds up neighboring elements fast. Over other axes at the same time, sums take up to ten times as long, and the
variance up to 70 times: 35 ms on an H200 for 64 images of 64 channels and 112 by 112 pixels, where a copy takes 0.2 ms.
So the last axes are reduced first, and then the others. In host memory, nothing is different from NumPy.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Sequence
from typing import Any

import numpy as np


def total(x: Any, axis: Sequence[int], dtype: Any) -> Any:
    """Return ``x.sum(axis=axis, dtype=dtype)``."""
    if not _takes_two_steps(x, axis):
        return x.sum(axis=axis, dtype=dtype)
    return _sums(*_rows(x, axis), _at_least_single(dtype)).astype(dtype, copy=False)


def mean(x: Any, axis: Sequence[int], dtype: Any) -> Any:
    """Return ``x.mean(axis=axis, dtype=dtype)``."""
    if not _takes_two_steps(x, axis):
        return x.mean(axis=axis, dtype=dtype)
    return _means(*_rows(x, axis), _at_least_single(dtype)).astype(dtype, copy=False)


def var(x: Any, axis: Sequence[int], dtype: Any) -> Any:
    """Return ``x.var(axis=axis, dtype=dtype)``."""
    if not _takes_two_steps(x, axis):
        return x.var(axis=axis, dtype=dtype)
    rows, others = _rows(x, axis)
    # In the precision of x, if that is higher: the deviations of large numbers can be small.
    means = _means(rows, others, np.promote_types(x.dtype, _at_least_single(dtype)))
    at = tuple(None if i in others else slice(None) for i in range(rows.ndim - 1))
    squares = _squared_deviations()(rows, means[at][..., None], axis=rows.ndim - 1).sum(axis=others)
    return (squares / (x.size // means.size)).astype(dtype, copy=False)


def _takes_two_steps(x: Any, axis: Sequence[int]) -> bool:
    """Return whether an array is on a device, and reduced over its last axis, but not over all axes."""
    cupy = sys.modules.get("cupy")
    if cupy is None or not isinstance(x, cupy.ndarray) or not x.size:
        return False
    is_usual = min(axis, default=-1) >= 0 and len(set(axis)) == len(axis)  # leave others to CuPy
    return is_usual and max(axis) == x.ndim - 1 and len(axis) < x.ndim


def _rows(x: Any, axis: Sequence[int]) -> tuple[Any, tuple[int, ...]]:
    """Return an array with its last axes, as far as they are reduced over, as one; and the other axes to reduce."""
    kept = 1 + max(i for i in range(x.ndim) if i not in axis)
    return x.reshape(*x.shape[:kept], -1), tuple(i for i in axis if i < kept)


def _sums(rows: Any, others: tuple[int, ...], dtype: Any) -> Any:
    return rows.sum(axis=-1, dtype=dtype).sum(axis=others)


def _means(rows: Any, others: tuple[int, ...], dtype: Any) -> Any:
    sums = _sums(rows, others, dtype)
    return sums / (rows.size // sums.size)


def _at_least_single(dtype: Any) -> np.dtype[Any]:
    return np.promote_types(dtype, np.float32)


@functools.cache
def _squared_deviations() -> Any:
    import cupy

    form = "((U)x - mean) * ((U)x - mean)", "a + b", "y = a", "0"
    return cupy.ReductionKernel("T x, U mean", "U y", *form, "squared_deviations", reduce_type="U")
