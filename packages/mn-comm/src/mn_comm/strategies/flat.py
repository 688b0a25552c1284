"""``flat``: one MPI allreduce of everything."""

from __future__ import annotations

from typing import Any

import numpy as np
from mpi4py import MPI

from mn_comm.collectives import sum_in_place
from mn_comm.topology import Topology

__all__ = ["Flat"]


class Flat:
    """One MPI allreduce of the packed buffer."""

    one_bucket_each = False

    def __init__(self, mpi_comm: MPI.Intracomm, topology: Topology) -> None:
        self._mpi_comm = mpi_comm
        self._size = topology.size

    def average(self, buffer: np.ndarray[Any, Any]) -> None:
        """Overwrite a buffer with its mean over all ranks; collective."""
        sum_in_place(self._mpi_comm, buffer)
        buffer /= self._size

    def close(self) -> None:
        """Hold nothing, give nothing back."""
