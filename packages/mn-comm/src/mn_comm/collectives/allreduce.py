"""All-reduce: the sum over all ranks, at every rank."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from mpi4py import MPI

from mn_comm import agreement, arithmetic, patience, placement, wire
from mn_comm.collectives import pieces

__all__ = ["allreduce", "mean_in_place", "reduce_in_place", "sum_in_place"]

_Array = np.ndarray[Any, Any]


def allreduce(mpi_comm: MPI.Intracomm, data: Any) -> _Array:
    """Add up arrays of all ranks; see :meth:`mn_comm.CommunicatorBase.allreduce`."""
    with agreement.together(mpi_comm):
        array = wire.check_array(data, "allreduce")
        total_dtype = wire.check_sum(array.dtype, "allreduce")
    on_device = placement.is_device_array(array)
    signature = (array.shape, array.dtype.name, *(["on a device"] if on_device else []))
    agreement.agree(mpi_comm, signature, _explain)
    if on_device:
        from mn_comm.device import collectives

        return collectives.allreduce(mpi_comm, array, total_dtype)  # type: ignore[no-any-return]
    total = array.astype(total_dtype, order="C", copy=True)
    sum_in_place(mpi_comm, total.reshape(-1))
    return total.astype(array.dtype, copy=False)  # type: ignore[no-any-return]


def mean_in_place(mpi_comm: MPI.Intracomm, flat: _Array, divisor: int) -> None:
    """Overwrite an array with its sum over all ranks, divided; collective.

    Args:
        mpi_comm: The communicator whose ranks hold the summands, of equal length and dtype on all of them.
        flat: The summand, and then the result: one-dimensional and contiguous, of floats. Half precision is added up
            and divided in float32, and rounded once.
        divisor: What the sum is divided by.
    """
    if mpi_comm.size > 1 and arithmetic.is_half(flat.dtype):
        _mean_of_halves(mpi_comm, flat, divisor)
    else:
        sum_in_place(mpi_comm, flat)
        arithmetic.divide(flat, divisor)


def reduce_in_place(mpi_comm: MPI.Intracomm, flat: _Array, divisor: int, root: int) -> None:
    """Overwrite the root's array with the sum over all ranks, divided; collective. As :func:`mean_in_place` else."""
    if arithmetic.is_half(flat.dtype):
        mean_in_place(mpi_comm, flat, divisor)
        return
    for piece in pieces.pieces(flat):
        buffers = (MPI.IN_PLACE, piece) if mpi_comm.rank == root else (piece, None)
        patience.call(mpi_comm.Reduce, mpi_comm.Ireduce, *buffers, MPI.SUM, root)
    if mpi_comm.rank == root:
        arithmetic.divide(flat, divisor)


def sum_in_place(mpi_comm: MPI.Intracomm, flat: _Array) -> None:
    """Overwrite a one-dimensional contiguous array with its sum over all ranks, in its own dtype; collective."""
    if mpi_comm.size > 1:
        for piece in pieces.pieces(flat):
            patience.call(mpi_comm.Allreduce, mpi_comm.Iallreduce, MPI.IN_PLACE, piece, MPI.SUM)


def _mean_of_halves(mpi_comm: MPI.Intracomm, flat: _Array, divisor: int) -> None:
    """Reduce-scatter and all-gather with halves on the wire and float32 in the sum, which MPI cannot do."""
    rank, size = mpi_comm.rank, mpi_comm.size
    for piece in pieces.pieces(flat):
        counts = [piece.size * (i + 1) // size - piece.size * i // size for i in range(size)]
        nbytes = [count * piece.itemsize for count in counts]
        received = np.empty((size, counts[rank]), piece.dtype)
        patience.call(
            mpi_comm.Alltoallv,
            mpi_comm.Ialltoallv,
            [pieces.as_bytes(piece), nbytes],
            [pieces.as_bytes(received), [nbytes[rank]] * size],
        )
        total = received[0].astype(np.float32)
        for summand in received[1:]:
            total += summand
        arithmetic.divide(total, divisor)
        mean = pieces.as_bytes(total.astype(piece.dtype))
        patience.call(mpi_comm.Allgatherv, mpi_comm.Iallgatherv, mean, [pieces.as_bytes(piece), nbytes])


def _explain(signatures: Sequence[tuple[Any, ...]]) -> ValueError:
    rank = next(rank for rank, other in enumerate(signatures) if other != signatures[0])
    return ValueError(
        f"allreduce: expected arrays of the same shape and dtype on every rank, got {signatures[0]} on rank 0 "
        f"and {signatures[rank]} on rank {rank}"
    )
