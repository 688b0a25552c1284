"""What code for host memory calls when it is given arrays on a device; see :mod:`mn_comm.basis.placement`."""

from mn_comm.device.collectives import allreduce, bcast, bcast_new
from mn_comm.device.layout import lay_out
from mn_comm.device.nccl import require as require_nccl
from mn_comm.device.staging import empty_pinned, to_device, to_host

__all__ = ["allreduce", "bcast", "bcast_new", "empty_pinned", "lay_out", "require_nccl", "to_device", "to_host"]
