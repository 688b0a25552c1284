"""All-reduce: the sum over all ranks, at every rank."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from mn_comm import agreement, arithmetic, placement, wire
from mn_comm.collectives import pieces
from mn_comm.collectives.half_mean import mean_of_halves
from mn_comm.mpi import MPI

if TYPE_CHECKING:
    from mn_comm.ranks import Ranks

__all__ = ["allreduce", "mean_in_place", "sum_in_place"]

_Array = np.ndarray[Any, Any]


def allreduce(ranks: Ranks, data: Any) -> _Array:
    """Add up arrays of all ranks; see :meth:`mn_comm.CommunicatorBase.allreduce`."""
    with agreement.raise_on_all(ranks):
        array = wire.check_array(data, "allreduce")
        total_dtype = wire.check_sum(array.dtype, "allreduce")
    on_device = placement.is_device_array(array)
    signature = (array.shape, array.dtype.name, *(["on a device"] if on_device else []))
    agreement.agree(ranks, signature, _explain)
    if on_device:
        from mn_comm.device import collectives

        return collectives.allreduce(ranks, array, total_dtype)  # type: ignore[no-any-return]
    total = array.astype(total_dtype, order="C", copy=True)
    sum_in_place(ranks, total.reshape(-1))
    return total.astype(array.dtype, copy=False)  # type: ignore[no-any-return]


def sum_in_place(ranks: Ranks, flat: _Array) -> None:
    """Overwrite an array with its sum over all ranks; collective.

    Args:
        ranks: The ranks that hold the summands, of equal length and dtype on all of them.
        flat: The summand, and then the result: one-dimensional and contiguous, of a dtype that MPI can add up.
    """
    if ranks.size > 1:
        for piece in pieces.pieces(flat):
            ranks.Allreduce(MPI.IN_PLACE, piece, MPI.SUM)


def mean_in_place(ranks: Ranks, flat: _Array) -> None:
    """Overwrite an array of floats with its mean over all ranks; collective; otherwise as :func:`sum_in_place`."""
    if arithmetic.is_half(flat.dtype):
        mean_of_halves(ranks, flat)
    else:
        sum_in_place(ranks, flat)
        arithmetic.divide(flat, ranks.size, flat)


def _explain(signatures: Sequence[tuple[Any, ...]]) -> ValueError:
    rank = next(rank for rank, other in enumerate(signatures) if other != signatures[0])
    return ValueError(
        f"allreduce: expected arrays of the same shape and dtype on every rank, got {signatures[0]} on rank 0 "
        f"and {signatures[rank]} on rank {rank}"
    )
