"""Prints which files and lines one update passes through, from ``optimizer.update`` to averaged gradients.

::

    mpiexec -n 2 python tools/trace_update.py
    mpiexec -n 4 python tools/trace_update.py --nodes 2 --files

It traces one update in the middle of a training, with gradients of several sizes that have already been computed. It
counts the lines of the functions that rank 0 calls in the packages of this repository, without docstrings, comments and
blank lines, and how many of these lines are executed. Code that only observes (the stall monitor's notes, the
timeline's spans) is counted separately. With ``--nodes``, the ranks pretend to run on this number of nodes.
"""

from __future__ import annotations

import argparse
import ast
import functools
import inspect
import sys
import threading
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

import chainermn  # isort: skip - before Chainer

import chainer
import numpy as np
from chainermn import optimizers
from mpi4py import MPI

from mn_comm import building_blocks

STRATEGIES = [name for name, kind in building_blocks.STRATEGIES.items() if kind.on_host and kind.communicates]
WHEN = {
    "plain": optimizers.AfterBackward(),
    "overlap": optimizers.DuringBackward(),
    "double_buffering": optimizers.OneStepLate(),
}
SHAPES = ((64,), (300, 500), (1000,), (700, 900), (10,))
PACKAGES = tuple(Path(sys.modules[name].__file__ or "").parent for name in ("mn_comm", "mn_optim"))
OBSERVERS = ("mn_comm/ranks/watch.py", "mn_comm/ranks/spans.py")


class Model(chainer.Link):
    """Parameters of several sizes."""

    def __init__(self) -> None:
        super().__init__()
        with self.init_scope():
            for i, shape in enumerate(SHAPES):
                setattr(self, f"p{i}", chainer.Parameter(np.zeros(shape, np.float32)))


@contextmanager
def traced() -> Iterator[dict[CodeType, set[int]]]:
    """Return a context that collects the called functions of this repository, and their executed lines."""
    found: dict[CodeType, set[int]] = defaultdict(set)

    def trace(frame: FrameType, event: str, _argument: Any) -> Callable[..., Any] | None:
        if event == "call" and not _is_ours(frame.f_code.co_filename):
            return None
        if event in ("call", "line"):
            found[frame.f_code].add(frame.f_lineno)
        return trace

    threading.settrace(trace)
    sys.settrace(trace)
    try:
        yield found
    finally:
        sys.settrace(None)
        threading.settrace(None)  # type: ignore[arg-type]


@functools.cache
def _is_ours(file: str) -> bool:
    return any(package in Path(file).parents for package in PACKAGES)


def lines_of_code(file: str) -> set[int]:
    """Return the numbers of the lines of a file that are neither blank nor comments nor docstrings."""
    text = Path(file).read_text()
    numbers = {i for i, line in enumerate(text.splitlines(), 1) if line.strip() and not line.strip().startswith("#")}
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str):
            numbers -= set(range(node.lineno, (node.end_lineno or node.lineno) + 1))
    return numbers


def count(found: dict[CodeType, set[int]]) -> dict[str, tuple[int, int]]:
    """Return for each file how many lines of code its called functions have, and how many of them were executed."""
    whole: dict[str, set[int]] = defaultdict(set)
    run: dict[str, set[int]] = defaultdict(set)
    for code, numbers in list(found.items()):  # with double buffering, a thread is still running
        lines, first = inspect.getsourcelines(code)
        whole[code.co_filename] |= set(range(first, first + len(lines)))
        run[code.co_filename] |= numbers
    return {
        str(Path(file).relative_to(next(p.parent for p in PACKAGES if p in Path(file).parents))): (
            len(whole[file] & lines_of_code(file)),
            len(run[file]),
        )
        for file in whole
    }


def update_of(mpi_comm: MPI.Intracomm, strategy: str, when: Any) -> dict[str, tuple[int, int]]:
    """Return the result of :func:`count` for one update; collective."""
    comm = chainermn.create_communicator(strategy, mpi_comm)
    model = Model()
    with traced() as found:  # from the beginning, because only threads that start later are traced
        optimizer = optimizers.MultiNodeOptimizer(chainer.optimizers.SGD(), comm, when).setup(model)
        for _ in range(4):  # the first broadcasts parameters, the second creates buckets
            for param in model.params():
                param.grad = np.full(param.shape, comm.rank, np.float32)
            found.clear()
            optimizer.update()
    return count(found)


def main() -> None:
    """Trace an update of each kind, and print the table on rank 0."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--nodes", type=int, default=1, help="how many nodes the ranks pretend to run on")
    parser.add_argument("--files", action="store_true", help="print the files, too")
    arguments = parser.parse_args()
    world = MPI.COMM_WORLD
    node = world.rank * arguments.nodes // world.size
    MPI.Get_processor_name = lambda: f"node{node}"  # type: ignore[method-assign]
    if world.rank == 0:
        print(f"{world.size} ranks, {arguments.nodes} nodes\n")
        print(f"{'strategy':16}{'scheme':18}{'files':>6}{'lines':>7}{'run':>6}   observers: files, lines")
    for strategy in STRATEGIES:
        if strategy == "single_node" and arguments.nodes > 1:
            continue
        for scheme, when in WHEN.items():
            counts = update_of(world.Dup(), strategy, when)
            path = {file: lines for file, lines in counts.items() if file not in OBSERVERS}
            seen = [counts[file][0] for file in OBSERVERS if file in counts]
            if world.rank == 0:
                lines, run = (sum(column) for column in zip(*path.values(), strict=True))
                print(f"{strategy:16}{scheme:18}{len(path):6}{lines:7}{run:6}{len(seen):14}{sum(seen):7}")
                for file, (lines, run) in sorted(path.items() if arguments.files else ()):
                    print(f"    {file:36}{lines:7}{run:6}")


if __name__ == "__main__":
    main()
