"""The communicator of the name ``pure_nccl``."""

from mn_comm.communicators import PureNcclCommunicator

__all__ = ["PureNcclCommunicator"]
