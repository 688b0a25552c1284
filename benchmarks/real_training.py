"""The effect of sending less, or meeting less often, on training: its score, its time, and the bytes that it sent.

    python tools/cluster.py --hosts 2,2 --rate 100mbit -- python benchmarks/real_training.py

Each rank has a share of the samples, and takes the same number of steps in every scheme, the last quarter of them at a
tenth of the learning rate. Printed are the score on the test samples (accuracy or BLEU) of the parameters that all
ranks have in common at the end, its distance to that of exact averages in points, the seconds that the training took,
the seconds until rank 0's own parameters first reached the target, and the megabytes that the hosts sent, counted by
the kernel (``/sys/class/net``), on two or more hosts.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import chainer
import numpy as np
from common import WORLD, keep
from training_tasks import TASKS, Task

import mn_optim
from mn_comm import create_communicator
from mn_compress import Int8, OneBit, PowerSGD, TopK
from mn_extensions import AllreducePersistent
from mn_optim import AfterBackward, Asynchronous, DiLoCo, LocalSGD, StreamingDiLoCo, SynchronousFirst

EXACT = "exact"
SCHEMES: dict[str, Callable[[int], mn_optim.When]] = {
    EXACT: lambda steps: AfterBackward(),
    "Int8()": lambda steps: AfterBackward(send=Int8()),
    "OneBit()": lambda steps: AfterBackward(send=OneBit()),
    "OneBit(64)": lambda steps: AfterBackward(send=OneBit(64)),
    "OneBit(64), after 1/4": lambda steps: AfterBackward(send=OneBit(64, start_iter=steps // 4)),
    "TopK(0.01, momentum=0.9)": lambda steps: AfterBackward(send=TopK(0.01, momentum=0.9, warm_up=60)),
    "TopK(0.02, momentum=0.95)": lambda steps: AfterBackward(send=TopK(0.02, momentum=0.95, warm_up=60)),
    "PowerSGD(4)": lambda steps: AfterBackward(send=PowerSGD(4, start_iter=20)),
    "local SGD, H = 8": lambda steps: LocalSGD(8),
    "DiLoCo, H = 16": lambda steps: DiLoCo(16),
    "DiLoCo, H = 16, after 1/4": lambda steps: SynchronousFirst(steps // 4, DiLoCo(16)),
    "DiLoCo, H = 16, momentum 0.5": lambda steps: DiLoCo(16, outer=_outer()),
    "Streaming DiLoCo, H = 16, momentum 0.5": lambda steps: StreamingDiLoCo(16, fragments=4, delay=2, outer=_outer()),
    "Streaming DiLoCo, H = 16": lambda steps: StreamingDiLoCo(16, fragments=4, delay=2),
    "asynchronous": lambda steps: SynchronousFirst(12, Asynchronous(max_staleness=16)),
}
"""When ranks communicate in each scheme, by the number of steps; "after 1/4" begins with a quarter exact ones."""


def _outer() -> chainer.Optimizer:
    """Return an outer optimizer that needs fewer meetings to get going than the default one, with momentum 0.9."""
    return chainer.optimizers.NesterovAG(lr=0.7, momentum=0.5)


def train(task: Task, scheme: str, comm: Any, epochs: int, seed: int, target: float) -> dict[str, float]:
    """Train, and return the score, the seconds, the seconds to the target, and the megabytes that were sent."""
    steps = task.size // (task.batch * comm.size) * epochs
    when = SCHEMES[scheme](steps)
    order = np.random.RandomState(seed).permutation(task.size)[comm.rank :: comm.size]
    model = task.model(seed)
    has_momentum_elsewhere = bool(getattr(getattr(when, "send", None), "momentum", 0))
    actual = task.optimizer(has_momentum_elsewhere)
    optimizer = mn_optim.MultiNodeOptimizer(actual, comm, when).setup(model)
    is_compressed = getattr(when, "send", None) is not None
    if task.clip and not is_compressed:
        actual.add_hook(chainer.optimizer_hooks.GradientClipping(task.clip))
    optimizer.assume_synchronized()
    random = np.random.RandomState(1000 * seed + comm.rank)
    reached = float("nan")
    WORLD.Barrier()
    begin, sent = time.perf_counter(), bytes_sent()
    for step in range(steps):
        if step == int(0.75 * steps):
            name = "alpha" if hasattr(actual, "alpha") else "lr"
            setattr(actual, name, 0.1 * getattr(actual, name))
        chosen = order[random.randint(0, len(order), task.batch)]
        if task.clip and is_compressed:  # not the decoded means: error feedback does not know what clipping takes away
            compute_and_clip(model, partial(task.loss, model, chosen), task.clip)
            optimizer.update()
        else:
            optimizer.update(partial(task.loss, model, chosen))
        if target and comm.rank == 0 and reached != reached and step % 10 == 9 and task.score(model) >= target:
            reached = time.perf_counter() - begin
    optimizer.synchronize()
    WORLD.Barrier()
    seconds, sent = time.perf_counter() - begin, bytes_sent() - sent
    AllreducePersistent(model, comm)()
    return {
        "score": task.score(model),
        "seconds": seconds,
        "reached": reached,
        "megabytes": sum(comm.allgather_obj(sent if comm.intra_rank == 0 else 0)) / 1e6,
    }


def compute_and_clip(model: chainer.Link, loss: Callable[[], chainer.Variable], most: float) -> None:
    """Compute this rank's gradients, and scale them down to a maximum norm."""
    model.cleargrads()
    loss().backward()
    grads = [param.grad for param in model.params() if param.grad is not None]
    norm = float(np.sqrt(sum(float(np.vdot(grad, grad)) for grad in grads)))
    for grad in grads if norm > most else []:
        grad *= most / norm


