"""The communicator of the name ``two_dimensional``."""

from mn_comm.communicators import TwoDimensionalCommunicator as TwoDimensionalCommunicator
