"""Reduce: the sum, product, maximum or minimum over all ranks, on one of them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from mn_comm.basis import placement
from mn_comm.basis.device_backend import device_backend
from mn_comm.basis.mpi import MPI
from mn_comm.collectives import pieces
from mn_comm.collectives.allreduce import OPERATIONS, agree_on, where_nan
from mn_comm.collectives.roots import same_root

if TYPE_CHECKING:
    from mn_comm.ranks.intracomm import Ranks

__all__ = ["reduce"]

_Array = np.ndarray[Any, Any]


def reduce(ranks: Ranks, data: Any, op: str, root: int) -> _Array | None:
    """Combine the arrays of all ranks on one rank; see :meth:`mn_comm.Communicator.reduce`."""
    root = same_root(ranks, root)
    array, total_dtype = agree_on(ranks, data, op, "reduce")
    if placement.is_device_array(array):
        total = device_backend().allreduce(ranks, array, total_dtype, op)
        return total if ranks.rank == root else None
    total = array.astype(total_dtype, order="C", copy=True)
    is_nan = where_nan(ranks, total, op)
    for piece in pieces.pieces(total.reshape(-1)):
        if ranks.rank == root:
            ranks.Reduce(MPI.IN_PLACE, piece, getattr(MPI, OPERATIONS[op]), root)
        else:
            ranks.Reduce(piece, None, getattr(MPI, OPERATIONS[op]), root)
    if is_nan is not None:
        total[is_nan] = np.nan
    return total.astype(array.dtype, copy=False) if ranks.rank == root else None
