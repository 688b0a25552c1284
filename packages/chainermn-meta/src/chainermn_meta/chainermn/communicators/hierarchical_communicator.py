"""The communicator of the name ``hierarchical``."""

from mn_comm.communicators import HierarchicalCommunicator as HierarchicalCommunicator
