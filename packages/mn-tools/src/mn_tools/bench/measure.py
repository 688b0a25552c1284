"""Timing: contestants take turns, a round counts on its slowest rank, and the result is the median of the rounds."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import numpy as np
from mpi4py import MPI

_T = TypeVar("_T")

AS_FAST = 1.1  # a contestant that is slower by less than this may be faster the next time
# The resolution of the clock and the end of a barrier take as long as a short operation, so many are timed together.
_BYTES_TOGETHER = 256 * 1024
_MOST_TOGETHER = 50
_TURN_SECONDS = 0.15
_MOST_IN_A_TURN = 20


@dataclass(frozen=True)
class Turn:
    """What is timed: a function, with what has to happen before and after it.

    Attributes:
        run: The function.
        before: Called before.
        after: Called after.
    """

    run: Callable[[], object]
    before: Callable[[], object] = lambda: None
    after: Callable[[], object] = lambda: None


def repeats(nbytes: int) -> int:
    """Return how many operations of this size are timed together."""
    return max(1, min(_MOST_TOGETHER, _BYTES_TOGETHER // nbytes))


def take_turns(
    mpi_comm: MPI.Intracomm, turns: Mapping[str, Turn], rounds: int, end: float, *, least: int = 2, together: int = 0
) -> dict[str, list[float]]:
    """Let contestants take turns, round after round, after one that is not counted; collective.

    Args:
        mpi_comm: The ranks; each contestant is collective over them.
        turns: The contestants, in the same order on every rank.
        rounds: The maximum number of rounds.
        end: When to stop on rank 0's ``time.perf_counter()``.
        least: How many rounds to run, even if the time is over.
        together: How many runs are timed together; by default, as many as take 0.15 seconds, at most 20.

    Returns:
        For each contestant, the seconds of one run in each round, on the slowest rank; the same on every rank.
    """
    repeated = [together or 1] * len(turns)
    first = _slowest(mpi_comm, [_one_round(mpi_comm, turns.values(), repeated)])
    if not together:
        repeated = [max(1, min(_MOST_IN_A_TURN, int(_TURN_SECONDS / max(each[0], 1e-9)))) for each in first]
    mine: list[list[float]] = []
    while len(mine) < rounds and (len(mine) < least or mpi_comm.bcast(time.perf_counter() < end)):
        mine.append(_one_round(mpi_comm, turns.values(), repeated))
    return dict(zip(turns, _slowest(mpi_comm, mine), strict=True))


def _slowest(mpi_comm: MPI.Intracomm, rounds: list[list[float]]) -> list[list[float]]:
    """Return, for each contestant, the seconds of each round on the slowest rank; collective.

    Args:
        mpi_comm: The ranks.
        rounds: For each round, this rank's seconds for each contestant.
    """
    seconds: np.ndarray[Any, Any] = np.array(rounds, dtype=np.float64).T.copy()
    mpi_comm.Allreduce(MPI.IN_PLACE, seconds, MPI.MAX)
    each: list[list[float]] = seconds.tolist()
    return each


def _one_round(mpi_comm: MPI.Intracomm, turns: Iterable[Turn], together: Iterable[int]) -> list[float]:
    """Let contestants take a turn each; collective.

    Args:
        mpi_comm: The ranks.
        turns: The contestants, in the same order on every rank.
        together: How many runs of each are timed together.

    Returns:
        The seconds of one run of each, on this rank.
    """
    seconds = []
    for turn, times in zip(turns, together, strict=True):
        turn.before()
        mpi_comm.Barrier()
        begin = time.perf_counter()
        for _ in range(times):
            turn.run()
        seconds.append((time.perf_counter() - begin) / times)
        turn.after()
    return seconds


def preferred(contestants: Sequence[_T], seconds: Callable[[_T], float], preference: Callable[[_T], Any]) -> _T:
    """Return the one to choose among those that are about as fast as the fastest.

    Args:
        contestants: At least one.
        seconds: Returns the time of one.
        preference: A sort key; the smallest one is preferred.
    """
    fastest = min(map(seconds, contestants))
    return min((each for each in contestants if seconds(each) <= fastest * AS_FAST), key=preference)
