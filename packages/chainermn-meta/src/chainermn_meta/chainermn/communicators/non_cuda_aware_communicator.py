"""The communicator of the name ``non_cuda_aware``."""

from mn_comm import NonCudaAwareCommunicator

__all__ = ["NonCudaAwareCommunicator"]
