"""Arrays on a device (CuPy's): copied to MPI through pinned host memory, or averaged on the device by NCCL.

Nothing here is imported before the first such array is seen. The tests marked ``gpu`` run on a GPU or an emulated one.

Gradients go through the same steps as in :mod:`mn_comm.gradients`; begin with :mod:`~mn_comm.device.bucket` and
:mod:`~mn_comm.device.strategies`.
"""
