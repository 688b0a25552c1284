"""The cost of a commit of an elastic communicator while no rank dies.

    mpiexec --with-ft ulfm -n 2 python benchmarks/commit.py [--json figures.jsonl]

A commit is one vote of all ranks at the end of a step. The contestants, in turn, are: averages with an elastic and with
an ordinary communicator, over arrays of 4 KB and of 25 MB; and a vote alone, of ranks that have just met. The cost of a
commit is the median difference between two averages, one with a vote and one without.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from typing import Any

from common import keep, settle
from models import make_model
from mpi4py import MPI

import mn_comm

WORLD = MPI.COMM_WORLD
SIZES = {"4 KB": 1_000, "25 MB": 6_250_000}
MOST_ROUNDS = {"4 KB": 3_000, "25 MB": 400}
GROUP = 10  # calls that are timed together: as in training, a rank may be ahead of the others between two of them


def main() -> None:
    """Measure, and print a table on rank 0."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--strategy", default="two_dimensional")
    parser.add_argument("--part", type=float, default=1.0, help="which part of the rounds to run")
    parser.add_argument("--json", default="", help="a file to add the figures to, as lines of JSON")
    args = parser.parse_args()
    elastic = mn_comm.create_communicator(args.strategy, elastic=True)
    ordinary = mn_comm.create_communicator(args.strategy)
    vote = alone(lambda: elastic.transact(lambda: None), int(10_000 * args.part))
    show("a vote alone", vote)
    keep(args.json, benchmark="commit", what="a vote alone", strategy=args.strategy, seconds=vote)
    for name, length in SIZES.items():
        rounds = max(GROUP, int(MOST_ROUNDS[name] * args.part))
        model = make_model([(length,)])
        model.zerograds()
        without, added = beside(elastic, ordinary, model, rounds)
        show(f"an average of {name}", without)
        show(f"what a commit adds to it ({100 * added / without:.2f} %)", added)
        figures = {"seconds": {"without": without, "added": added}}
        keep(args.json, benchmark="commit", what=name, strategy=args.strategy, **figures)


def alone(run: Callable[[], object], rounds: int) -> float:
    """Return the median seconds of a collective function, over groups of calls."""
    return statistics.median(of_a_group(run) for _ in range(rounds // GROUP))


def of_a_group(run: Callable[[], object]) -> float:
    """Return the mean seconds of a collective function, over a group of calls."""
    WORLD.Barrier()
    began = time.perf_counter()
    for _ in range(GROUP):
        run()
    return (time.perf_counter() - began) / GROUP


def beside(
    elastic: mn_comm.Communicator, ordinary: mn_comm.Communicator, model: Any, rounds: int
) -> tuple[float, float]:
    """Return the median seconds of an average without a vote, and of the time that a vote adds.

    Both average in the same way: :meth:`transact` calls the ordinary communicator's average.
    """
    settle(ordinary, model, lambda: None)

    def average() -> None:
        ordinary.multi_node_mean_grad(model)

    def commit() -> None:
        elastic.transact(average)

    without, added = [], []
    for number in range(rounds // GROUP):
        times = {run: of_a_group(run) for run in ((average, commit) if number % 2 else (commit, average))}
        without.append(times[average])
        added.append(times[commit] - times[average])
    return statistics.median(without), statistics.median(added)


def show(what: str, seconds: float) -> None:
    """Print a line on rank 0."""
    if WORLD.rank == 0:
        print(f"{WORLD.size} ranks  {what:48} {1e6 * seconds:12.2f} us", flush=True)


if __name__ == "__main__":
    main()
