"""The dtypes that MPI can add up, and checks of arguments before anything is sent."""

from __future__ import annotations

import functools
import operator
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

from mn_comm.basis.arithmetic import sum_dtype
from mn_comm.basis.mpi import MPI
from mn_comm.basis.placement import is_device_array


def check_array(array: Any, operation: str) -> Any:
    """Return ``array``, or raise TypeError if it is no array, has a mask, or its dtype holds Python objects."""
    if not isinstance(array, np.ndarray) and not is_device_array(array):
        raise TypeError(f"{operation}: expected a numpy.ndarray, got {_kind(array)}")
    if isinstance(array, np.ma.MaskedArray):
        raise TypeError(
            f"{operation}: expected an array without a mask, which would be lost; pass the result of filled(), or data "
            f"and mask one after the other; got {_kind(array)} of shape {array.shape}"
        )
    if array.dtype.hasobject:
        raise TypeError(
            f"{operation}: expected a dtype without Python objects, got dtype {array.dtype} of shape {array.shape}; "
            "use the methods whose names end in _obj for Python objects"
        )
    return array


def check_parts(arrays: Iterable[Any], operation: str) -> list[Any]:
    """Return the arrays for all ranks, in their order; raise TypeError if one cannot be sent, or the dtypes differ."""
    checked = [check_array(array, operation) for array in arrays]
    check_same_dtype([array.dtype for array in checked], operation, "for")
    return checked


def check_same_dtype(dtypes: Sequence[np.dtype[Any]], operation: str, where: str) -> None:
    """Raise TypeError unless the dtypes are equal: one ``"on"`` each rank, or one ``"for"`` each rank."""
    for rank, dtype in enumerate(dtypes):
        if dtype != dtypes[0]:
            raise TypeError(
                f"{operation}: expected the same dtype {where} every rank, got {dtypes[0]} {where} rank 0 and {dtype} "
                f"{where} rank {rank}"
            )


def check_sum(dtype: np.dtype[Any], operation: str) -> np.dtype[Any]:
    """Return the dtype in which values are added up: float32 for half precision, for which MPI has no type.

    It raises TypeError if MPI cannot add up such values (bool, strings, dates, structures).
    """
    total_dtype = sum_dtype(dtype)
    if total_dtype.kind in "iufc" and has_mpi_datatype(total_dtype):
        return total_dtype
    raise TypeError(f"{operation}: expected an integer, floating or complex dtype that MPI can add up, got {dtype}")


@functools.cache
def has_mpi_datatype(dtype: np.dtype) -> bool:
    """Return whether this MPI library has a datatype for ``dtype``, a NumPy dtype; looked up once for each."""
    from mpi4py.util import dtlib

    try:
        datatype = dtlib.from_numpy_dtype(dtype)  # a new one
    except (ValueError, TypeError):
        return False
    if datatype == MPI.DATATYPE_NULL:  # MPICH would abort the process if it got one
        return False
    datatype.Free()
    return dtype.isnative


def check_intracomm(mpi_comm: Any) -> None:
    """Raise TypeError unless this is an mpi4py communicator of one group of ranks."""
    if not isinstance(mpi_comm, MPI.Intracomm):
        raise TypeError(f"expected an mpi4py intracommunicator for mpi_comm, got {type(mpi_comm).__name__}")


def check_rank(rank: Any, size: int, name: str) -> int:
    """Return ``rank``, the value of the argument ``name``, as an int; raise TypeError or, out of range, ValueError."""
    number = as_index(rank, name)
    if not 0 <= number < size:
        raise ValueError(f"expected {name} in 0..{size - 1}, got {number}")
    return number


def check_tag(tag: Any) -> int:
    """Return ``tag`` as an int; raise TypeError, or ValueError if it is negative or MPI does not allow it."""
    number = as_index(tag, "tag")
    limit = MPI.COMM_WORLD.Get_attr(MPI.TAG_UB) or 32767  # the smallest limit that the standard allows
    if not 0 <= number <= limit:
        raise ValueError(f"expected tag in 0..{limit}, got {number}")
    return number


def as_index(value: Any, name: str) -> int:
    """Return ``value`` as an int, or raise TypeError."""
    try:
        return operator.index(value)
    except TypeError:
        raise TypeError(f"expected an integer for {name}, got {_kind(value)}: {value!r:.80}") from None


def _kind(value: Any) -> str:
    return f"{type(value).__module__}.{type(value).__qualname__}".removeprefix("builtins.")
