"""The picture of PerformanceReporter: a training in which rank 1 becomes slower.

    mpiexec -n 2 python docs/pictures/performance.py docs/pictures/performance.png

It takes half a minute.
"""

import sys
import time
from typing import Any

import chainer
import chainer.links as L
import chainermn
import numpy as np
from chainer.training import StandardUpdater, Trainer, extensions
from matplotlib.figure import Figure

EPOCHS, STEPS, LATER = 20, 20, 0.02
TITLES = {
    "samples_per_second": "samples per second",
    "communication": "share of communication",
    "lag": "lag of the slowest rank, s",
}


def main() -> None:
    """Train, and draw on rank 0."""
    comm = chainermn.create_communicator()
    model = L.Classifier(L.Linear(200, 10))
    optimizer = chainermn.create_multi_node_optimizer(chainer.optimizers.SGD(0.01), comm).setup(model)
    samples = np.random.RandomState(comm.rank).rand(STEPS * 50, 200).astype(np.float32)
    data = chainer.datasets.TupleDataset(samples, np.zeros(len(samples), np.int32))
    updater = StandardUpdater(chainer.iterators.SerialIterator(data, 50), optimizer)
    trainer = Trainer(updater, (EPOCHS, "epoch"))

    def compute(trainer: Any) -> None:
        """Stand for a larger model; on rank 1, for one that gets slower."""
        time.sleep(0.02 + LATER * (comm.rank == 1 and trainer.updater.epoch >= EPOCHS // 2))

    trainer.extend(chainermn.extensions.PerformanceReporter(comm))
    trainer.extend(compute, trigger=(1, "iteration"))
    log = extensions.LogReport(filename=None)
    trainer.extend(log)
    trainer.run()
    if comm.rank == 0:
        draw(log.log, sys.argv[1])


def draw(entries: list[dict[str, float]], path: str) -> None:
    """Draw the observations over epochs."""
    figure = Figure(figsize=(10, 2.6), layout="constrained")
    for axes, (key, title) in zip(figure.subplots(1, 3), TITLES.items(), strict=True):
        axes.plot([entry["epoch"] for entry in entries], [entry[f"performance/{key}"] for entry in entries])
        axes.set_title(title, fontsize=11)
        axes.set_ylim(0)
        axes.set_xlabel("epoch")
        axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(path, dpi=100)


if __name__ == "__main__":
    main()
