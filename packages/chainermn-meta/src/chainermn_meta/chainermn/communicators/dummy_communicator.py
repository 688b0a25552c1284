"""The communicator of the name ``dummy``."""

from mn_comm import DummyCommunicator

__all__ = ["DummyCommunicator"]
