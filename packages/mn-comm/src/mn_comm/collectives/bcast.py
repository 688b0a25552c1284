"""Broadcast: one rank's array to every rank."""

from __future__ import annotations

from typing import Any

import numpy as np
from mpi4py import MPI

from mn_comm import wire
from mn_comm.collectives import header, pieces

__all__ = ["bcast"]


def bcast(mpi_comm: MPI.Intracomm, data: Any, root: int = 0) -> np.ndarray[Any, Any]:
    """Broadcast an array; see :meth:`mn_comm.CommunicatorBase.bcast`."""
    root = wire.check_rank(root, mpi_comm.size, "root")
    if mpi_comm.rank == root:
        announced, error = header.attempt(lambda: header.describe([wire.check_array(data, "bcast")]))
        header.bcast(mpi_comm, announced, root)
        header.raise_failure(announced, root, error)
        pieces.bcast(mpi_comm, np.asarray(data, order="C"), root)
        return data  # type: ignore[no-any-return]
    announced = header.bcast(mpi_comm, None, root)
    header.raise_failure(announced, root)
    received: np.ndarray[Any, Any] = np.empty(announced.shapes[0], announced.dtypes[0])
    pieces.bcast(mpi_comm, received, root)
    return received
