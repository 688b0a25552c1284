"""Arrays on a device (CuPy's): copied to MPI through pinned host memory, or averaged on the device by NCCL.

Nothing here is imported before the first such array is seen. None of it has run on a GPU yet. The tests marked ``gpu``
run on an emulated one, and NVIDIA's compiler compiles the kernels.

Gradients go through the same steps as in :mod:`mn_comm.gradients`; begin with :mod:`~mn_comm.device.bucket` and
:mod:`~mn_comm.device.strategies`.
"""
