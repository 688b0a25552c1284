"""The cost of a timeline.

    mpiexec -n 2 python benchmarks/timeline.py

It runs training steps of the same network, in turn, with an optimizer that records a timeline and with one that does
not. It prints the median ratio of consecutive steps, and the ratio that is expected from the number of spans in a step
and the time of one span. ``none`` against ``none`` shows how far the ratio of equal steps is from 1 on this machine.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable

import chainer
import chainer.functions as F
import chainer.links as L
import numpy as np
from common import timed
from mpi4py import MPI

import mn_optim
from mn_comm import create_communicator, span
from mn_comm.ranks.spans import record
from mn_tools.timeline import Recorder

WORLD = MPI.COMM_WORLD
SCHEMES = {
    "plain": mn_optim.AfterBackward(),
    "overlap": mn_optim.DuringBackward(bucket_bytes=1 << 20),
    "double": mn_optim.OneStepLate(),
}


class Net(chainer.ChainList):
    """Linear layers of equal width."""

    def __init__(self, width: int, layers: int) -> None:
        super().__init__(*(L.Linear(width, width) for _ in range(layers)))

    def forward(self, x: np.ndarray) -> chainer.Variable:
        """Return a loss."""
        for link in self:
            x = F.relu(link(x))
        return F.sum(x)


def main() -> None:
    """Measure each scheme, and print a line for it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--communicator", default="hierarchical")
    parser.add_argument("--steps", type=int, default=200, help="how many pairs of steps")
    parser.add_argument("--width", type=int, default=512)
    parser.add_argument("--layers", type=int, default=6)
    parser.add_argument("--batch", type=int, default=128)
    args = parser.parse_args()
    comm = create_communicator(args.communicator)
    x = np.ones((args.batch, args.width), np.float32)
    recorder = Recorder(most=10**7)
    if WORLD.rank == 0:
        print(f"{WORLD.size} ranks; one span takes {span_seconds() * 1e6:.2f} µs")
        print(f"{'':10}{'step, ms':>10}{'spans':>8}{'expected':>10}{'measured':>10}{'none / none':>13}")
    for scheme, when in SCHEMES.items():
        steps = [
            make_step(comm, x, args, when, recording) for recording in (None, recorder, None)
        ]  # the third shows how much equal steps differ
        for step in steps * 3:
            step()  # broadcast, learn the order, fill the buffers
        seconds, spans = measure(steps, recorder, args.steps)
        if WORLD.rank == 0:
            off, on, again = seconds
            middle = statistics.median(off)
            print(
                f"{scheme:10}{middle * 1e3:10.2f}{spans:8.1f}{1 + spans * span_seconds() / middle:10.4f}"
                f"{ratio(on, off):10.4f}{ratio(again, off):13.4f}"
            )


def make_step(
    comm: object, x: np.ndarray, args: argparse.Namespace, when: mn_optim.When, recording: Recorder | None
) -> Callable[[], None]:
    """Return a training step that records a timeline, or does not."""
    record(recording)
    net = Net(args.width, args.layers)
    optimizer = mn_optim.MultiNodeOptimizer(chainer.optimizers.SGD(0), comm, when).setup(net)

    def step() -> None:
        record(recording)
        optimizer.update(net, x)

    return step


def measure(steps: list[Callable[[], None]], recorder: Recorder, pairs: int) -> tuple[list[list[float]], float]:
    """Return the seconds of each step per round, on the slowest rank, and the spans in a recording step."""
    recorder.events.clear()
    mine = np.empty((len(steps), pairs))
    for i in range(pairs):
        order = range(len(steps)) if i % 2 else reversed(range(len(steps)))
        for k in order:
            mine[k, i] = timed(steps[k])
    WORLD.Allreduce(MPI.IN_PLACE, mine, MPI.MAX)
    return mine.tolist(), len(recorder.events) / pairs


def ratio(one: list[float], other: list[float]) -> float:
    """Return the median ratio of consecutive steps."""
    return statistics.median(a / b for a, b in zip(one, other, strict=True))


def span_seconds() -> float:
    """Return the time to record one span."""
    record(Recorder(most=10**7))
    best = float("inf")
    for _ in range(20):
        begin = time.perf_counter()
        for _ in range(1000):
            with span("x"):
                pass
        best = min(best, time.perf_counter() - begin)
    record(None)
    return best / 1000


if __name__ == "__main__":
    main()
