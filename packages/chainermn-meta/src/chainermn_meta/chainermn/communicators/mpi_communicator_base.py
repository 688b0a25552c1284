"""What all communicators over MPI are."""

from mn_comm import Communicator as MpiCommunicatorBase

__all__ = ["MpiCommunicatorBase"]
