"""Arrays on a device (CuPy's): copied to MPI through pinned host memory, or averaged on the device by NCCL.

Nothing here is imported before the first such array is seen. No part of it has run on a GPU yet: it is tested with a
stand-in for CuPy and NCCL, and its kernels are compiled; the tests marked ``gpu`` are waiting for a device.

Gradients take the same steps as in :mod:`mn_comm.gradients`. Read :mod:`~mn_comm.device.bucket` for packing and
unpacking, :mod:`~mn_comm.device.kernels` for how each is one launch, :mod:`~mn_comm.device.strategies` for the ways to
average, :mod:`~mn_comm.device.nccl_ranks` for when NCCL can be used, :mod:`~mn_comm.device.staging` for what is done
where it cannot, and :mod:`~mn_comm.device.links` for how compressed gradients travel.
"""
