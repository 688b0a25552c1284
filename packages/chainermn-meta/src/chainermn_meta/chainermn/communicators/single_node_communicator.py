"""The communicator of the name ``single_node``."""

from mn_comm.communicators import SingleNodeCommunicator as SingleNodeCommunicator
