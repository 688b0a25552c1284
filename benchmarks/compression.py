"""The time of compressed averages across two hosts, the bytes that they send, and PyTorch's PowerSGD beside ours.

    python tools/cluster.py --hosts 2,2 --rate 1gbit -- python benchmarks/compression.py [--json figures.jsonl]

Every contestant gets the same fresh gradients: 64 MB in 16 matrices, or those of a ResNet-50, 102 MB. It measures the
time for which a training step waits. The bytes on the wire are counted by the kernel on the host's link while a
contestant runs; the table also shows the bytes that the compression reports. PyTorch's own PowerSGD hook runs on Gloo,
in buckets of 25 MB as in DistributedDataParallel, if torch is installed.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from common import keep, table
from gloo import in_buckets, start_gloo
from models import make_model, resnet50
from mpi4py import MPI

import mn_comm
from mn_compress import Int8, OneBit, PowerSGD, TopK

WORLD = MPI.COMM_WORLD
LINK = Path("/sys/class/net/eth0/statistics/tx_bytes")
EXACT = "exact"
CASES: dict[str, tuple[Sequence[tuple[int, ...]], dict[str, Any]]] = {
    "64 MB": (
        [(1000, 1000)] * 16,
        {"Int8()": Int8(), "TopK(0.01)": TopK(0.01), "OneBit()": OneBit(), "PowerSGD(4)": PowerSGD(4, start_iter=0)},
    ),
    "resnet50": (
        resnet50(),
        {"Int8()": Int8(), "TopK(0.01)": TopK(0.01), "OneBit()": OneBit(), "PowerSGD(4)": PowerSGD(4, start_iter=0)},
    ),
}


def main() -> None:
    """Run all contestants on the requested cases."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", default=",".join(CASES), help=f"some of {', '.join(CASES)}")
    parser.add_argument("--strategy", default="two_dimensional")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--warm-up", type=int, default=3, help="how many rounds to run before the timing begins")
    parser.add_argument("--json", default="", help="a file to add the figures to, as lines of JSON")
    parser.add_argument("--network", default="", help="what to call the network in the figures")
    args = parser.parse_args()
    for name in args.cases.split(","):
        compare(name, args)


def compare(name: str, args: argparse.Namespace) -> None:
    """Run all contestants on a case, and print a table."""
    shapes, kinds = CASES[name]
    comm = mn_comm.create_communicator(args.strategy)
    model = make_model(list(shapes))
    params = [param for _, param in sorted(model.namedparams())]
    random = np.random.RandomState(WORLD.rank)
    grads = [random.standard_normal(shape).astype(np.float32) for shape in shapes]
    fresh = [grad.copy() for grad in grads]
    reducers = {kind: comm.gradient_reducer(compression=how) for kind, how in kinds.items()}
    contestants: dict[str, Callable[[], Any]] = {EXACT: lambda: comm.multi_node_mean_grad(model)}
    contestants |= {kind: lambda reducer=reducer: reducer.average(model) for kind, reducer in reducers.items()}
    contestants |= torch_power_sgd(params)

    def refresh() -> None:
        for param, grad, copy in zip(params, grads, fresh, strict=True):
            np.copyto(copy, grad)
            param.grad = copy

    seconds, wire, busy = measure(contestants, refresh, args)
    said = {kind: reducer.compression_report.bytes_sent for kind, reducer in reducers.items()}
    said = {kind: comm.allreduce(np.array(n, np.float64)) * comm.intra_size / comm.size for kind, n in said.items()}
    nbytes = 4 * sum(int(np.prod(shape)) for shape in shapes)
    table(f"{name}: {nbytes / 1e6:.1f} MB, {comm.size} ranks, {args.strategy}", seconds, {EXACT: seconds[EXACT]})
    if comm.rank == 0:
        print(f"{'':34}{'MB on the wire':>16}{'MB it says':>16}{'ratio':>8}{'s of CPU a rank':>17}")
        for kind, mb in wire.items():
            says = f"{float(said[kind]) / 1e6:16.3f}{mb / float(said[kind]):8.3f}" if kind in said else " " * 24
            print(f"{kind:34}{mb / 1e6:16.3f}{says}{busy[kind]:17.3f}")
    keep(
        args.json,
        benchmark="compression",
        model=name,
        network=args.network,
        strategy=args.strategy,
        bytes=nbytes,
        seconds=seconds,
        wire=wire,
        said={kind: float(n) for kind, n in said.items()},
        cpu=busy,
    )
    comm.finalize()


