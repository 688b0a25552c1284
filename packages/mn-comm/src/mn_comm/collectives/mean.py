"""Sums and means over all ranks, in place: the last step on the way of a gradient in host memory."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from mn_comm.basis.arithmetic import divide, is_half
from mn_comm.basis.mpi import MPI
from mn_comm.collectives.halving import mean_of_halves
from mn_comm.collectives.pieces import pieces

if TYPE_CHECKING:
    from mn_comm.ranks.intracomm import Ranks

_Array = np.ndarray[Any, Any]
OPERATIONS = {"sum": "SUM", "prod": "PROD", "max": "MAX", "min": "MIN"}  # the names that MPI has for them


def combine_in_place(ranks: Ranks, flat: _Array, op: str = "sum", root: int | None = None) -> None:
    """Overwrite an array with the combination, by one of ``OPERATIONS``, of all ranks' arrays; collective.

    They are one-dimensional and contiguous, of a dtype that MPI can combine, and of equal length and dtype. If only one
    rank needs the result, it is ``root``.
    """
    if ranks.size == 1:
        return
    operation = getattr(MPI, OPERATIONS[op])
    for piece in pieces(flat):
        if root is None:
            ranks.Allreduce(MPI.IN_PLACE, piece, operation)
        elif ranks.rank == root:
            ranks.Reduce(MPI.IN_PLACE, piece, operation, root)
        else:
            ranks.Reduce(piece, None, operation, root)


def mean_in_place(ranks: Ranks, flat: _Array) -> None:
    """Overwrite an array of floats with its mean over all ranks; collective; as :func:`combine_in_place`."""
    if is_half(flat.dtype):
        mean_of_halves(ranks, flat)
    else:
        combine_in_place(ranks, flat)
        divide(flat, ranks.size, flat)
