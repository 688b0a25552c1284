"""What a rank of a supervised job tells the keeper of its node: that it is there, and how it ends."""

from __future__ import annotations

import contextlib
import functools
import os
import sys
from typing import Any

from mn_comm import exit_status
from mn_comm.supervised import link

__all__ = ["has_failed", "job_ends", "join", "leave"]

_LONGEST_SUMMARY = 500
_said: list[str] = []
_together: list[bool] = []


@functools.cache
def join(rank: int, size: int) -> None:
    """Tell that this rank is there, and when it has come to its end; nothing is done in a job without supervisor.

    Args:
        rank: Its number in ``MPI_COMM_WORLD``.
        size: How many there are.
    """
    found = link.supervision()
    if found is None:
        return
    _tell(op="join", attempt=found.attempt, rank=rank, size=size)
    exit_status.share_exit_status(rank)
    exit_status.at_exit(functools.partial(_end, os.getpid()))


def has_failed(status: int, summary: str) -> None:
    """Tell why this rank does not come to the end.

    Args:
        status: The status that it has earned.
        summary: Why, in a line.
    """
    if not _said:
        _said.append(summary)
        _tell(op="failed", status=status, summary=summary[:_LONGEST_SUMMARY])


def job_ends() -> None:
    """Tell that no rank goes on: those that are still there are stopped, or cut off."""
    _tell(op="over")


def leave(*, together: bool) -> None:
    """Take note that an elastic rank has come to its end.

    Args:
        together: Whether all that are left have. Otherwise others go on, and the training has not come to its end.
    """
    _together.append(together)


def _end(process: int) -> None:
    if os.getpid() != process or _said:
        return
    if hasattr(sys, "last_type"):  # nobody has handled it: Python has shown it
        has_failed(1, "uncaught exception")
    elif all(_together):
        _tell(op="finished", elastic=bool(_together))


def _tell(**message: Any) -> None:
    found = link.supervision()
    connected = link.connection() if found is not None else None
    if connected is not None and found is not None:
        with contextlib.suppress(OSError):  # it has ended, as the supervisor has
            connected.ask({"attempt": found.attempt, **message})
