"""The cost of a join while all ranks have data: steps within a join and outside, in turn.

    mpiexec -n 2 python benchmarks/join.py [--models mlp,small] [--rounds 200]

A step consists of averaging the gradients of a model and an update by SGD, without a forward and a backward pass:
everything that a join could slow down, and nothing that would hide it. With the passes, the same time would be added to
a longer step. The scheme ``plain, 0.1 ms more`` keeps busy for that long in each step, which shows the resolution of
the measurement.
"""

from __future__ import annotations

import argparse
import statistics
import time
from contextlib import ExitStack
from typing import Any

import chainer
import numpy as np
from common import WORLD, keep
from models import MODELS

import mn_optim
from mn_comm import create_communicator

SCHEMES: dict[str, mn_optim.When] = {
    "plain": mn_optim.AfterBackward(),
    "overlap": mn_optim.DuringBackward(),
    "double_buffering": mn_optim.OneStepLate(),
}
CONTROL_SECONDS = 1e-4


class Net(chainer.Link):
    """A link with the parameters of a model of the benchmarks."""

    def __init__(self, shapes: list[tuple[int, ...]]) -> None:
        super().__init__()
        with self.init_scope():
            for i, shape in enumerate(shapes):
                setattr(self, f"w{i}", chainer.Parameter(np.zeros(shape, np.float32)))


def measure(shapes: list[tuple[int, ...]], when: mn_optim.When, rounds: int, control: bool) -> dict[bool, float]:
    """Return the median seconds of a step on the slowest rank, outside of a join and within."""
    comm = create_communicator("two_dimensional")
    optimizer = mn_optim.MultiNodeOptimizer(chainer.optimizers.SGD(lr=0.01), comm, when)
    optimizer.setup(Net(shapes))
    grads = {name: np.full(param.shape, comm.rank, np.float32) for name, param in optimizer.target.namedparams()}
    seconds: dict[bool, list[float]] = {False: [], True: []}
    for round_ in range(rounds + 4):
        for within in (False, True) if round_ % 2 else (True, False):
            with ExitStack() as stack:
                if within and not control:
                    stack.enter_context(optimizer.join())
                pause = CONTROL_SECONDS if within and control else 0
                elapsed = [step(optimizer, grads, pause) for _ in range(10)]  # entering and leaving is not timed
            if round_ >= 4:
                seconds[within] += WORLD.allreduce(np.array(elapsed), op=_greatest).tolist()
    comm.finalize()
    return {within: statistics.median(each) for within, each in seconds.items()}


def step(optimizer: Any, grads: dict[str, Any], pause: float) -> float:
    """Return the seconds of a step on this rank, if it keeps busy for some seconds first."""
    for name, param in optimizer.target.namedparams():
        param.grad = grads[name]
    WORLD.Barrier()
    begin = time.perf_counter()
    while time.perf_counter() - begin < pause:
        pass
    optimizer.update()
    return time.perf_counter() - begin


def _greatest(a: Any, b: Any) -> Any:
    return np.maximum(a, b)


def main() -> None:
    """Measure, and print a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", default="mlp,small", help=f"some of {', '.join(MODELS)}")
    parser.add_argument("--rounds", type=int, default=100, help="of ten steps each, outside and within")
    parser.add_argument("--json", default="", help="a file to add the figures to, as lines of JSON")
    args = parser.parse_args()
    contestants = {
        **{name: (when, False) for name, when in SCHEMES.items()},
        "plain, 0.1 ms more": (mn_optim.AfterBackward(), True),
    }
    for model in args.models.split(","):
        found = {name: measure(MODELS[model], each[0], args.rounds, each[1]) for name, each in contestants.items()}
        if WORLD.rank == 0:
            megabytes = sum(int(np.prod(shape)) for shape in MODELS[model]) * 4 / 1e6
            print(f"\n{model}: {len(MODELS[model])} arrays, {megabytes:.1f} MB, {WORLD.size} ranks: ms a step")
            print(f"{'':24}{'outside':>10}{'within':>10}{'ratio':>10}")
            for name, each in found.items():
                print(f"{name:24}{each[False] * 1e3:10.3f}{each[True] * 1e3:10.3f}{each[True] / each[False]:10.3f}")
        keep(
            args.json,
            benchmark="join",
            model=model,
            seconds={f"{k}, {w}": s for k, v in found.items() for w, s in v.items()},
        )


if __name__ == "__main__":
    main()
