"""Time MultiNodeBatchNormalization against Chainer's own BatchNormalization.

    mpiexec -n 2 python benchmarks/batch_normalization.py

Each step is a forward and a backward pass. Chainer's link runs on all ranks at the same time, on a batch of the same
size, so that both share the machine in the same way. The two alternate, and the barrier before each step is not timed.
Our link takes longer because of its reductions; the table also shows the time of these alone, with the same buffers.
"""

import argparse
import statistics
import time

import chainer
import chainer.links as L
import chainermn
import numpy as np


def parse_arguments():
    """Return the command line's options."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", type=int, nargs="+", default=[64, 256, 8, 8], help="of each rank's batch")
    parser.add_argument("--steps", type=int, default=30, help="steps to time, after five to warm up")
    return parser.parse_args()


def time_step(comm, link, x, gy):
    """Return the seconds of a forward and a backward pass."""
    link.cleargrads()
    comm.mpi_comm.Barrier()
    begin = time.perf_counter()
    y = link(x)
    y.grad = gy
    y.backward()
    return time.perf_counter() - begin


def time_reductions(comm, channels):
    """Return the seconds of a step's two reductions alone."""
    forward, backward = np.zeros(1 + 2 * channels), np.zeros((2, channels))
    comm.mpi_comm.Barrier()
    begin = time.perf_counter()
    comm.allgather(forward)
    comm.allreduce(backward)
    return time.perf_counter() - begin


def main():
    """Time the three in turn and print a table."""
    args = parse_arguments()
    comm = chainermn.create_communicator("naive")
    random = np.random.RandomState(comm.rank)
    x, gy = (random.randn(*args.shape).astype(np.float32) for _ in range(2))
    x = chainer.Variable(x)
    channels = args.shape[1]
    ours, theirs = chainermn.links.MultiNodeBatchNormalization(channels, comm), L.BatchNormalization(channels)
    seconds = [[], [], []]
    for step in range(args.steps + 5):
        row = [time_step(comm, theirs, x, gy), time_step(comm, ours, x, gy), time_reductions(comm, channels)]
        if step >= 5:
            for column, value in zip(seconds, row, strict=True):
                column.append(value)
    chainers, mine, reductions = (1e3 * statistics.median(column) for column in seconds)
    # The slowest rank determines the time.
    chainers, mine, reductions = (
        max(values) for values in zip(*comm.allgather_obj((chainers, mine, reductions)), strict=True)
    )
    if comm.rank == 0:
        print(f"{comm.size} ranks, batches of shape {tuple(args.shape)}, float32, medians of {args.steps} steps")
        print(f"chainer.links.BatchNormalization   {chainers:8.2f} ms")
        print(f"MultiNodeBatchNormalization        {mine:8.2f} ms")
        print(f"its reductions alone               {reductions:8.2f} ms")
        print(f"ratio without the reductions       {(mine - reductions) / chainers:8.2f}")


if __name__ == "__main__":
    main()
