"""What a rank of a supervised job reports to the keeper of its node: that it has started, and how it ends."""

from __future__ import annotations

import contextlib
import functools
import itertools
import json
import sys
from typing import Any

from mn_guard import node_process
from mn_guard.exit_sequence import Step, at_exit
from mn_guard.supervised import link

_LONGEST_SUMMARY = 500
_LONGEST_SUMMARY_BYTES = node_process.LONGEST_MESSAGE - 1024  # the rest is for the other words of the message
_said: list[str] = []
_together: list[bool] = []


@functools.cache
def join(rank: int, size: int) -> None:
    """Report that this rank has started, and later that it has ended; does nothing in a job without a supervisor.

    Args:
        rank: This rank's number in ``MPI_COMM_WORLD``.
        size: The number of ranks.

    Raises:
        SystemExit: The supervisor has ended, or cannot be reached from this host. It would have ended this rank.
    """
    found = link.supervision()
    if found is None:
        return
    try:
        link.tell(op="join", rank=rank, size=size)
    except OSError:
        where = f"{found.host}, port {found.port}"
        message = f"the supervisor of this job cannot be reached at {where}: this rank ends"
        _said.append(message)  # to nobody: another attempt to reach the supervisor would only repeat the message
        raise SystemExit(f"[chainermn] rank {rank}: {message}") from None
    at_exit(Step.REPORT, _end)


def has_failed(status: int, summary: str) -> None:
    """Report why this rank does not reach the end of the script.

    Args:
        status: Its exit status.
        summary: The reason, in one line.
    """
    if not _said:
        _said.append(summary)
        _tell(op="failed", status=status, summary=_shortened(summary))


def job_ends() -> None:
    """Report that no rank continues: ranks that are still present are stopped or cut off."""
    _tell(op="over")


def leave(*, together: bool) -> None:
    """Record that an elastic rank has reached the end of the script.

    Args:
        together: Whether all remaining ranks have. Otherwise other ranks continue, and the training has not ended.
    """
    _together.append(together)


def _end() -> None:
    if _said:
        return
    if hasattr(sys, "last_type"):  # no code has handled it: Python has printed it
        has_failed(1, "uncaught exception")
    elif all(_together):
        _tell(op="finished", elastic=bool(_together))


def _shortened(text: str) -> str:
    """Return the beginning of a text, such that it fits in a message: JSON makes up to 12 bytes of a character."""
    ends = itertools.accumulate(len(json.dumps(character)) - len('""') for character in text[:_LONGEST_SUMMARY])
    return text[: sum(end <= _LONGEST_SUMMARY_BYTES for end in ends)]


def _tell(**message: Any) -> None:
    with contextlib.suppress(OSError):  # the keeper has ended, and so has the supervisor
        link.tell(**message)
