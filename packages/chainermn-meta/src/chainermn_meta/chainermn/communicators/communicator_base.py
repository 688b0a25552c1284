"""The interface of every communicator."""

from mn_comm import CommunicatorBase as CommunicatorBase
