"""The communicator of the name ``hierarchical``."""

from mn_comm import HierarchicalCommunicator

__all__ = ["HierarchicalCommunicator"]
