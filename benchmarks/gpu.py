"""Gradients on a GPU: packing beside a copy of the same bytes, and strategies beside ``naive``.

Use ``python benchmarks/gpu.py`` for packing; use ``mpiexec -n 2 python benchmarks/gpu.py`` to measure averages as well,
with ``NCCL_MULTI_RANK_GPU_ENABLE=1`` if the ranks share a GPU. It has not run on a GPU yet.
"""

from __future__ import annotations

import argparse
import statistics
import warnings
from collections.abc import Callable
from typing import Any

import numpy as np
from common import WORLD, interleave, table
from models import MODELS
from mpi4py import MPI

from mn_comm import create_communicator

NAMES = ("naive", "flat", "hierarchical", "non_cuda_aware", "pure_nccl")


class Param:
    """A parameter."""

    def __init__(self, data: Any) -> None:
        self.data = data
        self.grad = data.copy()


class Model:
    """A model with parameters of these shapes."""

    def __init__(self, shapes: list[tuple[int, ...]]) -> None:
        import cupy

        self.named = [(f"/p{i:04}", Param(cupy.ones(shape, np.float32))) for i, shape in enumerate(shapes)]

    def namedparams(self) -> list[tuple[str, Param]]:
        """Return names and parameters."""
        return self.named

    def restore(self) -> None:
        """Restore the gradients from before averaging, as a backward pass would create them."""
        import cupy

        for _, param in self.named:
            param.grad[...] = param.data
        cupy.cuda.get_current_stream().synchronize()


def main() -> None:
    """Print the tables."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="resnet50", choices=MODELS)
    parser.add_argument("--rounds", type=int, default=20)
    options = parser.parse_args()
    import cupy

    cupy.cuda.Device(WORLD.rank % cupy.cuda.runtime.getDeviceCount()).use()
    if WORLD.rank == 0:
        packing(MODELS[options.model], options.rounds)
    if WORLD.size > 1:
        averaging(MODELS[options.model], options.rounds)


def packing(shapes: list[tuple[int, ...]], rounds: int) -> None:
    """Print the bandwidths of a copy on the device and of packing: bytes read and written per second of device time."""
    import cupy

    from mn_comm.basis.config import Config
    from mn_comm.gradients.layout import Layout
    from mn_comm.gradients.signature import signature_of
    from mn_comm.gradients.strategies import STRATEGIES
    from mn_comm.ranks.context import contexts_of

    model = Model(shapes)
    grads = [param.grad for _, param in model.named]
    signature = signature_of((name, param.grad) for name, param in model.named)
    alone = STRATEGIES["dummy"](contexts_of(MPI.COMM_SELF).foreground)
    dtype = np.dtype(np.float32)
    length = sum(int(np.prod(shape)) for shape in shapes)
    source, target = cupy.ones(length, dtype), cupy.empty(length, dtype)

    def packed_by(batched: bool) -> Callable[[], object]:
        config = Config(batched_copy=batched)
        layout = Layout(alone, signature, grads, (), config, bucket_bytes=None, whole=False, lasting=False)
        (bucket,) = layout.buckets().buckets
        return lambda: bucket.pack(grads)

    runs = {
        "copy on the device": lambda: cupy.cuda.runtime.memcpyAsync(
            target.data.ptr,
            source.data.ptr,
            source.nbytes,
            cupy.cuda.runtime.memcpyDeviceToDevice,
            cupy.cuda.get_current_stream().ptr,
        ),
        "one launch for all": packed_by(True),
        "one launch for each": packed_by(False),
    }
    seconds = {name: on_the_device(run, rounds) for name, run in runs.items()}
    print(f"\npacking {length * 4 / 1e6:.0f} MB in {len(shapes)} arrays, median of {rounds}")
    for name, each in seconds.items():
        ratio = seconds["copy on the device"] / each
        print(f"  {name:<22} {each * 1e6:8.0f} us  {2 * length * 4 / each / 1e9:7.0f} GB/s  {ratio:6.1%} of a copy")


def on_the_device(run: Callable[[], object], rounds: int) -> float:
    """Return the median seconds between two events around a run."""
    import cupy

    times = []
    for _ in range(rounds + 3):
        begin, end = cupy.cuda.Event(), cupy.cuda.Event()
        begin.record()
        run()
        end.record()
        end.synchronize()
        times.append(cupy.cuda.get_elapsed_time(begin, end) / 1e3)
    return statistics.median(times[3:])


def averaging(shapes: list[tuple[int, ...]], rounds: int) -> None:
    """Print the times of averages, until the device has finished."""
    import cupy

    model = Model(shapes)
    contestants = {}
    warnings.filterwarnings("ignore", message="gradients on devices are averaged through host memory")
    for name in NAMES:
        comm = create_communicator(name)

        def average(comm: Any = comm) -> None:
            comm.multi_node_mean_grad(model)
            cupy.cuda.get_current_stream().synchronize()

        contestants[name] = average
    seconds = interleave(contestants, rounds, prepare=lambda name: model.restore())
    table(f"averaging on {WORLD.size} ranks", seconds, {"naive": seconds["naive"]})


if __name__ == "__main__":
    main()
