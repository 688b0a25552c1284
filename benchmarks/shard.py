"""The time of a step and the memory of a rank, with the whole optimizer state on each rank and with sharded state.

    mpiexec -n 4 python benchmarks/shard.py

It uses Adam with the parameters of a ResNet-50 (102 MB in 161 arrays), whose gradients have been computed already. A
step consists of averaging, the update and, with sharding, gathering the parameters. With sharding, each mean is sent
only to the owner of the parameter or, if a hook sees all gradients, to all ranks. Memory is the difference from before
the process created the model: in the optimizer's state, and at the peak of some steps. Memory that ranks share counts
by this rank's part of it.
"""

from __future__ import annotations

import argparse
import ctypes
import gc
import re
from pathlib import Path
from typing import Any

import chainer
import numpy as np
from common import AVERAGES_TO_SETTLE, WORLD, interleave, keep, table
from models import MODELS, make_model

import mn_optim
from mn_comm import create_communicator

WAYS = {"sharded": (True, False), "sharded, all means everywhere": (True, True), "whole": (False, False)}
"""Whether the state is sharded, and whether a hook wants to see all gradients."""
MIB = 1 << 20


def make(comm: Any, kind: str, model: str, sharded: bool, sees_all: bool) -> Any:
    """Return an optimizer whose model has gradients, after its first step."""
    target = make_model(MODELS[model])
    random = np.random.RandomState(comm.rank)
    for param in target.params():
        param.data[...] = random.rand(*param.shape)
    actual = getattr(chainer.optimizers, kind)()
    when = mn_optim.Sharded() if sharded else mn_optim.AfterBackward()
    optimizer = mn_optim.MultiNodeOptimizer(actual, comm, when).setup(target)
    if sees_all:
        optimizer.add_hook(lambda optimizer: None, name="sees all gradients")
    for _ in range(3):
        compute(optimizer.target)
        optimizer.update()
    return optimizer


def compute(target: chainer.Link) -> None:
    """Create gradients in memory of their own, as after a backward pass."""
    target.cleargrads()
    for param in target.params():
        param.grad = param.data * np.float32(0.01)


def resident(what: str) -> int:
    """Return a number of bytes that the kernel reports for this process."""
    found = re.search(rf"^{what}:\s+(\d+) kB", Path("/proc/self/status").read_text(), re.M)
    return int(found[1]) * 1024 if found else 0


def use(comm: Any, *what: Any) -> tuple[int, int]:
    """Return the size of the optimizer's state on this rank, and the peak memory of training, in bytes."""
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)  # so that freed memory is not reused
    Path("/proc/self/clear_refs").write_text("5")  # reset the peak to the current value
    before = resident("VmRSS") - resident("RssShmem")
    optimizer = make(comm, *what)
    rules = [param.update_rule for param in optimizer.target.params()]
    state = sum(array.nbytes for rule in rules for array in (rule.state or {}).values())
    shared = resident("RssShmem")
    return state, resident("VmHWM") - shared + shared // comm.size - before


def main() -> None:
    """Measure, and print tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--communicator", default="two_dimensional")
    parser.add_argument("--model", default="resnet50", choices=MODELS)
    parser.add_argument("--optimizer", default="Adam", help="one of chainer.optimizers")
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--json", default="", help="a file to add the figures to, as a line of JSON")
    args = parser.parse_args()
    comm = create_communicator(args.communicator)
    what = args.optimizer, args.model
    used = {name: np.max(comm.allgather_obj(use(comm, *what, *way)), 0) for name, way in WAYS.items()}
    optimizers = {name: make(comm, *what, *way) for name, way in WAYS.items()}
    for optimizer in optimizers.values():
        for _ in range(AVERAGES_TO_SETTLE):  # each layout of gradients determines separately how often ranks meet
            compute(optimizer.target)
            optimizer.update()
    steps = {name: optimizer.update for name, optimizer in optimizers.items()}
    seconds = interleave(steps, args.rounds, prepare=lambda name: compute(optimizers[name].target))
    title = f"{args.optimizer}, {args.model}, {comm.size} ranks"
    table(f"a step: {title}", seconds, {"whole": seconds["whole"]})
    if WORLD.rank == 0:
        nbytes = sum(param.data.nbytes for param in optimizers["whole"].target.params())
        print(f"\nMiB on the rank that has most: {title}, {nbytes / MIB:.0f} MiB of parameters")
        print(f"{'':34}{'state':>10}{'/ whole':>10}{'peak':>10}{'/ parameters':>14}")
        for name, (state, peak) in used.items():
            of_whole = state / max(1, used["whole"][0])
            print(f"{name:34}{state / MIB:10.1f}{of_whole:10.3f}{peak / MIB:10.1f}{peak / nbytes:14.2f}")
        bound = 1.1 * (2 * nbytes + 0.3 * used["whole"][0])
        print(f"parameters, gradients, 0.30 of the whole state, and 10 %: {bound / MIB:.1f} MiB")
    bytes_ = {name: {"state": int(state), "peak": int(peak)} for name, (state, peak) in used.items()}
    keep(args.json, benchmark="shard", optimizer=args.optimizer, model=args.model, seconds=seconds, bytes=bytes_)


if __name__ == "__main__":
    main()
