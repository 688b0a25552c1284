"""The communicator of the name ``single_node``."""

from mn_comm.communicators import SingleNodeCommunicator

__all__ = ["SingleNodeCommunicator"]
