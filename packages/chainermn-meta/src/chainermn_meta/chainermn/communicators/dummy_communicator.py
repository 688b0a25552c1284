"""The communicator of the name ``dummy``."""

from mn_comm.communicators import DummyCommunicator as DummyCommunicator
