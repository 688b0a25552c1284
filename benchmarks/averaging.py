"""The time of averaging gradients, compared with alternatives.

    mpiexec -n 2 python benchmarks/averaging.py [--models resnet50,small] [--busy 1]
    python tools/cluster.py --hosts 2,2 --rate 1gbit -- python benchmarks/averaging.py --models wire

Every contestant gets the same fresh gradients. It measures the time for which a training step waits: from gradients in
arrays of their own to averaged gradients in ``param.grad``. The contestants are: our strategies; the ChainerMN inside
Chainer's wheel (``naive``, its only communicator for gradients in host memory); ``MPI_Allreduce`` of one buffer,
without packing, and of each array in place; Gloo in buckets of 25 MB, as in PyTorch's DistributedDataParallel, if torch
is installed; and, as a lower bound, one copy of the same bytes. With ``--busy``, other processes keep this number of
cores busy, as a data loader might.
"""

from __future__ import annotations

import os

os.environ["CHAINERMN_IMPL"] = "bundled"  # ours is imported under the name mn_comm

import argparse
from collections.abc import Callable
from pathlib import Path
from typing import Any

import chainermn
import numpy as np
from common import busy_processes, interleave, keep, settle, table
from gloo import make_gloo
from models import MODELS, make_model
from mpi4py import MPI

import mn_comm

WORLD = MPI.COMM_WORLD
STRATEGIES = ("flat", "hierarchical", "two_dimensional")
FLOOR = "memory copy"


def main() -> None:
    """Run all contestants on the requested models."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", default="resnet50,mlp,small,large", help=f"some of {', '.join(MODELS)}")
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--busy", type=int, default=0, help="how many other processes burn a core meanwhile")
    parser.add_argument("--json", default="", help="a file to add the figures to, as lines of JSON")
    parser.add_argument("--network", default="", help="what to call the network in the figures")
    args = parser.parse_args()
    with busy_processes(args.busy):
        for name in args.models.split(","):
            compare(name, args)


def compare(name: str, args: argparse.Namespace) -> None:
    """Run all contestants on a model, and print a table."""
    shapes = MODELS[name]
    nbytes = 4 * sum(int(np.prod(shape)) for shape in shapes)
    seconds, extra = measure(shapes, nbytes, args.rounds if nbytes < 2e8 else max(3, args.rounds // 3))
    others = {key: s for key, s in seconds.items() if not key.startswith("ours") and key != FLOOR}
    best = min(others, key=others.__getitem__)
    size = f"{len(shapes)} arrays, {nbytes / 1e6:.1f} MB, {WORLD.size} ranks, busy processes: {args.busy}"
    table(f"{name}: {size}; fastest other: {best}", seconds, {"fastest other": others[best], FLOOR: seconds[FLOOR]})
    if WORLD.rank == 0:
        print(f"peak extra memory of ours, two_dimensional: {extra:.2f} of the gradients' bytes")
    keep(
        args.json,
        benchmark="averaging",
        model=name,
        network=args.network,
        busy=args.busy,
        bytes=nbytes,
        seconds=seconds,
        extra_memory=extra,
    )


def measure(shapes: list[tuple[int, ...]], nbytes: int, rounds: int) -> tuple[dict[str, float], float]:
    """Return the median seconds of every contestant, and the extra memory of ours relative to the gradients' bytes."""
    model = make_model(shapes)
    random = np.random.RandomState(WORLD.rank)
    grads = [random.rand(*shape).astype(np.float32) for shape in shapes]
    params = [param for _, param in sorted(model.namedparams())]

    fresh = [grad.copy() for grad in grads]

    def refresh(name: str = "") -> None:
        # For all contestants, because most average in place; the arrays are kept, so that freeing them is not timed.
        for param, grad, copy in zip(params, grads, fresh, strict=True):
            np.copyto(copy, grad)
            param.grad = copy

    ours = {name: mn_comm.create_communicator(name) for name in STRATEGIES}
    refresh()
    before = proportional_bytes()
    ours["two_dimensional"].multi_node_mean_grad(model)
    settle(ours["two_dimensional"], model, refresh)
    extra = (proportional_bytes() - before) / nbytes
    settle(ours["hierarchical"], model, refresh)
    bundled = chainermn.create_communicator("naive")

    def allreduce_each() -> None:
        for param in params:
            grad = param.grad
            WORLD.Allreduce(MPI.IN_PLACE, grad)
            grad /= WORLD.size

    packed, received = np.concatenate([grad.ravel() for grad in grads]), np.empty(nbytes // 4, np.float32)
    contestants: dict[str, Callable[[], Any]] = {
        **{f"ours, {name}": lambda comm=comm: comm.multi_node_mean_grad(model) for name, comm in ours.items()},
        "bundled naive": lambda: bundled.multi_node_mean_grad(model),
        "MPI_Allreduce of one buffer": lambda: WORLD.Allreduce(packed, received),
        "MPI_Allreduce of each array": allreduce_each,
        FLOOR: lambda: np.copyto(received, packed),
        **make_gloo(params),
    }
    seconds = interleave(contestants, rounds, prepare=refresh)
    for comm in ours.values():
        comm.finalize()
    return seconds, extra


def proportional_bytes() -> int:
    """Return this process's memory, counting pages shared by n processes as one n-th each (Pss)."""
    WORLD.Barrier()
    with Path("/proc/self/smaps_rollup").open() as lines:
        kib = next(int(line.split()[1]) for line in lines if line.startswith("Pss:"))
    WORLD.Barrier()
    return kib * 1024


if __name__ == "__main__":
    main()