def bytes_sent() -> int:
    """Return how many bytes this host has sent since it was created, except to itself."""
    files = Path("/sys/class/net").glob("*/statistics/tx_bytes")
    return sum(int(file.read_text()) for file in files if file.parts[-3] != "lo")


def is_wanted(name: str, beginning: str) -> bool:
    """Return whether a scheme's name begins like this; a whole name means only this scheme."""
    return name == beginning if beginning in SCHEMES else name.startswith(beginning)


def main() -> None:
    """Train with each scheme in turn, seed after seed, and print a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--communicator", default="two_dimensional")
    parser.add_argument("--task", default="digits", choices=TASKS)
    parser.add_argument("--epochs", type=int, default=30)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--first", type=int, default=0, help="the first seed")
    parser.add_argument("--target", type=float, default=0, help="the score until which to count the seconds")
    parser.add_argument("--schemes", nargs="*", default=[""], help="names of the wanted schemes, or how they begin")
    parser.add_argument("--json", default="", help="a file to add the figures to, as a line of JSON")
    parser.add_argument("--network", default="", help="what to call the network in the figures")
    args = parser.parse_args()
    comm = create_communicator(args.communicator)
    task = TASKS[args.task]()
    wanted = [name for name in SCHEMES if any(map(partial(is_wanted, name), args.schemes))]
    found: dict[str, list[dict[str, float]]] = {name: [] for name in wanted}
    for seed in range(args.first, args.first + args.seeds):
        for name in wanted:
            found[name].append(train(task, name, comm, args.epochs, seed, args.target))
            if comm.rank == 0:
                print(seed, name, {key: round(value, 2) for key, value in found[name][-1].items()}, flush=True)
    if WORLD.rank:
        return
    n_bytes = 4 * sum(param.size for param in task.model(0).params())
    print(f"\n{args.task}: {WORLD.size} ranks on {comm.inter_size} hosts, {n_bytes / 1e6:.2f} MB of parameters", end="")
    print(f", {args.seeds} seeds{f', target {args.target:g}' if args.target else ''}")
    print(f"{'':26}{task.score_name:>12}{'worst seed':>12}{'points':>8}{'seconds':>10}{'to target':>10}{'MB sent':>10}")
    base = statistics.mean(each["score"] for each in found.get(EXACT, [{"score": float("nan")}]))
    for name, runs in found.items():
        score, worst = statistics.mean(each["score"] for each in runs), min(each["score"] for each in runs)
        seconds, reached, megabytes = (
            statistics.median(each[key] for each in runs) for key in ("seconds", "reached", "megabytes")
        )
        sent = f"{megabytes:10.1f}" if comm.inter_size > 1 else f"{'-':>10}"
        print(f"{name:26}{score:12.2f}{worst:12.2f}{score - base:+8.2f}{seconds:10.2f}{reached:10.2f}{sent}")
    figures: dict[str, Any] = {
        key: {name: [run[key] for run in runs] for name, runs in found.items()} for key in ("score", "megabytes")
    }
    for key in ("seconds", "reached") if args.target else ("seconds",):
        figures[key] = {name: statistics.median(run[key] for run in runs) for name, runs in found.items()}
    keep(args.json, benchmark="training", model=args.task, network=args.network, target=args.target, **figures)


if __name__ == "__main__":
    main()
