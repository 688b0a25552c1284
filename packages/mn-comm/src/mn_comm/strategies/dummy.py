"""``dummy``: no communication at all, to measure what the packing costs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from mpi4py import MPI

from mn_comm.intra import Buffer
from mn_comm.topology import Topology

if TYPE_CHECKING:
    from mn_comm.device.buffer import DeviceStrategy

__all__ = ["Dummy"]


class Dummy:
    """Leave the packed buffer as it is."""

    one_bucket_each = False

    def __init__(self, mpi_comm: MPI.Intracomm, topology: Topology) -> None:
        pass

    def allocate(self, length: int, dtype: np.dtype[Any]) -> Buffer:
        """Return memory of this process's own."""
        return Buffer.private(length, dtype)

    def average(self, buffer: Buffer) -> None:
        """Do nothing."""

    def streamed(self, lengths: Sequence[int], dtype: np.dtype[Any]) -> None:
        """Return nothing: all is packed."""
        return

    def on_device(self) -> DeviceStrategy:
        """Return what does as little to buffers on devices."""
        from mn_comm.device import strategies as on_device

        return on_device.Alone()

    def close(self) -> None:
        """Hold nothing, give nothing back."""
