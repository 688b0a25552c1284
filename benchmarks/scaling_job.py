"""The job that scaling.py runs on every process: it times the strategies on gradients of several shapes."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
from common import interleave, settle
from mpi4py import MPI

import mn_comm

__all__ = ["run"]

WORLD = MPI.COMM_WORLD


class Param:
    """A minimal parameter for mn_comm."""

    def __init__(self, shape: tuple[int, ...]) -> None:
        self.data = np.zeros(shape, np.float32)
        self.grad = np.zeros(shape, np.float32)


class Gradients:
    """A model that consists only of gradients."""

    def __init__(self, shapes: Sequence[tuple[int, ...]]) -> None:
        self.params = [Param(shape) for shape in shapes]
        random = np.random.RandomState(WORLD.rank)
        self.original = [random.rand(*shape).astype(np.float32) for shape in shapes]

    def namedparams(self) -> Iterator[tuple[str, Param]]:
        """Yield the names and parameters."""
        for i, param in enumerate(self.params):
            yield f"/{i:04}", param

    def refresh(self, _name: str = "") -> None:
        """Create gradients as a backward pass would: new arrays that have just been written."""
        for param, original in zip(self.params, self.original, strict=True):
            np.copyto(param.grad, original)


def run(hosts: list[int], strategies: list[str], shapes: list, rounds: int) -> None:
    """Print, on rank 0, a line of JSON for each strategy and shape."""
    for shape, fitted in shapes:
        arrays = shapes_of(shape)
        nbytes = 4 * sum(int(np.prod(each)) for each in arrays)
        for name, seconds in measure(strategies, Gradients(arrays), rounds).items():
            line = {"strategy": name, "hosts": hosts, "shape": shape, "nbytes": nbytes, "arrays": len(arrays)}
            if WORLD.rank == 0:
                print(json.dumps({**line, "fitted": fitted, "seconds": seconds}))


def shapes_of(shape: Any) -> list[tuple[int, ...]]:
    """Return the shapes of the gradients: those of a model, or a number of megabytes in a number of arrays."""
    if isinstance(shape, str):
        from models import MODELS

        return MODELS[shape]
    megabytes, arrays = shape
    return [(int(megabytes * 2**20) // 4 // arrays,)] * arrays


def measure(strategies: list[str], model: Gradients, rounds: int) -> dict[str, float]:
    """Return the median seconds of each strategy."""
    comms = {name: mn_comm.create_communicator(name) for name in strategies}
    contestants = {name: lambda comm=comm: comm.multi_node_mean_grad(model) for name, comm in comms.items()}
    for comm in comms.values():
        settle(comm, model, model.refresh)
    seconds = interleave(contestants, rounds, prepare=model.refresh, warm_up=2)
    for comm in comms.values():
        comm.finalize()
    return seconds
