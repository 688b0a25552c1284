"""The base class of all communicators over MPI."""

from mn_comm import Communicator as MpiCommunicatorBase

__all__ = ["MpiCommunicatorBase"]
