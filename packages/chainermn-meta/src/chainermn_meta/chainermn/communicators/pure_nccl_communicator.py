"""The communicator of the name ``pure_nccl``."""

from mn_comm.communicators import PureNcclCommunicator as PureNcclCommunicator
