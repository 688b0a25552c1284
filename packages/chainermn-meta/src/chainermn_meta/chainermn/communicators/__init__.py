"""Communicators."""

from chainermn.communicators import (  # noqa: F401 - scripts reach them without another import
    _communication_utility,
    _memory_utility,
    communicator_base,
    dummy_communicator,
    flat_communicator,
    hierarchical_communicator,
    mpi_communicator_base,
    naive_communicator,
    non_cuda_aware_communicator,
    pure_nccl_communicator,
    single_node_communicator,
    two_dimensional_communicator,
)

from mn_comm import CommunicatorBase, create_communicator

__all__ = ["CommunicatorBase", "create_communicator"]
