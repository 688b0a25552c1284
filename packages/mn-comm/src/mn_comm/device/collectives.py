"""Collectives on arrays on devices: by NCCL if it can be used, otherwise staged through host memory."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from mn_comm.collectives import combine_in_place, pieces
from mn_comm.device import nccl, staging
from mn_comm.device.nccl_ranks import nccl_ranks_of

if TYPE_CHECKING:
    from mn_comm.ranks.intracomm import Ranks


def allreduce(ranks: Ranks, array: Any, total_dtype: np.dtype[Any], op: str = "sum") -> Any:
    """Return the combination of arrays, whose shape and dtype were checked, by NCCL or in host memory; collective."""
    with array.device:
        total = array.astype(total_dtype, order="C", copy=True)
        if op == "sum" and _by_nccl(ranks) and nccl.supports(total_dtype):
            if total.size:
                nccl_ranks_of(ranks).connect().all_reduce(total)
        else:
            host = staging.to_host(total)
            combine_in_place(ranks, host.reshape(-1), op)
            total = staging.to_device(host)
        return total.astype(array.dtype, copy=False)


def bcast(ranks: Ranks, array: Any, root: int) -> None:
    """Overwrite an array on every rank's device with the root's, of the same shape and dtype; collective."""
    import cupy

    with array.device:
        contiguous = cupy.ascontiguousarray(array)
        if not array.size:
            return
        if _by_nccl(ranks):
            nccl_ranks_of(ranks).connect().broadcast(contiguous.reshape(-1).view(np.uint8), root)
        else:
            host = staging.to_host(contiguous)
            pieces.bcast(ranks, host, root)
            if ranks.rank != root:
                contiguous = staging.to_device(host)
        if contiguous is not array and ranks.rank != root:
            array[...] = contiguous.reshape(array.shape)


def bcast_new(ranks: Ranks, shape: tuple[int, ...], dtype: np.dtype[Any], root: int) -> Any:
    """Return a new array on the current device with what the root passes to :func:`bcast`; collective."""
    import cupy

    received = cupy.empty(shape, dtype)
    bcast(ranks, received, root)
    return received


def _by_nccl(ranks: Ranks) -> bool:
    return ranks.size > 1 and nccl_ranks_of(ranks).obstacle is None
