"""Sums, means and variances over several axes, as batch normalization needs them, of arrays on a device.

CuPy adds up neighboring elements fast. Over other axes at the same time, sums take up to ten times as long, and the
variance up to 70 times: 35 ms on an H200 for 64 images of 64 channels and 112 by 112 pixels, where a copy takes 0.2 ms.
So the last axes are reduced first, and then the others.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Sequence
from typing import Any

import numpy as np


def total(x: Any, axis: Sequence[int], dtype: Any) -> Any:
    """Return ``x.sum(axis=axis, dtype=dtype)``, fast on a device."""
    if not _has_neighbors(x, axis):
        return x.sum(axis=axis, dtype=dtype)
    rows, others = _rows(x, axis)
    return rows.sum(axis=-1, dtype=_at_least_single(dtype)).sum(axis=others).astype(dtype, copy=False)


def mean(x: Any, axis: Sequence[int], dtype: Any) -> Any:
    """Return ``x.mean(axis=axis, dtype=dtype)``, fast on a device."""
    if not _has_neighbors(x, axis):
        return x.mean(axis=axis, dtype=dtype)
    return _mean(x, axis, dtype).astype(dtype, copy=False)


def var(x: Any, axis: Sequence[int], dtype: Any) -> Any:
    """Return ``x.var(axis=axis, dtype=dtype)``, fast on a device."""
    if not _has_neighbors(x, axis):
        return x.var(axis=axis, dtype=dtype)
    rows, others = _rows(x, axis)
    means = _mean(x, axis, dtype)
    at = tuple(None if i in others else slice(None) for i in range(rows.ndim - 1))
    squares = _squared_deviations()(rows, means[at][..., None], axis=rows.ndim - 1).sum(axis=others)
    return (squares / (x.size // means.size)).astype(dtype, copy=False)


def _mean(x: Any, axis: Sequence[int], dtype: Any) -> Any:
    sums = total(x, axis, _at_least_single(dtype))
    return sums / (x.size // sums.size)


def _has_neighbors(x: Any, axis: Sequence[int]) -> bool:
    """Return whether an array is on a device, not empty, and reduced over its last axis and not over all."""
    cupy = sys.modules.get("cupy")
    return cupy is not None and isinstance(x, cupy.ndarray) and x.size > 0 and x.ndim - 1 in axis and len(axis) < x.ndim


def _rows(x: Any, axis: Sequence[int]) -> tuple[Any, tuple[int, ...]]:
    """Return an array with its last axes, as far as they are reduced over, as one; and the other axes to reduce."""
    kept = 1 + max(i for i in range(x.ndim) if i not in axis)
    return x.reshape(*x.shape[:kept], -1), tuple(i for i in axis if i < kept)


def _at_least_single(dtype: Any) -> np.dtype[Any]:
    return np.promote_types(dtype, np.float32)


@functools.cache
def _squared_deviations() -> Any:
    import cupy

    form = "((U)x - mean) * ((U)x - mean)", "a + b", "y = a", "0"
    return cupy.ReductionKernel("T x, U mean", "U y", *form, "squared_deviations", reduce_type="U")
