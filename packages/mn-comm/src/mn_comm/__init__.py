"""Collectives on arrays over MPI, and the averaging of gradients; independent of Chainer.

The names below are loaded when first asked for, and MPI is started by the first communicator.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

import mn_comm.basis.child_processes  # noqa: F401 - before mpi4py.MPI is imported, which initialises MPI

if TYPE_CHECKING:
    from mn_comm.base import CommunicatorBase
    from mn_comm.basis.change import Change, RankLost
    from mn_comm.basis.guard import at_exit
    from mn_comm.basis.mpi import MPI
    from mn_comm.basis.protocols import Model, Parameter
    from mn_comm.basis.replicas import own, synchronize_replicas
    from mn_comm.basis.transaction import is_elastic, transact
    from mn_comm.communicator import Communicator
    from mn_comm.create import create_communicator
    from mn_comm.gradients.agree import JoinMessages
    from mn_comm.gradients.bucket import AnyBucket
    from mn_comm.gradients.compression import CompressionReport, CompressionScheme
    from mn_comm.gradients.filling import Owners
    from mn_comm.gradients.reducer import GradientReducer
    from mn_comm.gradients.reduction import CommunicationHook, Reduction
    from mn_comm.gradients.strategies import STRATEGIES, Strategy
    from mn_comm.gradients.targets import check_in_debug_mode
    from mn_comm.ranks.agreement import expect_same, raise_on_all
    from mn_comm.ranks.background import Future, Worker
    from mn_comm.ranks.intracomm import Ranks as Ranks  # a public name, too
    from mn_comm.ranks.spans import is_recording, span
    from mn_comm.ranks.topology import Topology
    from mn_comm.ranks.watch import explain_stalls, operation, waiting_for

_HOME_OF = {
    "expect_same": "ranks.agreement",
    "raise_on_all": "ranks.agreement",
    "CommunicatorBase": "base",
    "Communicator": "communicator",
    "create_communicator": "create",
    "at_exit": "basis.guard",
    "CompressionScheme": "gradients.compression",
    "CompressionReport": "gradients.compression",
    "Change": "basis.change",
    "RankLost": "basis.change",
    "is_elastic": "basis.transaction",
    "transact": "basis.transaction",
    "JoinMessages": "gradients.agree",
    "AnyBucket": "gradients.bucket",
    "Owners": "gradients.filling",
    "GradientReducer": "gradients.reducer",
    "STRATEGIES": "gradients.strategies",
    "Strategy": "gradients.strategies",
    "CommunicationHook": "gradients.reduction",
    "Reduction": "gradients.reduction",
    "check_in_debug_mode": "gradients.targets",
    "MPI": "basis.mpi",
    "Model": "basis.protocols",
    "Parameter": "basis.protocols",
    "Ranks": "ranks.intracomm",
    "own": "basis.replicas",
    "synchronize_replicas": "basis.replicas",
    "is_recording": "ranks.spans",
    "span": "ranks.spans",
    "explain_stalls": "ranks.watch",
    "Topology": "ranks.topology",
    "operation": "ranks.watch",
    "waiting_for": "ranks.watch",
    "Future": "ranks.background",
    "Worker": "ranks.background",
}

# Without Ranks: that is a class of MPI's, so that ``from mn_comm import *`` would start MPI.
__all__ = [
    "MPI",
    "STRATEGIES",
    "AnyBucket",
    "Change",
    "CommunicationHook",
    "Communicator",
    "CommunicatorBase",
    "CompressionReport",
    "CompressionScheme",
    "Future",
    "GradientReducer",
    "JoinMessages",
    "Model",
    "Owners",
    "Parameter",
    "RankLost",
    "Reduction",
    "Strategy",
    "Topology",
    "Worker",
    "at_exit",
    "check_in_debug_mode",
    "create_communicator",
    "expect_same",
    "explain_stalls",
    "is_elastic",
    "is_recording",
    "operation",
    "own",
    "raise_on_all",
    "span",
    "synchronize_replicas",
    "transact",
    "waiting_for",
]


if not TYPE_CHECKING:  # so that type checkers know which names there are

    def __getattr__(name: str) -> Any:
        # Also upstream's class of each strategy, such as FlatCommunicator.
        home = _HOME_OF.get(name, "communicators" if name.endswith("Communicator") else None)
        if home is None:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        module = importlib.import_module(f"mn_comm.{home}")
        found = getattr(module, name)
        globals()[name] = found
        return found


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
