"""Communicators."""

from mn_comm import CommunicatorBase, create_communicator

__all__ = ["CommunicatorBase", "create_communicator"]
