"""The communicator of the name ``naive``."""

from mn_comm import NaiveCommunicator

__all__ = ["NaiveCommunicator"]
