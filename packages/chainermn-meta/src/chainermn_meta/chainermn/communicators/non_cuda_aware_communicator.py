"""The communicator of the name ``non_cuda_aware``."""

from mn_comm.communicators import NonCudaAwareCommunicator as NonCudaAwareCommunicator
