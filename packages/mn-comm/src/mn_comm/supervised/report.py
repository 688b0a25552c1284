"""What a rank of a supervised job reports to the keeper of its node: that it has started, and how it ends."""

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
    """Report that this rank has started, and later that it has ended; does nothing in a job without a supervisor.

    Args:
        rank: This rank's number in ``MPI_COMM_WORLD``.
        size: The number of ranks.
    """
    found = link.supervision()
    if found is None:
        return
    _tell(op="join", attempt=found.attempt, rank=rank, size=size)
    exit_status.share_exit_status(rank)
    exit_status.at_exit(functools.partial(_end, os.getpid()))


def has_failed(status: int, summary: str) -> None:
    """Report why this rank does not reach the end of the script.

    Args:
        status: Its exit status.
        summary: The reason, in one line.
    """
    if not _said:
        _said.append(summary)
        _tell(op="failed", status=status, summary=summary[:_LONGEST_SUMMARY])


def job_ends() -> None:
    """Report that no rank continues: ranks that are still present are stopped or cut off."""
    _tell(op="over")


def leave(*, together: bool) -> None:
    """Record that an elastic rank has reached the end of the script.

    Args:
        together: Whether all remaining ranks have. Otherwise other ranks continue, and the training has not ended.
    """
    _together.append(together)


def _end(process: int) -> None:
    if os.getpid() != process or _said:
        return
    if hasattr(sys, "last_type"):  # no code has handled it: Python has printed it
        has_failed(1, "uncaught exception")
    elif all(_together):
        _tell(op="finished", elastic=bool(_together))


def _tell(**message: Any) -> None:
    found = link.supervision()
    connected = link.connection() if found is not None else None
    if connected is not None and found is not None:
        with contextlib.suppress(OSError):  # the keeper has ended, and so has the supervisor
            connected.ask({"attempt": found.attempt, **message})
