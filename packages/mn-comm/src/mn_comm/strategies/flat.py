"""``flat``: one MPI allreduce of everything."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from mpi4py import MPI

from mn_comm.collectives import mean_in_place
from mn_comm.intra import Buffer
from mn_comm.topology import Topology

if TYPE_CHECKING:
    from mn_comm.device.buffer import DeviceStrategy

__all__ = ["Flat"]


class Flat:
    """One MPI allreduce of the packed buffer."""

    one_bucket_each = False

    def __init__(self, mpi_comm: MPI.Intracomm, topology: Topology) -> None:
        self._mpi_comm = mpi_comm
        self._size = topology.size

    def allocate(self, length: int, dtype: np.dtype[Any]) -> Buffer:
        """Return memory of this process's own."""
        return Buffer.private(length, dtype)

    def average(self, buffer: Buffer) -> None:
        """Overwrite a buffer with its mean over all ranks; collective."""
        mean_in_place(self._mpi_comm, buffer.array, self._size)

    def streamed(self, lengths: Sequence[int], dtype: np.dtype[Any]) -> None:
        """Return nothing: all is packed."""
        return

    def on_device(self) -> DeviceStrategy:
        """Return what gives buffers on devices to MPI, staged unless it is CUDA-aware; collective."""
        from mn_comm.device import strategies as on_device

        return on_device.by_mpi(self, self._mpi_comm)

    def close(self) -> None:
        """Hold nothing, give nothing back."""
