"""Compression of gradients on a GPU: quantising beside a copy, and compressed averages beside exact ones.

Use ``python benchmarks/gpu_compression.py`` for quantising; under ``mpiexec -n 2``, it measures averages as well. If
the ranks share a GPU, set ``NCCL_MULTI_RANK_GPU_ENABLE=1``.
"""

from __future__ import annotations

import argparse
import warnings
from typing import Any

import numpy as np
from common import WORLD, interleave, table
from gpu import Model, on_the_device, until_done
from models import MODELS

from mn_comm import create_communicator
from mn_compress import Int8, OneBit, PowerSGD, TopK
from mn_compress.kernels import Int8Kernels, OneBitKernels

EXACT = "exact"
KINDS = {"Int8()": Int8(), "OneBit()": OneBit(), "TopK(0.01)": TopK(0.01), "PowerSGD(4)": PowerSGD(4, start_iter=0)}
CODECS = {"Int8()": Int8Kernels(Int8.block), "OneBit()": OneBitKernels(OneBit.block)}


def main() -> None:
    """Print the tables."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="resnet50", choices=MODELS)
    parser.add_argument("--strategies", default="pure_nccl,hierarchical,flat", help="separated by commas")
    parser.add_argument("--rounds", type=int, default=15)
    options = parser.parse_args()
    import cupy

    cupy.cuda.Device(WORLD.rank % cupy.cuda.runtime.getDeviceCount()).use()
    shapes = MODELS[options.model]
    if WORLD.rank == 0:
        quantising(sum(int(np.prod(shape)) for shape in shapes), options.rounds)
    for name in options.strategies.split(",") if WORLD.size > 1 else ():
        averaging(name, shapes, options.rounds)


def quantising(length: int, rounds: int) -> None:
    """Print the times of encoding and decoding numbers, and their part of the speed of a copy on the device."""
    import cupy

    original = cupy.random.standard_normal(length, dtype=np.float32)
    values = original.copy()
    copy, submitting = on_the_device(lambda: cupy.copyto(values, original), rounds)
    print(f"\n{length / 1e6:.1f} million numbers of float32; a copy takes {copy * 1e6:.0f} us")
    print(f"{'':28}{'us':>8}{'of a copy':>12}{'us of the host':>18}")
    for name, codec in CODECS.items():
        message = cupy.empty(codec.nbytes(length), np.uint8)

        def encode(codec: Any = codec, message: Any = message) -> None:
            cupy.copyto(values, original)  # encoding leaves nearly nothing of them
            codec.encode(values, message, None)

        device, host = on_the_device(encode, rounds)
        encoding = device - copy, host - submitting
        decoding = on_the_device(lambda codec=codec, message=message: codec.decode(message, values), rounds)
        for what, passes, (device, host) in (("encode", 2, encoding), ("decode", 1, decoding)):
            share = (passes * values.nbytes + message.nbytes) / device / (2 * values.nbytes / copy)
            print(f"{name + ', ' + what:28}{device * 1e6:8.0f}{share:12.0%}{host * 1e6:18.0f}")


def averaging(name: str, shapes: list[tuple[int, ...]], rounds: int) -> None:
    """Print the times of averages with a strategy, until the device has finished."""
    import cupy

    warnings.filterwarnings("ignore", message="gradients on devices are averaged through host memory")
    comm, model = create_communicator(name), Model(shapes)
    for _, param in model.named:
        param.data = cupy.random.standard_normal(param.data.shape, dtype=np.float32)

    means = {EXACT: comm.multi_node_mean_grad}
    means |= {kind: comm.gradient_reducer(compression=how).average for kind, how in KINDS.items()}
    contestants = {kind: until_done(average, model) for kind, average in means.items()}
    seconds = interleave(contestants, rounds, prepare=lambda kind: model.restore())
    table(f"{name}, {WORLD.size} ranks", seconds, {EXACT: seconds[EXACT]})
    comm.finalize()


if __name__ == "__main__":
    main()
