"""Reduce-scatter: each rank gets its block of the sum, product, maximum or minimum over all ranks."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from mn_comm.basis import placement
from mn_comm.basis.device_backend import device_backend
from mn_comm.basis.mpi import MPI
from mn_comm.collectives import pieces
from mn_comm.collectives.allreduce import OPERATIONS, agree_on, where_nan
from mn_comm.ranks import agreement

if TYPE_CHECKING:
    from mn_comm.ranks.intracomm import Ranks

__all__ = ["reduce_scatter"]

_Array = np.ndarray[Any, Any]


def reduce_scatter(ranks: Ranks, data: Any, op: str) -> _Array:
    """Combine the arrays of all ranks, one block on each rank; see :meth:`mn_comm.Communicator.reduce_scatter`."""
    array, total_dtype = agree_on(ranks, data, op, "reduce_scatter")
    with agreement.raise_on_all(ranks):
        if not array.ndim or array.shape[0] % ranks.size:
            raise ValueError(
                f"reduce_scatter: expected a first axis whose length is a multiple of {ranks.size}, got {array.shape}"
            )
    shape = (array.shape[0] // ranks.size, *array.shape[1:])
    if placement.is_device_array(array):
        total = device_backend().allreduce(ranks, array, total_dtype, op)
        return total[ranks.rank * shape[0] : (ranks.rank + 1) * shape[0]].copy()  # type: ignore[no-any-return]
    # mpi4py finds no datatype for elements that are not aligned.
    blocks = np.require(array, total_dtype, ["C", "ALIGNED", "ENSUREARRAY"]).reshape(ranks.size, -1)
    is_nan = where_nan(ranks, blocks, op)
    block = np.empty(blocks.shape[1], total_dtype)
    begin = 0
    for piece in pieces.pieces(block, pieces.PIECE_BYTES // ranks.size):
        summands = np.ascontiguousarray(blocks[:, begin : begin + piece.size])
        ranks.Reduce_scatter_block(summands, piece, getattr(MPI, OPERATIONS[op]))
        begin += piece.size
    if is_nan is not None:
        block[is_nan[ranks.rank]] = np.nan
    return block.reshape(shape).astype(array.dtype, copy=False)
