"""Shared by the benchmarks: timing between barriers, contestants in turn, tables, saved figures."""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from mpi4py import MPI

__all__ = ["busy_processes", "interleave", "keep", "settle", "table", "timed"]

WORLD = MPI.COMM_WORLD
# By then, each choice of mn_comm.gradients.share_size has been tried three times, if there is any doubt.
AVERAGES_TO_SETTLE = 30
# It ends with its parent, however the parent ends.
BURN = "import os, sys\nwhile os.getppid() == int(sys.argv[1]): sum(range(100_000))"


def timed(run: Callable[[], object]) -> float:
    """Return the seconds from a common start of all ranks until all of them have finished."""
    WORLD.Barrier()
    begin = time.perf_counter()
    run()
    WORLD.Barrier()
    return time.perf_counter() - begin


def interleave(
    contestants: Mapping[str, Callable[[], object]],
    rounds: int,
    *,
    prepare: Callable[[str], object] = lambda name: None,
    warm_up: int = 1,
) -> dict[str, float]:
    """Run all contestants in turn, round after round, so that other load on the machine affects them equally.

    Args:
        contestants: The functions to time, by name; each is collective.
        rounds: The number of rounds.
        prepare: Called with a contestant's name before each of its runs, outside the timing.
        warm_up: How many rounds to run before the timing begins.

    Returns:
        The median seconds of each contestant.
    """
    seconds: dict[str, list[float]] = {name: [] for name in contestants}
    for round_ in range(warm_up + rounds):
        for name, run in contestants.items():
            prepare(name)
            elapsed = timed(run)
            if round_ >= warm_up:
                seconds[name].append(elapsed)
    return {name: statistics.median(each) for name, each in seconds.items()}


def settle(comm: Any, model: Any, prepare: Callable[[], object]) -> None:
    """Average gradients until a communicator has chosen how often its ranks meet, if it has a choice; collective.

    Args:
        comm: The communicator.
        model: The model with the gradients; the choice is made for each model.
        prepare: Called before each average.
    """
    if comm.size > 1 and comm.inter_size == 1 and comm.strategy not in ("naive", "flat"):
        for _ in range(AVERAGES_TO_SETTLE):
            prepare()
            comm.multi_node_mean_grad(model)


@contextmanager
def busy_processes(number: int) -> Iterator[None]:
    """Run processes that only keep a core busy beside rank 0, on its host and with its priority."""
    started: list[subprocess.Popen[bytes]] = []
    try:
        for _ in range(number if WORLD.rank == 0 else 0):
            command = [sys.executable, "-S", "-c", BURN, str(os.getpid())]
            started.append(subprocess.Popen(command, stdin=subprocess.DEVNULL))
        yield
    finally:
        for process in started:
            process.kill()
            process.wait()


def table(title: str, seconds: Mapping[str, float], bases: Mapping[str, float]) -> None:
    """Print, on rank 0, the milliseconds of each contestant, and their ratios to some reference contestants."""
    if WORLD.rank:
        return
    print(f"\n{title}")
    print(f"{'':34}{'ms':>10}" + "".join(f"{'/ ' + base:>24}" for base in bases))
    for name, s in sorted(seconds.items(), key=lambda item: item[1]):
        print(f"{name:34}{s * 1e3:10.2f}" + "".join(f"{s / base:24.2f}" for base in bases.values()))


def keep(file: str, **figures: Any) -> None:
    """Append figures to a file, on rank 0, as a line of JSON; do nothing if no file is given."""
    if file and WORLD.rank == 0:
        with Path(file).open("a") as lines:
            lines.write(json.dumps({"ranks": WORLD.size, **figures}) + "\n")
