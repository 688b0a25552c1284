"""NCCL: whether it is there, and in which version."""

from mn_comm.nccl import NcclCommunicator, _available, get_build_version, get_unique_id, get_version

__all__ = ["NcclCommunicator", "_available", "get_build_version", "get_unique_id", "get_version"]
