"""The time and memory of scatter_dataset on all ranks together, compared with the copy in Chainer's wheel.

    python benchmarks/scatter.py

Both take turns, each time in a new job. Memory is the difference between the peak resident size of each rank and its
size before the call, added up over the ranks; the dataset itself exists on rank 0 before.
"""

import argparse
import os
import resource
import shutil
import statistics
import subprocess
import sys
import time

CASES = {
    "array": "400 MB of float32",
    "shuffled": "400 MB of float32, shuffled",
    "tuples": "1,000,000 tuples (int, float)",
    "pairs": "100,000 tuples (float32 array of 20, int32)",
    "large": "3 GB of float32",
}


def make(case):
    """Return the dataset of a case."""
    import numpy as np

    if case in ("array", "shuffled"):
        return np.ones((100_000, 1000), np.float32)
    if case == "tuples":
        return [(i, float(i)) for i in range(1_000_000)]
    if case == "pairs":
        return [(np.full(20, i, np.float32), np.int32(i)) for i in range(100_000)]
    return np.ones((750_000, 1000), np.float32)


def resident():
    """Return how many bytes of this process are in memory now."""
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * resource.getpagesize()


def peak():
    """Return the peak number of bytes of this process in memory."""
    with open("/proc/self/status") as file:
        return next(int(line.split()[1]) for line in file if line.startswith("VmHWM")) * 1024


def measure(case):
    """Run on one rank of one job; rank 0 prints seconds and bytes."""
    import chainermn

    comm = chainermn.create_communicator("naive")
    dataset = make(case) if comm.rank == 0 else None
    comm.mpi_comm.Barrier()
    before = resident()
    with open("/proc/self/clear_refs", "w") as file:
        file.write("5")  # reset the peak
    begin = time.perf_counter()
    mine = chainermn.scatter_dataset(dataset, comm, shuffle=case == "shuffled", seed=0)
    end = time.perf_counter()
    # Ranks that have finished wait idly: on a small machine, MPI's own waiting would slow down the others.
    request = comm.mpi_comm.Ibarrier()
    while not request.Test():
        time.sleep(0.001)
    seconds = max(comm.mpi_comm.allgather(end)) - min(comm.mpi_comm.allgather(begin))
    extra = sum(comm.mpi_comm.allgather(peak() - before))
    assert len(mine) * comm.size in range(1, 10**7)
    if comm.rank == 0:
        print("measured", seconds, extra, flush=True)


def job(case, ranks, implementation):
    """Return the seconds and bytes of one job, or why it failed."""
    launcher = shutil.which("mpiexec", path=os.path.dirname(sys.executable)) or "mpiexec"
    environ = {**os.environ, "CHAINERMN_IMPL": implementation, "OMP_NUM_THREADS": "1"}
    command = [launcher, "-n", str(ranks), sys.executable, __file__, "--measure", case]
    done = subprocess.run(command, env=environ, capture_output=True, text=True)
    lines = [line.split() for line in done.stdout.splitlines() if line.startswith("measured")]
    if done.returncode or not lines:
        return (done.stderr.strip().splitlines() or ["no message"])[-1][:60]
    return float(lines[0][1]), float(lines[0][2])


def main():
    """Parse the arguments, and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", nargs="+", choices=CASES, default=["array", "shuffled", "tuples", "pairs"])
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--repeat", type=int, default=3)
    parser.add_argument("--measure", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.measure:
        measure(args.measure)
        return
    print("| case | ranks | ours: s | MB | bundled: s | MB | time | memory |\n|---|---|---|---|---|---|---|---|")
    for case in args.cases:
        runs = {"": [], "bundled": []}
        for _ in range(args.repeat):
            for implementation, found in runs.items():
                found.append(job(case, args.ranks, implementation))
        print(row(case, args.ranks, runs[""], runs["bundled"]), flush=True)


def row(case, ranks, ours, bundled):
    """Return a line of the table."""
    failed = [each for each in ours + bundled if isinstance(each, str)]
    if failed:
        return f"| {CASES[case]} | {ranks} | {ours[0]} | | {bundled[0]} | | | |"
    (t, m), (bt, bm) = (map(statistics.median, zip(*runs, strict=True)) for runs in (ours, bundled))
    numbers = f"{t:.2f} | {m / 1e6:.0f} | {bt:.2f} | {bm / 1e6:.0f} | {t / bt:.2f} | {m / bm:.2f}"
    return f"| {CASES[case]} | {ranks} | {numbers} |"


if __name__ == "__main__":
    main()
