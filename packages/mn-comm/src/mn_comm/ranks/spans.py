"""The spans of a training step, for a timeline; without a recorder, nothing happens."""

from __future__ import annotations

import os
import warnings
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from mpi4py import MPI

VARIABLE = "CHAINERMN_TIMELINE"  # the environment variable that names the file for a timeline
ENTRY_POINT = "mn_comm.timeline"  # the group of entry points that record a timeline: functions of communicator and file


class Recorder(Protocol):
    """An object that records a timeline."""

    def span(self, name: str, details: dict[str, Any]) -> AbstractContextManager[None]:
        """Return a context whose duration is recorded."""


_NOTHING = nullcontext()
_recorder: Recorder | None = None


def span(name: str, **details: Any) -> AbstractContextManager[None]:
    """Return a context whose duration is recorded in the timeline, if one is recorded; not collective.

    Args:
        name: The name of the span.
        details: Shown when the span is selected; what JSON has no form for is shown as text.

    Example:
        >>> with mn_comm.span("prepare", samples=100):
        ...     samples = list(range(100))
    """
    return _NOTHING if _recorder is None else _recorder.span(name, details)


def is_recording() -> bool:
    """Return whether a timeline is recorded."""
    return _recorder is not None


def record(recorder: Recorder | None) -> None:
    """Record spans from now on; ``None`` to stop."""
    global _recorder
    _recorder = recorder


def start(ranks: MPI.Intracomm) -> None:
    """Record a timeline from now on, if the environment of rank 0 requests it; collective."""
    # The ranks' own environments may differ: Open MPI's launcher passes a variable only to the ranks of its own host.
    file = ranks.bcast(os.environ.get(VARIABLE) if ranks.rank == 0 else None)
    if not file:
        return
    from importlib.metadata import entry_points

    found = list(entry_points(group=ENTRY_POINT))
    if found:
        found[0].load()(ranks, file)
    elif ranks.rank == 0:
        warnings.warn(
            f"no timeline is recorded: {VARIABLE} is set, but the package mn-tools is not installed", stacklevel=2
        )
