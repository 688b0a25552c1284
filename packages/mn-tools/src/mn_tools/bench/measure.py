"""Timing: contestants take turns, a round counts on its slowest rank, and the result is the median of the rounds."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from statistics import median
from typing import Any

import numpy as np
from mpi4py import MPI

__all__ = ["allowed_rounds", "interleave", "per_call", "repeats", "slowest"]

Contestants = Mapping[str, Callable[[], object]]

_SECONDS_PER_SIZE = 10.0
_LEAST_ROUNDS = 3
# The resolution of the clock and the end of a barrier take as long as a short operation, so many are timed together.
_BYTES_TOGETHER = 256 * 1024
_MOST_TOGETHER = 50


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
    warm_up = _one_round(mpi_comm, contestants, together)
    longest = mpi_comm.allreduce(sum(warm_up) * together, MPI.MAX)
    mine = [_one_round(mpi_comm, contestants, together) for _ in range(allowed_rounds(rounds, longest))]
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


def per_call(mpi_comm: MPI.Intracomm, run: Callable[[], object], rounds: int, together: int) -> float:
    """Return the median seconds of one run, on the slowest rank; collective."""
    return median(interleave(mpi_comm, {"": run}, rounds, together)[""])


def _one_round(mpi_comm: MPI.Intracomm, contestants: Contestants, together: int) -> list[float]:
    seconds = []
    for run in contestants.values():
        mpi_comm.Barrier()
        begin = time.perf_counter()
        for _ in range(together):
            run()
        seconds.append((time.perf_counter() - begin) / together)
    return seconds
