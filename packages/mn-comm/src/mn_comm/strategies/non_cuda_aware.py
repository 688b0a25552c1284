"""``non_cuda_aware``: nothing but host memory is given to MPI, and NCCL is not used."""

from __future__ import annotations

from typing import TYPE_CHECKING

from mn_comm.strategies.two_dimensional import TwoDimensional

if TYPE_CHECKING:
    from mn_comm.device.buffer import DeviceStrategy

__all__ = ["NonCudaAware"]


class NonCudaAware(TwoDimensional):
    """As ``two_dimensional`` on host arrays; those on devices are staged through host memory for it."""

    def on_device(self) -> DeviceStrategy:
        """Return what stages buffers on devices."""
        from mn_comm.device import strategies as on_device

        return on_device.Staged(self)
