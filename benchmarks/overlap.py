"""How much of the communication the backward pass hides.

    python tools/cluster.py --hosts 1,1 --rate 1gbit -- python benchmarks/overlap.py

The model is a chain of linear layers with 16 MB of parameters. The mini-batch is chosen so that the forward and
backward pass take as long as averaging the gradients. The table shows the medians of the computation alone, the
communication alone, a training step that does one after the other, a step that overlaps them, and a double-buffered
step; and the last three relative to the longer of the first two.
"""

from __future__ import annotations

import argparse
import functools
import statistics
from collections.abc import Callable

import chainer
import chainer.functions as F
import chainer.links as L
import numpy as np
from common import interleave, keep, table, timed
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
    parser.add_argument("--network", default="", help="what to call the network in the figures")
    args = parser.parse_args()
    comm = create_communicator(args.communicator)
    variants = {
        "one after the other": mn_optim.AfterBackward(),
        "overlapped": mn_optim.DuringBackward(bucket_bytes=args.bucket_bytes),
        "double-buffered": mn_optim.OneStepLate(),
    }
    steps: dict[str, Callable[[np.ndarray], object]] = {}
    for name, when in variants.items():
        net = Net()
        optimizer = mn_optim.MultiNodeOptimizer(chainer.optimizers.SGD(0), comm, when).setup(net)
        steps[name] = lambda x, optimizer=optimizer, net=net: optimizer.update(net, x)
    alone = Net()

    def compute(x: np.ndarray) -> None:
        alone.cleargrads()
        alone(x).backward()

    steps = {"computation alone": compute, "communication alone": lambda x: comm.multi_node_mean_grad(alone), **steps}
    compute(np.ones((16, WIDTH), np.float32))
    x = batch_as_long_as(steps["communication alone"], compute)
    contestants = {name: lambda step=step: step(x) for name, step in steps.items()}
    # The first update broadcasts parameters, the second learns the order.
    seconds = interleave(contestants, args.rounds, warm_up=3)
    longer = max(seconds["computation alone"], seconds["communication alone"])
    megabytes = WIDTH * WIDTH * LAYERS * 4 / 1e6
    table(f"{WORLD.size} ranks, {megabytes:.0f} MB of gradients", seconds, {"the longer alone": longer})
    keep(args.json, benchmark="overlap", network=args.network, communicator=args.communicator, seconds=seconds)


def batch_as_long_as(communicate: Callable[[np.ndarray], object], compute: Callable[[np.ndarray], None]) -> np.ndarray:
    """Return a mini-batch whose forward and backward pass take about as long as the averaging, on every rank."""
    x = np.ones((64, WIDTH), np.float32)
    target = statistics.median(timed(lambda: communicate(x)) for _ in range(7))
    for _ in range(4):
        took = statistics.median(timed(functools.partial(compute, x)) for _ in range(3))
        x = np.ones((WORLD.bcast(max(16, int(len(x) * target / took))), WIDTH), np.float32)
    return x


if __name__ == "__main__":
    main()
