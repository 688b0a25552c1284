"""Functions of CuPy that are machine code for GPUs: done by NumPy, after the current stream."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import Any

import numpy as np

__all__ = ["install"]


def install() -> None:
    """Replace Thrust, which CuPy's wheel contains as machine code for GPUs."""
    from cupy.cuda import thrust

    thrust.sort, thrust.argsort, thrust.lexsort = _sort, _argsort, _lexsort


def _view(address: int, dtype: Any, shape: Sequence[int]) -> np.ndarray[Any, Any]:
    size = int(np.prod(shape)) * np.dtype(dtype).itemsize
    return np.frombuffer((ctypes.c_char * size).from_address(address), dtype).reshape(shape)


def _wait() -> None:
    import cupy

    cupy.cuda.get_current_stream().synchronize()


def _sort(dtype: Any, data: int, _keys: int, shape: Sequence[int]) -> None:
    _wait()
    _view(data, dtype, shape).sort(axis=-1)


def _argsort(dtype: Any, indices: int, data: int, _keys: int, shape: Sequence[int]) -> None:
    _wait()
    _view(indices, np.intp, shape)[...] = np.argsort(_view(data, dtype, shape), axis=-1, kind="stable")


def _lexsort(dtype: Any, indices: int, keys: int, count: int, length: int) -> None:
    _wait()
    _view(indices, np.intp, (length,))[...] = np.lexsort(_view(keys, dtype, (count, length)))