def measure(
    contestants: dict[str, Callable[[], Any]], refresh: Callable[[], None], args: argparse.Namespace
) -> tuple[dict[str, float], dict[str, float], dict[str, float]]:
    """Run all contestants in turn; return the medians of seconds, of bytes on a host's link, and of CPU seconds."""
    seconds: dict[str, list[float]] = {kind: [] for kind in contestants}
    wire: dict[str, list[float]] = {kind: [] for kind in contestants}
    busy: dict[str, list[float]] = {kind: [] for kind in contestants}
    for round_ in range(args.warm_up + args.rounds):
        for kind, run in contestants.items():
            refresh()
            WORLD.Barrier()
            sent, cpu, begin = bytes_sent(), time.process_time(), time.perf_counter()
            run()
            cpu = time.process_time() - cpu  # MPI polls while it waits, so this is an upper bound
            WORLD.Barrier()
            elapsed = time.perf_counter() - begin
            if round_ >= args.warm_up:
                seconds[kind].append(elapsed)
                wire[kind].append(bytes_sent() - sent)
                busy[kind].append(cpu)
    return tuple({kind: statistics.median(each) for kind, each in found.items()} for found in (seconds, wire, busy))


def bytes_sent() -> int:
    """Return how many bytes this host has sent, as the kernel counts them; 0 if there is no such link."""
    return int(LINK.read_text()) if LINK.exists() else 0


def torch_power_sgd(params: Sequence[Any]) -> dict[str, Callable[[], None]]:
    """Return PyTorch's PowerSGD on Gloo as a contestant, or nothing if PyTorch is not installed."""
    try:
        from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook
    except ImportError:
        return {}
    start_gloo()
    state = powerSGD_hook.PowerSGDState(
        None, matrix_approximation_rank=4, start_powerSGD_iter=2, min_compression_rate=2, use_error_feedback=True
    )
    hooks = [_Bucket(index, group) for index, group in enumerate(in_buckets(params))]
    hooks[-1].last = True

    def run() -> None:
        # One after the other: its callbacks start further collectives, in different orders on different ranks, and Gloo
        # hangs.
        for bucket in hooks:
            bucket.empty(powerSGD_hook.powerSGD_hook(state, bucket.fill()).wait())

    return {"PowerSGD(4) of PyTorch, on Gloo": run}


class _Bucket:
    """The parts of a bucket that PyTorch's hook uses."""

    def __init__(self, index: int, group: Sequence[Any]) -> None:
        import torch

        self._index, self._group, self.last = index, group, False
        self._flat = torch.empty(sum(param.size for param in group))

    def fill(self) -> _Bucket:
        """Copy the gradients into it."""
        import torch

        for param, view in zip(self._group, self.gradients(), strict=True):
            view.copy_(torch.from_numpy(param.grad))
        return self

    def empty(self, mean: Any) -> None:
        """Copy means to the gradients."""
        begin = 0
        for param in self._group:
            param.grad[...] = mean[begin : begin + param.size].view(param.shape).numpy()
            begin += param.size

    def buffer(self) -> Any:
        """Return the whole buffer."""
        return self._flat

    def gradients(self) -> list[Any]:
        """Return a view for each gradient."""
        views, begin = [], 0
        for param in self._group:
            views.append(self._flat[begin : begin + param.size].view(param.shape))
            begin += param.size
        return views

    def index(self) -> int:
        """Return its number."""
        return self._index

    def is_last(self) -> bool:
        """Return whether it is the last one of a step."""
        return self.last


if __name__ == "__main__":
    main()
