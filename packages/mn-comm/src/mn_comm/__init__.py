"""Collectives on arrays over MPI, and the averaging of gradients; knows nothing of Chainer.

The names below are loaded when first asked for: `python -m mn_comm doctor` must speak where MPI cannot be loaded.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

import mn_comm.workers  # noqa: F401 - before mpi4py.MPI is imported, which initialises MPI

if TYPE_CHECKING:
    from mn_comm.agreement import expect_same, together
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
    from mn_comm.timeline import is_recording, span
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
    "expect_same",
    "explain_stalls",
    "is_recording",
    "span",
    "together",
    "waiting_for",
]

_HOME_OF = {
    "expect_same": "agreement",
    "together": "agreement",
    "CommunicatorBase": "base",
    "Communicator": "communicator",
    "DummyCommunicator": "communicator",
    "FlatCommunicator": "communicator",
    "HierarchicalCommunicator": "communicator",
    "NaiveCommunicator": "communicator",
    "NonCudaAwareCommunicator": "communicator",
    "PureNcclCommunicator": "communicator",
    "SingleNodeCommunicator": "communicator",
    "TwoDimensionalCommunicator": "communicator",
    "create_communicator": "create",
    "BackgroundReducer": "gradients",
    "GradientReducer": "gradients",
    "Round": "gradients",
    "Model": "protocols",
    "Parameter": "protocols",
    "explain_stalls": "stall",
    "waiting_for": "stall",
    "is_recording": "timeline",
    "span": "timeline",
    "Topology": "topology",
}


def __getattr__(name: str) -> Any:
    if name not in _HOME_OF:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    found = getattr(importlib.import_module(f"mn_comm.{_HOME_OF[name]}"), name)
    globals()[name] = found
    return found


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
