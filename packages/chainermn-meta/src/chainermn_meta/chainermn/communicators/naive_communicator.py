"""The communicator of the name ``naive``."""

from mn_comm.communicators import NaiveCommunicator as NaiveCommunicator
