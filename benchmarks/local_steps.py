"""The cost of a straggler: steps per second of the other ranks, beside a rank that is sometimes three times slower.

    mpiexec -n 4 python benchmarks/local_steps.py

A step consists of 20 ms of computation, which leaves the core idle as a GPU's computation does, and an update of a
small model. The last rank's computation takes three times as long in random periods of one or two seconds, about half
of the time. Each scheme runs for some seconds with and without the straggler, in turn. The table shows the medians of
the other ranks' steps per second.
"""

from __future__ import annotations

import argparse
import statistics
import time
from typing import Any

import chainer
import numpy as np
from common import WORLD, keep

import mn_optim
from mn_comm import create_communicator

SCHEMES: dict[str, mn_optim.When] = {
    "synchronous": mn_optim.AfterBackward(),
    "local SGD, H = 8": mn_optim.LocalSGD(8),
    "asynchronous": mn_optim.Asynchronous(),
}
COMPUTATION_SECONDS = 0.02
TIMES_SLOWER = 3


class Net(chainer.Link):
    """Parameters of 4 MB."""

    def __init__(self) -> None:
        super().__init__()
        with self.init_scope():
            self.w = chainer.Parameter(np.zeros((1024, 1024), np.float32))


def slow_periods(seed: int) -> list[float]:
    """Return the times in seconds at which the straggler becomes slow, normal, slow, and so on."""
    return np.cumsum(np.random.RandomState(seed).uniform(1, 2, 100)).tolist()  # type: ignore[no-any-return]


def train(when: mn_optim.When, comm: Any, seconds: float, has_straggler: bool, seed: int) -> float:
    """Return how many steps per second this rank takes."""
    optimizer = mn_optim.MultiNodeOptimizer(chainer.optimizers.SGD(lr=0.01), comm, when).setup(Net())
    gradient = np.full((1024, 1024), comm.rank, np.float32)
    for _ in range(3):
        optimizer.target.w.grad = gradient
        optimizer.update()
    optimizer.synchronize()
    straggles = has_straggler and comm.rank == comm.size - 1
    periods = slow_periods(seed)
    WORLD.Barrier()
    begin, steps = time.perf_counter(), 0
    while not is_over(when, begin, seconds):
        is_slow = straggles and np.searchsorted(periods, time.perf_counter() - begin) % 2 == 0
        time.sleep(COMPUTATION_SECONDS * (TIMES_SLOWER if is_slow else 1))
        optimizer.target.w.grad = gradient.copy()
        optimizer.update()
        steps += 1
    elapsed = time.perf_counter() - begin
    optimizer.synchronize()
    return steps / elapsed


def is_over(when: mn_optim.When, begin: float, seconds: float) -> bool:
    """Return whether the time is over: on all ranks together if they average gradients in every step."""
    mine = time.perf_counter() - begin > seconds
    return mine if not isinstance(when, mn_optim.AfterBackward) else bool(WORLD.allreduce(mine, op=max))


def main() -> None:
    """Measure, and print a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--communicator", default="two_dimensional")
    parser.add_argument("--seconds", type=float, default=8)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--json", default="", help="a file to add the figures to, as a line of JSON")
    parser.add_argument("--network", default="", help="what to call the network in the figures")
    args = parser.parse_args()
    comm = create_communicator(args.communicator)
    found: dict[tuple[str, bool], list[float]] = {}
    for seed in range(args.rounds):
        for name, when in SCHEMES.items():
            for has_straggler in (False, True):
                rates = comm.allgather_obj(train(when, comm, args.seconds, has_straggler, seed))
                found.setdefault((name, has_straggler), []).append(statistics.mean(rates[:-1]))
    medians = {key: statistics.median(rates) for key, rates in found.items()}
    if WORLD.rank:
        return
    print(f"\n{WORLD.size} ranks, one of which is {TIMES_SLOWER} times slower at times: steps a second of the others")
    print(f"{'':20}{'without':>10}{'with':>10}{'ratio':>10}")
    for name in SCHEMES:
        without, beside = medians[name, False], medians[name, True]
        print(f"{name:20}{without:10.1f}{beside:10.1f}{beside / without:10.2f}")
    words = {False: "", True: ", beside the straggler"}
    seconds = {name + words[has_straggler]: 1 / rate for (name, has_straggler), rate in medians.items()}
    keep(args.json, benchmark="straggler", network=args.network, seconds=seconds)


if __name__ == "__main__":
    main()
