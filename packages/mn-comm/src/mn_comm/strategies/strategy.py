"""What every strategy offers to the gradient reducer."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
from mpi4py import MPI

from mn_comm.intra import Buffer, Streamed
from mn_comm.topology import Topology

if TYPE_CHECKING:
    from mn_comm.device.buffer import DeviceStrategy

__all__ = ["Strategy"]


class Strategy(Protocol):
    """A way to average a buffer over all ranks of a communicator.

    Attributes:
        one_bucket_each: Whether each gradient is averaged by itself, rather than many together.
    """

    one_bucket_each: bool

    def __init__(self, mpi_comm: MPI.Intracomm, topology: Topology) -> None:
        """Prepare for the ranks of a communicator; collective.

        Args:
            mpi_comm: The communicator whose ranks take part.
            topology: Where they run.

        Raises:
            ValueError: The strategy cannot work on this topology (on every rank).
        """
        ...

    def allocate(self, length: int, dtype: np.dtype[Any]) -> Buffer:
        """Return memory for ``length`` elements that can be averaged; collective."""
        ...

    def average(self, buffer: Buffer) -> None:
        """Overwrite a buffer with its mean over all ranks; collective.

        Args:
            buffer: From :meth:`allocate`, of the same length and dtype on every rank.
        """
        ...

    def streamed(self, lengths: Sequence[int], dtype: np.dtype[Any]) -> Streamed | None:
        """Return what averages arrays of these lengths where they lie; collective.

        Args:
            lengths: In elements; the same on every rank.
            dtype: ``float32`` or ``float64``.

        Returns:
            It, or ``None`` if such arrays are averaged in a buffer.
        """
        ...

    def on_device(self) -> DeviceStrategy:
        """Return the counterpart for buffers on devices; collective, once the ranks have chosen their devices.

        Raises:
            RuntimeError: It needs NCCL, and that or CuPy is missing on some rank (on every rank).
            ValueError: It needs a device for each rank, and two share one (on every rank).
        """
        ...

    def close(self) -> None:
        """Give back what the strategy holds; collective. Buffers stay what they are."""
        ...
