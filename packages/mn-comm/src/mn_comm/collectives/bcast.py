"""Broadcast: one rank's array to every rank."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from mn_comm.basis import placement, wire
from mn_comm.basis.device_backend import device_backend
from mn_comm.collectives import header, pieces
from mn_comm.collectives.roots import same_root

if TYPE_CHECKING:
    from mn_comm.ranks.intracomm import Ranks

__all__ = ["bcast", "bcast_in_place"]


def bcast(ranks: Ranks, data: Any, root: int = 0) -> np.ndarray[Any, Any]:
    """Broadcast an array; see :meth:`mn_comm.CommunicatorBase.bcast`."""
    root = same_root(ranks, root)
    if ranks.rank == root:
        announced, error = header.attempt(lambda: header.describe([wire.check_array(data, "bcast")]))
        ranks.bcast(announced, root)
        header.raise_failure(announced, root, error)
        if announced.on_device[0]:
            device_backend().bcast(ranks, data, root)
        else:
            pieces.bcast(ranks, np.asarray(data, order="C"), root)
        return data  # type: ignore[no-any-return]
    announced = ranks.bcast(None, root)
    header.raise_failure(announced, root)
    if announced.on_device[0]:
        return device_backend().bcast_new(ranks, announced.shapes[0], announced.dtypes[0], root)  # type: ignore[no-any-return]
    received: np.ndarray[Any, Any] = np.empty(announced.shapes[0], announced.dtypes[0])
    pieces.bcast(ranks, received, root)
    return received


def bcast_in_place(ranks: Ranks, array: Any, root: int = 0) -> None:
    """Overwrite every rank's array with the root's; collective.

    The arrays have the same shape and dtype, and any memory layout; they are on a device on all ranks or on none.
    """
    if placement.is_device_array(array):
        device_backend().bcast(ranks, array, root)
        return
    contiguous = np.asarray(array, order="C")
    pieces.bcast(ranks, contiguous, root)
    if contiguous is not array:
        array[...] = contiguous
