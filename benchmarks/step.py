"""Whole training steps, and the cost of the check that all ranks have the same gradients.

    mpiexec -n 2 python benchmarks/step.py

The MLP of the MNIST example (784-1000-1000-10) with mini-batches of 100. It measures a step on one process alone, with
our communicators, and with the ChainerMN inside Chainer's wheel; and the check alone.
"""

from __future__ import annotations

import os

os.environ["CHAINERMN_IMPL"] = "bundled"  # ours is imported under the names mn_comm and mn_optim

import argparse
from collections.abc import Callable
from typing import Any

import chainer
import chainer.functions as F
import chainer.links as L
import chainermn
import numpy as np
from common import interleave, keep, table
from mpi4py import MPI

import mn_comm
import mn_optim
from mn_comm.building_blocks import Ranks
from mn_comm.gradients.agree import Agreement, select
from mn_comm.gradients.signature import Signature, signature_of

WORLD = MPI.COMM_WORLD


class MLP(chainer.Chain):
    """The network of the MNIST example."""

    def __init__(self) -> None:
        super().__init__(l1=L.Linear(784, 1000), l2=L.Linear(1000, 1000), l3=L.Linear(1000, 10))

    def forward(self, x: np.ndarray) -> chainer.Variable:
        """Return the scores of each class for each image."""
        return self.l3(F.relu(self.l2(F.relu(self.l1(x)))))


def main() -> None:
    """Measure, and print a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=50)
    parser.add_argument("--json", default="", help="a file to add the figures to, as a line of JSON")
    args = parser.parse_args()
    random = np.random.RandomState(WORLD.rank)
    x, t = random.rand(100, 784).astype(np.float32), random.randint(0, 10, 100).astype(np.int32)
    contestants: dict[str, Callable[[], Any]] = {}

    def add(name: str, wrap: Callable[[chainer.Optimizer], Any]) -> chainer.Link:
        model = L.Classifier(MLP())
        optimizer = wrap(chainer.optimizers.Adam())
        optimizer.setup(model)
        contestants[name] = lambda: optimizer.update(model, x, t)
        return model

    add("one process alone", lambda optimizer: optimizer)
    for name in ("naive", "hierarchical", "two_dimensional"):
        comm = mn_comm.create_communicator(name)
        model = add(f"ours, {name}", lambda o, comm=comm: mn_optim.create_multi_node_optimizer(o, comm))
    bundled = chainermn.create_communicator("naive")
    add("bundled naive", lambda optimizer: chainermn.create_multi_node_optimizer(optimizer, bundled))

    agreement = Agreement(Ranks(WORLD), "check")
    latest: Signature = ()

    def check() -> None:
        nonlocal latest
        selection = select(model, zero_fill=False)
        signature = signature_of(
            (name, like) for (name, _), like in zip(selection.params, selection.likes, strict=True)
        )
        latest = latest if signature == latest else signature  # like a reducer: the same object every time
        agreement.check(latest)

    contestants["the check alone"] = check
    seconds = interleave(contestants, args.rounds, warm_up=3)
    table(f"a step of the MLP, {WORLD.size} ranks", seconds, {"bundled naive": seconds["bundled naive"]})
    if WORLD.rank == 0:
        share = seconds["the check alone"] / seconds["ours, two_dimensional"]
        print(f"the check is {100 * share:.2f} % of a step with two_dimensional")
    keep(args.json, benchmark="step", seconds=seconds)


if __name__ == "__main__":
    main()
