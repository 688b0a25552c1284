"""What becomes of a training whose ranks meet less often: accuracy, time, and bytes that crossed the network.

    python tools/cluster.py --hosts 2,2 --rate 100mbit -- python benchmarks/real_training.py

A perceptron learns scikit-learn's 1,797 handwritten digits, of which every sixth is for testing, to the end: each rank
has a share of the samples, and takes the same number of steps in every scheme. Printed are the accuracy on the test
samples of the parameters that all ranks have in common at the end, its distance to that of synchronous training in
points, the seconds that the training took, and the megabytes that the hosts sent, counted by the kernel
(``/sys/class/net``), on two or more hosts.
"""

from __future__ import annotations

import argparse
import statistics
import time
from pathlib import Path
from typing import Any

import chainer
import chainer.functions as F
import chainer.links as L
import numpy as np
from common import WORLD, keep

import mn_optim
from mn_comm import create_communicator
from mn_optim import Asynchronous, DiLoCo, LocalSGD, StreamingDiLoCo

SCHEMES: dict[str, dict[str, Any]] = {
    "synchronous": {},
    "local SGD, H = 8": {"local_steps": LocalSGD(8)},
    "DiLoCo, H = 16": {"local_steps": DiLoCo(16)},
    "Streaming DiLoCo, H = 16": {"local_steps": StreamingDiLoCo(16, fragments=4, delay=2)},
    "asynchronous": {"asynchronous": Asynchronous(warmup_steps=12, max_staleness=16)},
}
BATCH = 32


class Net(chainer.Chain):
    """Three layers."""

    def __init__(self, units: int, seed: int) -> None:
        super().__init__()
        initial = chainer.initializers.LeCunNormal(rng=np.random.RandomState(seed))
        with self.init_scope():
            self.layers = chainer.ChainList(*(L.Linear(n, m, initialW=initial) for n, m in shapes(units)))

    def forward(self, x: np.ndarray) -> chainer.Variable:
        """Return the scores of the ten digits."""
        for layer in self.layers[:-1]:
            x = F.relu(layer(x))
        return self.layers[-1](x)


def shapes(units: int) -> list[tuple[int, int]]:
    """Return how many values go into each layer, and come out."""
    return [(64, units), (units, units), (units, 10)]


def digits() -> tuple[Any, Any]:
    """Return pixels and digits to learn from, and to test with."""
    from sklearn.datasets import load_digits

    found = load_digits()
    x, t = (found.images.reshape(-1, 64) / 16).astype(np.float32), found.target.astype(np.int32)
    is_test = np.arange(len(x)) % 6 == 5
    return (x[~is_test], t[~is_test]), (x[is_test], t[is_test])


def train(options: dict[str, Any], comm: Any, units: int, epochs: int, seed: int) -> dict[str, float]:
    """Train, and return accuracy, seconds, and bytes that were sent."""
    (x, t), test = digits()
    order = np.random.RandomState(seed).permutation(len(x))[comm.rank :: comm.size]
    model = L.Classifier(Net(units, seed))
    actual = chainer.optimizers.MomentumSGD(lr=0.05)
    optimizer = mn_optim.create_multi_node_optimizer(actual, comm, **options).setup(model)
    optimizer.assume_synchronized()
    random = np.random.RandomState(1000 * seed + comm.rank)
    steps = len(x) // (BATCH * comm.size) * epochs
    WORLD.Barrier()
    begin, sent = time.perf_counter(), bytes_sent()
    for _ in range(steps):
        chosen = order[random.randint(0, len(order), BATCH)]
        optimizer.update(model, x[chosen], t[chosen])
    optimizer.synchronize()
    WORLD.Barrier()
    seconds, sent = time.perf_counter() - begin, bytes_sent() - sent
    with chainer.using_config("train", False), chainer.no_backprop_mode():
        model(*test)
    return {
        "accuracy": 100 * float(model.accuracy.array),
        "seconds": seconds,
        "megabytes": sum(comm.allgather_obj(sent if comm.intra_rank == 0 else 0)) / 1e6,
    }


def bytes_sent() -> int:
    """Return how many bytes this host has sent since it is there, except to itself."""
    files = Path("/sys/class/net").glob("*/statistics/tx_bytes")
    return sum(int(file.read_text()) for file in files if file.parts[-3] != "lo")


def main() -> None:
    """Train with each scheme in turn, seed after seed, and print a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--communicator", default="two_dimensional")
    parser.add_argument("--units", type=int, default=300)
    parser.add_argument("--epochs", type=int, default=30)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--json", default="", help="a file to add the figures to, as a line of JSON")
    parser.add_argument("--network", default="", help="what to call the network in the figures")
    args = parser.parse_args()
    comm = create_communicator(args.communicator)
    found: dict[str, list[dict[str, float]]] = {name: [] for name in SCHEMES}
    for seed in range(args.seeds):
        for name, options in SCHEMES.items():
            found[name].append(train(options, comm, args.units, args.epochs, seed))
    if WORLD.rank:
        return
    n_bytes = 4 * sum(n * m + m for n, m in shapes(args.units))
    print(f"\n{WORLD.size} ranks on {comm.inter_size} hosts, {n_bytes / 1e6:.2f} MB of parameters, {args.seeds} seeds")
    print(f"{'':26}{'accuracy, %':>12}{'worst seed':>12}{'points':>8}{'seconds':>10}{'MB sent':>10}")
    base = statistics.mean(each["accuracy"] for each in found["synchronous"])
    for name, runs in found.items():
        accuracy = statistics.mean(each["accuracy"] for each in runs)
        worst = min(each["accuracy"] for each in runs)
        seconds, megabytes = (statistics.median(each[key] for each in runs) for key in ("seconds", "megabytes"))
        sent = f"{megabytes:10.1f}" if comm.inter_size > 1 else f"{'-':>10}"
        print(f"{name:26}{accuracy:12.2f}{worst:12.2f}{accuracy - base:+8.2f}{seconds:10.2f}{sent}")
    figures: dict[str, Any] = {
        key: {name: [run[key] for run in runs] for name, runs in found.items()} for key in ("accuracy", "megabytes")
    }
    figures["seconds"] = {name: statistics.median(run["seconds"] for run in runs) for name, runs in found.items()}
    keep(args.json, benchmark="training", model="digits", network=args.network, **figures)


if __name__ == "__main__":
    main()
