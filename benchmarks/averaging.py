"""How long the averaging of gradients takes on one node, beside what else could do it.

    mpiexec -n 2 python benchmarks/averaging.py [--json FILE] [--models resnet50,small]

Every contestant gets the same fresh gradients, one after another in the same process, round after round, so that what
else the machine does meets all alike. What is timed is what a training step waits for: from gradients in arrays of
their own to averaged gradients in ``param.grad``. Contestants: our strategies; the ChainerMN inside Chainer's wheel
(``naive``, the only one of its communicators that works without a GPU and without a copy to one); ``MPI_Allreduce`` of
one buffer, not even packed; Gloo in buckets of 25 MB as PyTorch's DistributedDataParallel does it, if torch is
installed; and, as the floor, one copy of the same bytes.
"""

from __future__ import annotations

import os

os.environ["CHAINERMN_IMPL"] = "bundled"  # ours is used by the name mn_comm

import argparse
import json
import statistics
import time
from collections.abc import Callable
from pathlib import Path

import chainermn
import numpy as np
from models import MODELS, make_model
from mpi4py import MPI

import mn_comm

WORLD = MPI.COMM_WORLD
STRATEGIES = ("flat", "hierarchical", "two_dimensional")
GLOO_BUCKET_BYTES = 25 * 1024 * 1024


def main() -> None:
    """Run all contestants on the models asked for, and print a table for each."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", default="resnet50,mlp,small,large")
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--json", default="", help="a file to add the figures to, as a line of JSON")
    args = parser.parse_args()
    for name in args.models.split(","):
        figures = measure(MODELS[name], args.rounds if name != "large" else max(3, args.rounds // 3))
        if WORLD.rank == 0:
            report(name, figures)
            if args.json:
                with Path(args.json).open("a") as lines:
                    lines.write(json.dumps({"model": name, "ranks": WORLD.size, **figures}) + "\n")


def measure(shapes: list[tuple[int, ...]], rounds: int) -> dict[str, object]:
    """Return the median seconds of every contestant, and the extra memory of ours, relative to the gradients' bytes."""
    model = make_model(shapes)
    random = np.random.RandomState(WORLD.rank)
    grads = [random.rand(*shape).astype(np.float32) for shape in shapes]
    params = [param for _, param in sorted(model.namedparams())]
    nbytes = sum(grad.nbytes for grad in grads)

    def refresh() -> None:
        for param, grad in zip(params, grads, strict=True):
            param.grad = grad

    refresh()
    before = proportional_bytes()
    ours = {name: mn_comm.create_communicator(name) for name in STRATEGIES}
    ours["two_dimensional"].multi_node_mean_grad(model)
    extra = (proportional_bytes() - before) / nbytes
    contestants: dict[str, Callable[[], object]] = {
        f"ours, {name}": lambda comm=comm: comm.multi_node_mean_grad(model) for name, comm in ours.items()
    }
    bundled = chainermn.create_communicator("naive")
    contestants["bundled naive"] = lambda: bundled.multi_node_mean_grad(model)
    packed, received = np.concatenate([grad.ravel() for grad in grads]), np.empty(nbytes // 4, np.float32)
    contestants["MPI_Allreduce, one buffer"] = lambda: WORLD.Allreduce(packed, received)
    contestants["memory copy"] = lambda: np.copyto(received, packed)
    contestants |= gloo(params)

    seconds: dict[str, list[float]] = {name: [] for name in contestants}
    for _ in range(rounds):
        for name, run in contestants.items():
            # Bundled naive averages in place: give it copies, so that the gradients stay what they are.
            refresh()
            if name == "bundled naive":
                for param in params:
                    param.grad = param.grad.copy()
            WORLD.Barrier()
            begin = time.perf_counter()
            run()
            WORLD.Barrier()
            seconds[name].append(time.perf_counter() - begin)
    for comm in ours.values():
        comm.finalize()
    return {
        "seconds": {name: statistics.median(each) for name, each in seconds.items()},
        "extra_memory": extra,
        "bytes": nbytes,
    }


def gloo(params: list[object]) -> dict[str, Callable[[], object]]:
    """Return the contestant that needs PyTorch, if that is installed."""
    try:
        import torch
        import torch.distributed as dist
    except ImportError:
        return {}
    torch.set_num_threads(1)
    if not dist.is_initialized():
        address = WORLD.bcast(f"file:///tmp/gloo-{os.getpid()}")
        dist.init_process_group("gloo", init_method=address, rank=WORLD.rank, world_size=WORLD.size)
    buckets = [torch.empty(sum(p.size for p in group)) for group in in_buckets(params)]

    def run() -> None:
        works = []
        for bucket, group in zip(buckets, in_buckets(params), strict=True):
            offset = 0
            for param in group:
                bucket[offset : offset + param.size] = torch.from_numpy(param.grad).view(-1)
                offset += param.size
            bucket.div_(WORLD.size)
            works.append(dist.all_reduce(bucket, async_op=True))
        for work in works:
            work.wait()
        for bucket, group in zip(buckets, in_buckets(params), strict=True):
            array, offset = bucket.numpy(), 0
            for param in group:
                param.grad = array[offset : offset + param.size].reshape(param.shape)
                offset += param.size

    return {"Gloo, 25 MB buckets": run}


def in_buckets(params: list[object]) -> list[list[object]]:
    """Return the parameters in groups of at most 25 MB, last ones first."""
    groups: list[list[object]] = [[]]
    held = 0
    for param in reversed(params):
        if groups[-1] and held + param.array.nbytes > GLOO_BUCKET_BYTES:
            groups.append([])
            held = 0
        groups[-1].append(param)
        held += param.array.nbytes
    return groups


def proportional_bytes() -> int:
    """Return this process's memory, counting pages shared by n processes as one n-th (Pss)."""
    WORLD.Barrier()
    with Path("/proc/self/smaps_rollup").open() as lines:
        kib = next(int(line.split()[1]) for line in lines if line.startswith("Pss:"))
    WORLD.Barrier()
    return kib * 1024


def report(name: str, figures: dict[str, object]) -> None:
    """Print the table of one model."""
    seconds = figures["seconds"]
    floor = seconds["memory copy"]
    others = {key: s for key, s in seconds.items() if not key.startswith("ours") and key != "memory copy"}
    best = min(others, key=others.get)
    print(f"\n{name}, {figures['bytes'] / 1e6:.1f} MB, {WORLD.size} ranks; the fastest other is {best}")
    print(f"{'':32}{'ms':>10}{'/ fastest other':>18}{'/ memory copy':>16}")
    for key, s in sorted(seconds.items(), key=lambda item: item[1]):
        print(f"{key:32}{s * 1e3:10.2f}{s / others[best]:18.2f}{s / floor:16.2f}")
    print(f"extra memory of ours, two_dimensional: {figures['extra_memory']:.2f} of the gradients' bytes")


if __name__ == "__main__":
    main()
