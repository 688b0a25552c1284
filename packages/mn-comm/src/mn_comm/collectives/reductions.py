"""The sum, product, maximum or minimum over all ranks: on every rank, on one of them, or one block on each."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from mn_comm.basis import placement, wire
from mn_comm.basis.mpi import MPI
from mn_comm.collectives import pieces
from mn_comm.collectives.header import same_root
from mn_comm.collectives.mean import OPERATIONS, combine_in_place
from mn_comm.ranks import agreement

if TYPE_CHECKING:
    from mn_comm.ranks.intracomm import Ranks

_Array = np.ndarray[Any, Any]


def allreduce(ranks: Ranks, data: Any, op: str = "sum") -> _Array:
    """Combine the arrays of all ranks; see :meth:`mn_comm.Communicator.allreduce`."""
    return _combine(ranks, data, op, "allreduce")


def reduce(ranks: Ranks, data: Any, op: str, root: int) -> _Array | None:
    """Combine the arrays of all ranks on one rank; see :meth:`mn_comm.Communicator.reduce`."""
    root = same_root(ranks, root)
    total = _combine(ranks, data, op, "reduce", root)
    return total if ranks.rank == root else None


def _combine(ranks: Ranks, array: Any, op: str, what: str, root: int | None = None) -> _Array:
    total_dtype = _agree_on(ranks, array, op, what)
    if placement.is_device_array(array):
        return placement.device_backend().allreduce(ranks, array, total_dtype, op)  # type: ignore[no-any-return]
    total = array.astype(total_dtype, order="C", copy=True)
    is_nan = _where_nan(ranks, total, op)
    combine_in_place(ranks, total.reshape(-1), op, root)
    if is_nan is not None:
        total[is_nan] = np.nan
    return total.astype(array.dtype, copy=False)  # type: ignore[no-any-return]


def reduce_scatter(ranks: Ranks, array: Any, op: str) -> _Array:
    """Combine the arrays of all ranks, one block on each rank; see :meth:`mn_comm.Communicator.reduce_scatter`."""
    total_dtype = _agree_on(ranks, array, op, "reduce_scatter")
    if not array.ndim or array.shape[0] % ranks.size:
        error = f"reduce_scatter: expected a first axis whose length is a multiple of {ranks.size}, got {array.shape}"
        raise agreement.everywhere(ValueError(error))
    shape = (array.shape[0] // ranks.size, *array.shape[1:])
    if placement.is_device_array(array):
        total = placement.device_backend().allreduce(ranks, array, total_dtype, op)
        return total[ranks.rank * shape[0] : (ranks.rank + 1) * shape[0]].copy()  # type: ignore[no-any-return]
    # mpi4py finds no datatype for elements that are not aligned.
    blocks = np.require(array, total_dtype, ["C", "ALIGNED", "ENSUREARRAY"]).reshape(ranks.size, -1)
    is_nan = _where_nan(ranks, blocks, op)
    block = np.empty(blocks.shape[1], total_dtype)
    begin = 0
    for piece in pieces.pieces(block, pieces.PIECE_BYTES // ranks.size):
        summands = np.ascontiguousarray(blocks[:, begin : begin + piece.size])
        ranks.Reduce_scatter_block(summands, piece, getattr(MPI, OPERATIONS[op]))
        begin += piece.size
    if is_nan is not None:
        block[is_nan[ranks.rank]] = np.nan
    return block.reshape(shape).astype(array.dtype, copy=False)


def _agree_on(ranks: Ranks, data: Any, op: str, what: str) -> np.dtype[Any]:
    """Return the dtype in which to combine arrays, or raise, on every rank, what ``allreduce`` raises; collective."""

    def check() -> tuple[Any, ...]:
        if op not in OPERATIONS:
            raise ValueError(f"{what}: expected op to be one of {', '.join(OPERATIONS)}; got {op!r}")
        array = wire.check_array(data, what)
        if wire.check_sum(array.dtype, what).kind == "c" and op in ("max", "min"):
            raise TypeError(f"{what}: expected numbers that have an order for op={op!r}, got dtype {array.dtype}")
        return (array.shape, array.dtype.name, str(op), *(["on a device"] if placement.is_device_array(array) else []))

    agreement.agree(ranks, check, functools.partial(_explain, what))
    return wire.check_sum(data.dtype, what)


def _where_nan(ranks: Ranks, array: _Array, op: str) -> _Array | None:
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


def _explain(what: str, signatures: Sequence[tuple[Any, ...]]) -> ValueError:
    rank = agreement.first_other(signatures)
    return ValueError(
        f"{what}: expected arrays of the same shape and dtype, and the same op, on every rank, got {signatures[0]} on "
        f"rank 0 and {signatures[rank]} on rank {rank}"
    )
