"""All-reduce: the sum over all ranks, at every rank."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from mpi4py import MPI

from mn_comm import agreement, wire
from mn_comm.collectives import pieces

__all__ = ["allreduce", "sum_in_place"]

_Array = np.ndarray[Any, Any]


def allreduce(mpi_comm: MPI.Intracomm, data: Any) -> _Array:
    """Add up arrays of all ranks; see :meth:`mn_comm.CommunicatorBase.allreduce`."""
    with agreement.together(mpi_comm):
        array = wire.check_array(data, "allreduce")
        total_dtype = wire.sum_dtype(array.dtype, "allreduce")
    signature = (array.shape, array.dtype.name)
    agreement.agree(mpi_comm, agreement.digest(signature), lambda: signature, _explain)
    total = array.astype(total_dtype, order="C", copy=True)
    sum_in_place(mpi_comm, total.reshape(-1))
    return total.astype(array.dtype, copy=False)


def sum_in_place(mpi_comm: MPI.Intracomm, flat: _Array) -> None:
    """Overwrite a one-dimensional contiguous array with its sum over all ranks; collective.

    Args:
        mpi_comm: The communicator whose ranks hold the summands, of equal length and dtype on all of them.
        flat: The summand, and then the sum.
    """
    for piece in pieces.pieces(flat):
        mpi_comm.Allreduce(MPI.IN_PLACE, piece, op=MPI.SUM)


def _explain(signatures: Sequence[tuple[Any, ...]]) -> ValueError:
    rank = next(rank for rank, other in enumerate(signatures) if other != signatures[0])
    return ValueError(
        f"allreduce: expected arrays of the same shape and dtype on every rank, got {signatures[0]} on rank 0 and "
        f"{signatures[rank]} on rank {rank}"
    )
