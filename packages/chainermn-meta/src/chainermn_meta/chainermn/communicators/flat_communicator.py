"""The communicator of the name ``flat``."""

from mn_comm import FlatCommunicator

__all__ = ["FlatCommunicator"]
