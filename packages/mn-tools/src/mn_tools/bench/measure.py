"""Timing: contestants take turns, a round counts on its slowest rank, and the result is the median of the rounds."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import numpy as np
from mpi4py import MPI

__all__ = ["Turn", "allowed_rounds", "interleave", "one_round", "preferred", "repeats", "slowest"]

_T = TypeVar("_T")

Contestants = Mapping[str, Callable[[], object]]

_AS_FAST = 1.1  # a contestant that is slower by less than this may be faster the next time
_SECONDS_PER_SIZE = 10.0
_LEAST_ROUNDS = 3
# The resolution of the clock and the end of a barrier take as long as a short operation, so many are timed together.
_BYTES_TOGETHER = 256 * 1024
_MOST_TOGETHER = 50


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


def interleave(mpi_comm: MPI.Intracomm, contestants: Contestants, rounds: int, together: int) -> dict[str, list[float]]:
    """Run all contestants in turn, round after round, after one round that is not counted; collective.

    Args:
        mpi_comm: The ranks; each contestant is collective over them.
        contestants: The functions to time, by name, in the same order on every rank.
        rounds: The maximum number of rounds; fewer if the first round shows that they would take long.
        together: How many runs are timed together.

    Returns:
        For each contestant, the seconds of one run in each round, on the slowest rank; the same on every rank.
    """
    turns = [Turn(run) for run in contestants.values()]
    repeated = [together] * len(turns)
    warm_up = one_round(mpi_comm, turns, repeated)
    longest = mpi_comm.allreduce(sum(warm_up) * together, MPI.MAX)
    mine = [one_round(mpi_comm, turns, repeated) for _ in range(allowed_rounds(rounds, longest))]
    return dict(zip(contestants, slowest(mpi_comm, mine), strict=True))


def allowed_rounds(rounds: int, seconds: float) -> int:
    """Return how many rounds of this many seconds to run, if ``rounds`` are requested."""
    if seconds * rounds <= _SECONDS_PER_SIZE:
        return rounds
    return min(rounds, max(_LEAST_ROUNDS, int(_SECONDS_PER_SIZE / seconds)))


def slowest(mpi_comm: MPI.Intracomm, rounds: list[list[float]]) -> list[list[float]]:
    """Return, for each contestant, the seconds of each round on the slowest rank; collective.

    Args:
        mpi_comm: The ranks.
        rounds: For each round, this rank's seconds for each contestant.
    """
    seconds: np.ndarray[Any, Any] = np.array(rounds, dtype=np.float64).T.copy()
    mpi_comm.Allreduce(MPI.IN_PLACE, seconds, MPI.MAX)
    each: list[list[float]] = seconds.tolist()
    return each


def one_round(mpi_comm: MPI.Intracomm, turns: Iterable[Turn], together: Iterable[int]) -> list[float]:
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
    return min((each for each in contestants if seconds(each) <= fastest * _AS_FAST), key=preference)
