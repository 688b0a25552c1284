"""Collectives on arrays over MPI, and the averaging of gradients; knows nothing of Chainer."""

import mn_comm.workers  # noqa: F401 - before mpi4py.MPI is imported, which initialises MPI
from mn_comm.agreement import together
from mn_comm.base import CommunicatorBase
from mn_comm.communicator import (
    Communicator,
    DummyCommunicator,
    FlatCommunicator,
    HierarchicalCommunicator,
    NaiveCommunicator,
    NonCudaAwareCommunicator,
    PureNcclCommunicator,
    SingleNodeCommunicator,
    TwoDimensionalCommunicator,
)
from mn_comm.create import create_communicator
from mn_comm.gradients import BackgroundReducer, GradientReducer, Round
from mn_comm.protocols import Model, Parameter
from mn_comm.stall import explain_stalls, waiting_for
from mn_comm.topology import Topology

__all__ = [
    "BackgroundReducer",
    "Communicator",
    "CommunicatorBase",
    "DummyCommunicator",
    "FlatCommunicator",
    "GradientReducer",
    "HierarchicalCommunicator",
    "Model",
    "NaiveCommunicator",
    "NonCudaAwareCommunicator",
    "Parameter",
    "PureNcclCommunicator",
    "Round",
    "SingleNodeCommunicator",
    "Topology",
    "TwoDimensionalCommunicator",
    "create_communicator",
    "explain_stalls",
    "together",
    "waiting_for",
]
