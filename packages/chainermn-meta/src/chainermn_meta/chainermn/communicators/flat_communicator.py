"""The communicator of the name ``flat``."""

from mn_comm.communicators import FlatCommunicator as FlatCommunicator
