"""``pure_nccl``: one NCCL all-reduce over all ranks."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from mpi4py import MPI

from mn_comm import agreement
from mn_comm.intra import Buffer
from mn_comm.topology import Topology

if TYPE_CHECKING:
    from mn_comm.device.buffer import DeviceStrategy

__all__ = ["PureNccl"]


class PureNccl:
    """One NCCL all-reduce over all ranks, of gradients on devices only.

    That NCCL and CuPy can be imported is seen to at once; NCCL is not started before the first gradients are seen, and
    with them the device.
    """

    one_bucket_each = False

    def __init__(self, mpi_comm: MPI.Intracomm, topology: Topology) -> None:
        self._mpi_comm = mpi_comm
        with agreement.together(mpi_comm):
            from mn_comm import nccl

            nccl.require()

    def allocate(self, length: int, dtype: np.dtype[Any]) -> Buffer:
        """Refuse: on every rank, as all have agreed where their gradients are."""
        raise TypeError(
            f"pure_nccl: expected gradients in CuPy arrays, got {length} elements of {dtype} in NumPy arrays; every "
            "other communicator takes both"
        )

    def average(self, buffer: Buffer) -> None:
        """Never called: there are no buffers in host memory."""
        raise NotImplementedError

    def streamed(self, lengths: Sequence[int], dtype: np.dtype[Any]) -> None:
        """Return nothing: all is packed."""
        return

    def on_device(self) -> DeviceStrategy:
        """Return NCCL among all ranks; collective."""
        from mn_comm.device import strategies as on_device

        return on_device.by_nccl(self._mpi_comm)

    def close(self) -> None:
        """Hold nothing: NCCL's communicators go with the MPI communicator that they belong to."""
