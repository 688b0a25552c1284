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

# The tags of all messages about the timeline.
PING, PONG, GO, HELLO, EVENTS, GAVE_UP = range(1, 7)

_ROUNDS = 20


class Sample(NamedTuple):
    """One comparison of two clocks, all in nanoseconds.

    Attributes:
        at: The time of the comparison by the other rank's clock.
        offset: By how much that clock is ahead of rank 0's.
        error: The maximum error of ``offset``, in either direction.
    """

    at: int
    offset: int
    error: int


def best_of(answers: Sequence[tuple[int, int, int]]) -> Sample:
    """Return the result of the answer with the shortest round trip.

    Args:
        answers: For each, the time of the question, the time in the answer (by the other clock), and the time of
            arrival.
    """
    asked, read, came = min(answers, key=lambda answer: answer[2] - answer[0])
    return Sample(at=read, offset=read - (asked + came) // 2, error=(came - asked + 1) // 2)


def offset_at(samples: Sequence[Sample], at: int) -> int:
    """Return by how many nanoseconds a clock is ahead at a time that it shows, from one sample or two."""
    first, last = samples[0], samples[-1]
    if last.at == first.at:
        return first.offset
    return first.offset + (last.offset - first.offset) * (at - first.at) // (last.at - first.at)


def measure(mpi_comm: MPI.Intracomm, rank: int, seconds: float) -> Sample | None:
    """Compare this rank's clock with the clock of another rank, which calls :func:`reply`.

    Args:
        mpi_comm: A communicator that is used for nothing else.
        rank: The other rank.
        seconds: How long to wait for it.

    Returns:
        The sample, or ``None`` if the other rank has not answered.
    """
    deadline = time.monotonic() + seconds
    answer = np.zeros(1, np.int64)
    answers: list[tuple[int, int, int]] = []
    for _ in range(_ROUNDS):
        asked = time.perf_counter_ns()
        is_asked = send(mpi_comm, np.zeros(1, np.int64), rank, PING, deadline)
        if not is_asked or receive(mpi_comm, answer, rank, PONG, deadline) is None:
            break
        answers.append((asked, int(answer[0]), time.perf_counter_ns()))
    return best_of(answers) if answers else None


def tell(mpi_comm: MPI.Intracomm, rank: int, sample: Sample | None, seconds: float) -> bool:
    """End the :func:`reply` of another rank by sending the result; return whether it was sent in time."""
    return send(mpi_comm, np.array(sample or (0, 0, -1), np.int64), rank, GO, time.monotonic() + seconds)


def reply(mpi_comm: MPI.Intracomm, seconds: float) -> list[Sample] | None:
    """Answer rank 0's questions about the time until it sends the result.

    Args:
        mpi_comm: A communicator that is used for nothing else.
        seconds: How long to wait for each message.

    Returns:
        The sample, in a list, which is empty if rank 0 has none; or ``None`` if rank 0 has stopped sending messages.
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
    """Send a message, and return whether it was sent in time.

    Args:
        mpi_comm: The communicator.
        buffer: The data.
        dest: The receiver.
        tag: The tag.
        deadline: The deadline, by ``time.monotonic()``.
    """
    return _completes(mpi_comm.Isend(buffer, dest, tag), deadline)


def receive(mpi_comm: MPI.Intracomm, buffer: Any, source: int, tag: int, deadline: float) -> int | None:
    """Receive a message, if it arrives in time.

    Args:
        mpi_comm: The communicator.
        buffer: Memory for the data.
        source: The sender.
        tag: The tag; may be any tag.
        deadline: The deadline, by ``time.monotonic()``.

    Returns:
        Its tag, or ``None`` if no message has arrived.
    """
    status = MPI.Status()
    request = mpi_comm.Irecv(buffer, source, tag)
    if _completes(request, deadline, status):
        return status.tag
    request.Cancel()
    request.Wait(status)
    return None if status.Is_cancelled() else status.tag


def _completes(request: MPI.Request, deadline: float, status: MPI.Status | None = None) -> bool:
    while not request.Test(status):
        if time.monotonic() > deadline:
            return False
        os.sched_yield()  # there may be more ranks than cores, and the other rank may wait for this rank's core
    return True
