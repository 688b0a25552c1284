"""Collectives on arrays over MPI, and the averaging of gradients; independent of Chainer.

The names below are loaded when first asked for, and MPI is started by the first communicator. Packages that are built
on this one find more in :mod:`mn_comm.building_blocks`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import mn_comm.basis.child_processes  # noqa: F401 - before mpi4py.MPI is imported, which initialises MPI
from mn_comm.basis.lazy import load_on_demand

if TYPE_CHECKING:
    from mn_comm.base import CommunicatorBase as CommunicatorBase
    from mn_comm.basis.change import Change as Change
    from mn_comm.basis.change import RankLost as RankLost
    from mn_comm.communicator import Communicator as Communicator
    from mn_comm.create import create_communicator as create_communicator
    from mn_comm.gradients.interfaces import CommunicationHook as CommunicationHook
    from mn_comm.gradients.strategy import Strategy as Strategy
    from mn_comm.ranks.agreement import expect_same as expect_same
    from mn_comm.ranks.agreement import is_elastic as is_elastic
    from mn_comm.ranks.agreement import raise_on_all as raise_on_all
    from mn_comm.ranks.agreement import transact as transact
    from mn_comm.ranks.background import Future as Future
    from mn_comm.ranks.spans import span as span
    from mn_comm.ranks.watch import explain_stalls as explain_stalls

_HOME_OF = {
    "Change": "basis.change",
    "CommunicationHook": "gradients.interfaces",
    "Communicator": "communicator",
    "CommunicatorBase": "base",
    "Future": "ranks.background",
    "RankLost": "basis.change",
    "Strategy": "gradients.strategy",
    "create_communicator": "create",
    "expect_same": "ranks.agreement",
    "explain_stalls": "ranks.watch",
    "is_elastic": "ranks.agreement",
    "raise_on_all": "ranks.agreement",
    "span": "ranks.spans",
    "transact": "ranks.agreement",
}

__all__ = list(_HOME_OF)


def _home_of_class(name: str) -> str | None:
    """Return the module with upstream's class of each strategy, such as FlatCommunicator."""
    return "communicators" if name.endswith("Communicator") else None


if not TYPE_CHECKING:  # so that type checkers know which names there are
    __getattr__, __dir__ = load_on_demand(__name__, _HOME_OF, _home_of_class)
