"""The communicator of the name ``flat``."""

from mn_comm.communicators import FlatCommunicator

__all__ = ["FlatCommunicator"]
