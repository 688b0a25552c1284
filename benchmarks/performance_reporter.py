"""The cost of the extension PerformanceReporter, in steps of 20 ms.

    mpiexec -n 2 python benchmarks/performance_reporter.py

Steps with and without the extension take turns, so that both meet the same noise. A step waits until 20 ms have passed,
so the extension's part is timed by itself; a report, which is collective, counts for all steps between two reports.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from types import SimpleNamespace

import chainer
import chainermn
import numpy as np

STEP = 0.02


def main() -> None:
    """Measure, and print the result on rank 0."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--reports", type=int, default=10, help="how many reports to measure")
    parser.add_argument("--steps", type=int, default=100, help="how many iterations there are between two reports")
    args = parser.parse_args()
    comm = chainermn.create_communicator()
    model = chainer.links.Linear(1000, 1000)
    optimizer = chainermn.create_multi_node_optimizer(chainer.optimizers.SGD(0), comm).setup(model)
    updater = SimpleNamespace(get_optimizer=lambda _: optimizer, get_iterator=lambda _: SimpleNamespace(batch_size=32))
    trainer = SimpleNamespace(updater=updater)
    reports = [False]
    reporter = chainermn.extensions.PerformanceReporter(comm, report_trigger=lambda _: reports[0])
    x = np.ones((8, 1000), np.float32)
    plain, counted, reported = [], [], []
    with chainer.Reporter().scope({}):
        for i in range(2 * args.reports * args.steps):
            began = time.perf_counter()
            optimizer.update(lambda: chainer.functions.sum(model(x)))
            time.sleep(max(0.0, began + STEP - time.perf_counter()))
            comm.barrier()  # a report is no slower because ranks would wait for each other a little later
            before = time.perf_counter()
            if i % 2:
                reports[0] = i % (2 * args.steps) == 2 * args.steps - 1
                reporter(trainer)
            after = time.perf_counter()
            (plain if not i % 2 else reported if reports[0] else counted).append(after - before)
            reports[0] = False
    if comm.rank == 0:
        per_step = statistics.median(counted) - statistics.median(plain)
        per_report = statistics.median(reported)
        share = (per_step + per_report / args.steps) / STEP
        sys.stdout.write(
            f"{1e6 * per_step:.1f} µs in a step, {1e6 * per_report:.0f} µs in a report, one in {args.steps} steps: "
            f"{100 * share:.3f} % of {1000 * STEP:.0f} ms\n"
        )


if __name__ == "__main__":
    main()
