"""How much of the communication the backward pass hides.

    python tools/cluster.py --hosts 1,1 --rate 1gbit -- python benchmarks/overlap.py

A chain of linear layers, 16 MB of parameters, whose mini-batch is chosen so that its forward and backward pass take as
long as the averaging of its gradients. Printed are the medians of the computation alone, the communication alone, a
training step that does one after the other, one that overlaps them, and one that is double-buffered; and the last three
relative to the longer of the first two.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable
from pathlib import Path

import chainer
import chainer.functions as F
import chainer.links as L
import numpy as np
from mpi4py import MPI

import mn_optim
from mn_comm import create_communicator

WORLD = MPI.COMM_WORLD
WIDTH, LAYERS = 1024, 4


class Net(chainer.ChainList):
    """Linear layers, 4 MB each."""

    def __init__(self) -> None:
        super().__init__(*(L.Linear(WIDTH, WIDTH, nobias=True) for _ in range(LAYERS)))

    def forward(self, x: np.ndarray) -> chainer.Variable:
        """Return a loss."""
        for link in self:
            x = F.tanh(link(x))
        return F.sum(x)


def main() -> None:
    """Measure, and print a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--communicator", default="two_dimensional")
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--bucket-bytes", type=int, default=4 * 1024 * 1024)
    parser.add_argument("--json", default="", help="a file to add the figures to, as a line of JSON")
    args = parser.parse_args()
    comm = create_communicator(args.communicator)
    variants = {
        "one after the other": {},
        "overlapped": {"overlap": True, "bucket_bytes": args.bucket_bytes},
        "double-buffered": {"double_buffering": True},
    }
    steps: dict[str, Callable[[np.ndarray], object]] = {}
    for name, options in variants.items():
        net = Net()
        optimizer = mn_optim.create_multi_node_optimizer(chainer.optimizers.SGD(0), comm, **options).setup(net)
        steps[name] = lambda x, optimizer=optimizer, net=net: optimizer.update(net, x)
    alone = Net()

    def compute(x: np.ndarray) -> None:
        alone.cleargrads()
        alone(x).backward()

    steps = {"computation alone": compute, "communication alone": lambda x: comm.multi_node_mean_grad(alone), **steps}
    x = np.ones((16, WIDTH), np.float32)
    compute(x)
    x = batch_as_long_as(steps["communication alone"], compute)
    seconds: dict[str, list[float]] = {name: [] for name in steps}
    for round_ in range(args.rounds + 3):
        for name, step in steps.items():
            elapsed = timed(step, x)
            if round_ >= 3:  # the first update broadcasts, the second learns the order
                seconds[name].append(elapsed)
    if WORLD.rank == 0:
        report({name: statistics.median(each) for name, each in seconds.items()}, args.json)


def batch_as_long_as(communicate: Callable[[np.ndarray], object], compute: Callable[[np.ndarray], None]) -> np.ndarray:
    """Return a mini-batch whose forward and backward pass take about as long as the averaging, the same on every rank."""
    x = np.ones((64, WIDTH), np.float32)
    target = statistics.median(timed(communicate, x) for _ in range(5))
    for _ in range(4):
        took = statistics.median(timed(compute, x) for _ in range(3))
        rows = WORLD.bcast(max(16, int(len(x) * target / took)))
        x = np.ones((rows, WIDTH), np.float32)
    return x


def timed(step: Callable[[np.ndarray], object], x: np.ndarray) -> float:
    """Return the seconds that a step takes until all ranks are done."""
    WORLD.Barrier()
    begin = time.perf_counter()
    step(x)
    WORLD.Barrier()
    return time.perf_counter() - begin


def report(seconds: dict[str, float], json_file: str) -> None:
    """Print the table, and add it to a file."""
    longer = max(seconds["computation alone"], seconds["communication alone"])
    print(f"\n{WORLD.size} ranks, {WIDTH * WIDTH * LAYERS * 4 / 1e6:.0f} MB of gradients")
    print(f"{'':24}{'ms':>10}{'/ the longer alone':>20}")
    for name, s in seconds.items():
        print(f"{name:24}{s * 1e3:10.1f}{s / longer:20.2f}")
    if json_file:
        with Path(json_file).open("a") as lines:
            lines.write(json.dumps({"ranks": WORLD.size, "seconds": seconds}) + "\n")


if __name__ == "__main__":
    main()
