"""Gradients on a GPU: packing beside a copy of as many bytes, and strategies beside NCCL and MPI alone.

Use ``python benchmarks/gpu.py`` for packing; use ``mpiexec -n 2 python benchmarks/gpu.py`` to measure averages as well,
with ``NCCL_MULTI_RANK_GPU_ENABLE=1`` if the ranks share a GPU.
"""

from __future__ import annotations

import argparse
import functools
import statistics
import time
import warnings
from collections.abc import Callable
from typing import Any

import numpy as np
from common import WORLD, interleave, table
from models import MODELS
from mpi4py import MPI

from mn_comm import create_communicator

NAMES = ("naive", "flat", "hierarchical", "non_cuda_aware", "pure_nccl")
ALL_REDUCE, STAGED = "NCCL's all-reduce", "copy, MPI, copy back"
DTYPES = (("float32", "float32"), ("float32", "float16"), ("float16", "float16"))  # of gradients, and as sent
AT_ONCE = 10  # launches that are timed together
# Keeps the device busy while the host submits what is timed.
BUSY = """extern "C" __global__ void wait(long long cycles) {
    for (const long long begin = clock64(); clock64() - begin < cycles;);
}"""
CYCLES = 100_000_000  # longer than the host needs for AT_ONCE launches of every gradient


class Param:
    """A parameter."""

    def __init__(self, data: Any) -> None:
        self.data = data
        self.grad = data.copy()


class Model:
    """A model with parameters of these shapes."""

    def __init__(self, shapes: list[tuple[int, ...]], dtype: str = "float32") -> None:
        import cupy

        self.named = [(f"/p{i:04}", Param(cupy.ones(shape, dtype))) for i, shape in enumerate(shapes)]

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
        for grad, wire in DTYPES:
            packing(MODELS[options.model], grad, wire, options.rounds)
    if WORLD.size > 1:
        averaging(MODELS[options.model], options.rounds)


def packing(shapes: list[tuple[int, ...]], grad: str, wire: str, rounds: int) -> None:
    """Print the times of packing and of a copy that reads and writes as many bytes, on the device and on the host."""
    import cupy

    from mn_comm.basis.config import Config
    from mn_comm.gradients.layout import Layout
    from mn_comm.gradients.signature import signature_of
    from mn_comm.gradients.strategies import STRATEGIES
    from mn_comm.ranks.context import contexts_of

    grads = [param.grad for _, param in Model(shapes, grad).named]
    signature = signature_of((f"/p{i}", array) for i, array in enumerate(grads))
    alone = STRATEGIES["dummy"](contexts_of(MPI.COMM_SELF).foreground)
    length = sum(int(np.prod(shape)) for shape in shapes)
    moved = length * (np.dtype(grad).itemsize + np.dtype(wire).itemsize)
    source, target = (cupy.ones(moved // 2, np.uint8) for _ in range(2))

    def bucket_of(batched: bool) -> Any:
        config = Config(batched_copy=batched, allreduce_grad_dtype=np.dtype(wire))
        layout = Layout(alone, signature, grads, (), config, bucket_bytes=None, whole=False, lasting=False)
        (bucket,) = layout.buckets().buckets
        return bucket

    together, apart = bucket_of(True), bucket_of(False)
    stream, kind = cupy.cuda.get_current_stream(), cupy.cuda.runtime.memcpyDeviceToDevice
    copy = functools.partial(
        cupy.cuda.runtime.memcpyAsync, target.data.ptr, source.data.ptr, source.nbytes, kind, stream.ptr
    )
    runs = {
        "copy": copy,
        "pack, one launch for all": lambda: together.pack(grads),
        "unpack, one launch for all": lambda: together.unpack(grads, together.flat),
        "pack, one launch for each": lambda: apart.pack(grads),
    }
    seconds = {name: on_the_device(run, rounds) for name, run in runs.items()}
    print(f"\n{len(shapes)} arrays of {grad}, sent as {wire}: {moved / 1e6:.0f} MB read and written")
    print(f"{'':28}{'us':>8}{'GB/s':>8}{'of a copy':>12}{'us of the host':>18}")
    for name, (device, host) in seconds.items():
        share = seconds["copy"][0] / device
        print(f"{name:28}{device * 1e6:8.0f}{moved / device / 1e9:8.0f}{share:12.0%}{host * 1e6:18.0f}")


def on_the_device(run: Callable[[], object], rounds: int) -> tuple[float, float]:
    """Return the median seconds of a run on the device, and of the call that submits it."""
    import cupy

    busy = cupy.RawKernel(BUSY, "wait")
    on_device, on_host = [], []
    for _ in range(rounds + 3):
        begin, end = cupy.cuda.Event(), cupy.cuda.Event()
        busy((1,), (1,), (np.int64(CYCLES),))
        begin.record()
        started = time.perf_counter()
        for _ in range(AT_ONCE):
            run()
        on_host.append((time.perf_counter() - started) / AT_ONCE)
        end.record()
        end.synchronize()
        on_device.append(cupy.cuda.get_elapsed_time(begin, end) / 1e3 / AT_ONCE)
    return statistics.median(on_device[3:]), statistics.median(on_host[3:])


def until_done(average: Callable[[Model], object], model: Model) -> Callable[[], object]:
    """Return a function that averages the gradients of a model, and waits until the device has finished."""
    import cupy

    def run() -> None:
        average(model)
        cupy.cuda.get_current_stream().synchronize()

    return run


def averaging(shapes: list[tuple[int, ...]], rounds: int) -> None:
    """Print the times of averages, until the device has finished."""
    model = Model(shapes)
    contestants = bare(sum(int(np.prod(shape)) for shape in shapes))
    warnings.filterwarnings("ignore", message="gradients on devices are averaged through host memory")
    contestants |= {name: until_done(create_communicator(name).multi_node_mean_grad, model) for name in NAMES}
    seconds = interleave(contestants, rounds, prepare=lambda name: model.restore())
    table(f"averaging on {WORLD.size} ranks", seconds, {name: seconds[name] for name in (ALL_REDUCE, STAGED)})


def bare(length: int) -> dict[str, Callable[[], object]]:
    """Return what NCCL and MPI do with one array of this length, without packing."""
    import cupy

    from mn_comm.device import nccl

    communicator = nccl.NcclCommunicator(WORLD.size, WORLD.bcast(nccl.get_unique_id()), WORLD.rank)
    array, stream = cupy.ones(length, np.float32), cupy.cuda.get_current_stream()
    pinned = np.frombuffer(cupy.cuda.alloc_pinned_memory(array.nbytes), np.float32, length)

    def all_reduce() -> None:
        communicator.all_reduce(array, mean=True)
        stream.synchronize()

    def staged() -> None:
        array.get(out=pinned)
        WORLD.Allreduce(MPI.IN_PLACE, pinned)
        pinned[...] /= WORLD.size
        array.set(pinned)
        stream.synchronize()

    return {ALL_REDUCE: all_reduce, STAGED: staged}


if __name__ == "__main__":
    main()
