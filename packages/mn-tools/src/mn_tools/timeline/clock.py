"""The difference between a rank's clock and that of rank 0.

Rank 0 asks for the time repeatedly, and uses the answer with the shortest round trip: the clock was read at some time
between the question and the answer, so assuming the middle is wrong by at most half of the round trip (F. Cristian,
"Probabilistic clock synchronization", Distributed Computing 3, 1989, section 4).
"""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
from mpi4py import MPI

__all__ = [
    "EVENTS",
    "GAVE_UP",
    "HELLO",
    "Sample",
    "best_of",
    "measure",
    "offset_at",
    "receive",
    "reply",
    "send",
    "tell",
]

# The tags of all messages about the timeline.
PING, PONG, GO, HELLO, EVENTS, GAVE_UP = range(1, 7)

_ROUNDS = 20


class Sample(NamedTuple):
    """One comparison of two clocks, all in nanoseconds.

    Attributes:
        at: When it was made, by the other rank's clock.
        offset: By how much that clock is ahead of rank 0's.
        error: By how much ``offset`` may be wrong, either way.
    """

    at: int
    offset: int
    error: int


def best_of(answers: Sequence[tuple[int, int, int]]) -> Sample:
    """Return what the answer with the shortest round trip tells.

    Args:
        answers: For each the time of the question, that of the answer by the other clock, and that of its arrival.
    """
    asked, read, came = min(answers, key=lambda answer: answer[2] - answer[0])
    return Sample(at=read, offset=read - (asked + came) // 2, error=(came - asked + 1) // 2)


def offset_at(samples: Sequence[Sample], at: int) -> float:
    """Return by how many nanoseconds a clock is ahead at a time that it shows, given one sample or two."""
    first, last = samples[0], samples[-1]
    if last.at == first.at:
        return first.offset
    return first.offset + (last.offset - first.offset) * (at - first.at) / (last.at - first.at)


def measure(mpi_comm: MPI.Intracomm, rank: int, seconds: float) -> Sample | None:
    """Compare this rank's clock with that of another, which is in :func:`reply`.

    Args:
        mpi_comm: A communicator that is used for nothing else.
        rank: The other.
        seconds: How long to wait for it.

    Returns:
        What came out, or ``None`` if it has not answered once.
    """
    deadline = time.monotonic() + seconds
    answer = np.zeros(1, np.int64)
    answers: list[tuple[int, int, int]] = []
    for _ in range(_ROUNDS):
        asked = time.perf_counter_ns()
        if not send(mpi_comm, np.zeros(1, np.int64), rank, PING, deadline):
            break
        if receive(mpi_comm, answer, rank, PONG, deadline) is None:
            break
        answers.append((asked, int(answer[0]), time.perf_counter_ns()))
    return best_of(answers) if answers else None


def tell(mpi_comm: MPI.Intracomm, rank: int, sample: Sample | None, seconds: float) -> bool:
    """End the :func:`reply` of another rank, and let it know what came out; return whether it was sent in time."""
    return send(mpi_comm, np.array(sample or (0, 0, -1), np.int64), rank, GO, time.monotonic() + seconds)


def reply(mpi_comm: MPI.Intracomm, seconds: float) -> list[Sample] | None:
    """Answer rank 0's questions for the time until it tells what came out.

    Args:
        mpi_comm: A communicator that is used for nothing else.
        seconds: How long to wait for each.

    Returns:
        The sample, in a list, which is empty if rank 0 has none; or ``None`` if rank 0 does not speak any more.
    """
    message = np.zeros(3, np.int64)
    while True:
        deadline = time.monotonic() + seconds
        tag = receive(mpi_comm, message, 0, MPI.ANY_TAG, deadline)
        if tag == GO:
            at, offset, error = message.tolist()
            return [Sample(at, offset, error)] if error >= 0 else []
        if tag != PING or not send(mpi_comm, np.array([time.perf_counter_ns()]), 0, PONG, deadline):
            return None


def send(mpi_comm: MPI.Intracomm, buffer: Any, dest: int, tag: int, deadline: float) -> bool:
    """Send a message, and return whether it left in time.

    Args:
        mpi_comm: The communicator.
        buffer: What to send.
        dest: To whom.
        tag: As what.
        deadline: Until when, by ``time.monotonic()``.
    """
    request = mpi_comm.Isend(buffer, dest, tag)
    while not request.Test():
        if time.monotonic() > deadline:
            return False
        os.sched_yield()
    return True


def receive(mpi_comm: MPI.Intracomm, buffer: Any, source: int, tag: int, deadline: float) -> int | None:
    """Receive a message, if it comes in time.

    Args:
        mpi_comm: The communicator.
        buffer: Where to.
        source: From whom.
        tag: Which; may be any.
        deadline: Until when, by ``time.monotonic()``.

    Returns:
        Its tag, or ``None`` if none has come.
    """
    status = MPI.Status()
    request = mpi_comm.Irecv(buffer, source, tag)
    while not request.Test(status):
        if time.monotonic() > deadline:
            request.Cancel()
            request.Wait(status)
            return None if status.Is_cancelled() else status.tag
        os.sched_yield()  # there may be more ranks than cores, and the one that is to answer may wait for this one's
    return status.tag
