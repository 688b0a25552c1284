"""Training that continues without ranks that die, or is restarted, with Open MPI.

An elastic communicator survives the loss of a rank, using Open MPI's ULFM; see docs/decisions/0012-votes.md.
:mod:`~mn_elastic.family`: the MPI communicators of one generation, and their votes. :mod:`~mn_elastic.recovery`: from
one generation to the next. :mod:`~mn_elastic.spares`: processes that wait to take the places of lost ranks.
:mod:`~mn_elastic.communicator`: all of this in one object. :mod:`~mn_elastic.ends`: how one rank ends.
:mod:`~mn_elastic.memory`: arrays that outlive a job. :mod:`~mn_elastic.supervision`: the command that restarts jobs.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from mn_elastic.communicator import ElasticCommunicator
    from mn_elastic.memory import NodeMemory

__all__ = ["ElasticCommunicator", "NodeMemory"]

_HOME_OF = {"ElasticCommunicator": "communicator", "NodeMemory": "memory"}

if not TYPE_CHECKING:  # so that type checkers know which names there are

    def __getattr__(name: str) -> Any:
        if name not in _HOME_OF:  # loading them starts MPI
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        return getattr(importlib.import_module(f"{__name__}.{_HOME_OF[name]}"), name)
