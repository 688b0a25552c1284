"""All-reduce: the sum, product, maximum or minimum over all ranks, on every rank."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from mn_comm.basis import arithmetic, placement, wire
from mn_comm.basis.device_backend import device_backend
from mn_comm.basis.mpi import MPI
from mn_comm.collectives import pieces
from mn_comm.collectives.mean import mean_of_halves
from mn_comm.ranks import agreement

if TYPE_CHECKING:
    from mn_comm.ranks.intracomm import Ranks

__all__ = ["OPERATIONS", "agree_on", "allreduce", "combine_in_place", "mean_in_place", "where_nan"]

OPERATIONS = {"sum": "SUM", "prod": "PROD", "max": "MAX", "min": "MIN"}
"""The names of MPI's operations."""

_Array = np.ndarray[Any, Any]


def allreduce(ranks: Ranks, data: Any, op: str = "sum") -> _Array:
    """Combine the arrays of all ranks; see :meth:`mn_comm.Communicator.allreduce`."""
    array, total_dtype = agree_on(ranks, data, op, "allreduce")
    if placement.is_device_array(array):
        return device_backend().allreduce(ranks, array, total_dtype, op)  # type: ignore[no-any-return]
    total = array.astype(total_dtype, order="C", copy=True)
    is_nan = where_nan(ranks, total, op)
    combine_in_place(ranks, total.reshape(-1), op)
    if is_nan is not None:
        total[is_nan] = np.nan
    return total.astype(array.dtype, copy=False)  # type: ignore[no-any-return]


def agree_on(ranks: Ranks, data: Any, op: str, what: str) -> tuple[Any, np.dtype[Any]]:
    """Check the arguments of a collective that combines arrays; collective.

    Returns:
        The array, and the dtype in which it is to be combined.

    Raises:
        TypeError: A rank has no array, or one of a dtype that this operation cannot combine (on every rank).
        ValueError: The ranks differ in shape, dtype or ``op``, or there is no such ``op`` (on every rank).
    """
    with agreement.raise_on_all(ranks):
        if op not in OPERATIONS:
            raise ValueError(f"{what}: expected op to be one of {', '.join(OPERATIONS)}; got {op!r}")
        array = wire.check_array(data, what)
        total_dtype = wire.check_sum(array.dtype, what)
        if total_dtype.kind == "c" and op in ("max", "min"):
            raise TypeError(f"{what}: expected numbers that have an order for op={op!r}, got dtype {array.dtype}")
    on_device = placement.is_device_array(array)
    signature = (array.shape, array.dtype.name, op, *(["on a device"] if on_device else []))
    agreement.agree(ranks, signature, functools.partial(_explain, what))
    return array, total_dtype


def where_nan(ranks: Ranks, array: _Array, op: str) -> _Array | None:
    """Return where any rank has NaN; ``None`` if no rank has, or NaN is the result anyway; collective.

    MPI's maximum and minimum compare, in an order that depends on the element and on the ranks: of NaN and a number,
    either may be the result.
    """
    if op not in ("max", "min") or array.dtype.kind != "f":
        return None
    found = np.asarray(np.isnan(array))  # of a scalar array it is no array
    if not ranks.any(bool(found.any())):
        return None
    combine_in_place(ranks, found.view(np.uint8).reshape(-1), "max")
    return found


def combine_in_place(ranks: Ranks, flat: _Array, op: str = "sum") -> None:
    """Overwrite an array with the combination of all ranks' arrays; collective.

    Args:
        ranks: The ranks.
        flat: One-dimensional and contiguous, of a dtype that MPI can combine; of equal length and dtype on every rank.
        op: The operation.
    """
    if ranks.size > 1:
        for piece in pieces.pieces(flat):
            ranks.Allreduce(MPI.IN_PLACE, piece, getattr(MPI, OPERATIONS[op]))


def mean_in_place(ranks: Ranks, flat: _Array) -> None:
    """Overwrite an array of floats with its mean over all ranks; collective; as :func:`combine_in_place`."""
    if arithmetic.is_half(flat.dtype):
        mean_of_halves(ranks, flat)
    else:
        combine_in_place(ranks, flat)
        arithmetic.divide(flat, ranks.size, flat)


def _explain(what: str, signatures: Sequence[tuple[Any, ...]]) -> ValueError:
    rank = next(rank for rank, other in enumerate(signatures) if other != signatures[0])
    return ValueError(
        f"{what}: expected arrays of the same shape and dtype, and the same op, on every rank, got {signatures[0]} on "
        f"rank 0 and {signatures[rank]} on rank {rank}"
    )
