"""The job that runs on every rank: it records the calls of each strategy, compares them, and times the averages."""

from __future__ import annotations

import json
import statistics
from collections.abc import Callable, Sequence
from itertools import zip_longest
from pathlib import Path
from typing import Any

import numpy as np
from common import timed
from mpi4py import MPI

import mn_comm
from simulation.messages import calls
from simulation.recorder import record

__all__ = ["run"]

WORLD = MPI.COMM_WORLD
LINK = Path("/sys/class/net/eth0/statistics/tx_bytes")


class Param:
    """A minimal parameter for mn_comm: of many ranks, each should need little memory."""

    def __init__(self, length: int) -> None:
        self.data = self.grad = np.zeros(length, np.float32)


class Model:
    """A model that consists only of gradients."""

    def __init__(self, lengths: Sequence[int]) -> None:
        self.params = [Param(length) for length in lengths]

    def namedparams(self) -> list[tuple[str, Param]]:
        """Return the names and parameters."""
        return [(f"/{i:04}", param) for i, param in enumerate(self.params)]


def run(hosts: list[int], contestants: list[list[str]], model: str, lengths: list[int], rounds: int) -> None:
    """Print, on rank 0, a line of JSON for each contestant.

    Args:
        hosts: How many ranks each node has. If the job runs on a single host, ranks pretend to run on these nodes.
        contestants: Strategies, each with a compression or an empty string.
        model: The name of the gradients.
        lengths: The number of elements of each gradient.
        rounds: How often each average is timed.
    """
    node = next(i for i in range(len(hosts)) if WORLD.rank < sum(hosts[: i + 1]))
    is_pretended = len(set(WORLD.allgather(MPI.Get_processor_name()))) == 1
    if is_pretended:
        MPI.Get_processor_name = lambda: f"node{node}"  # type: ignore[method-assign]
    gradients = Model(lengths)
    for strategy, compression in contestants:
        comm = mn_comm.create_communicator(strategy)
        average = averaging(comm, gradients, compression)
        line = {"hosts": hosts, "strategy": strategy, "compression": compression, "model": model}
        line |= check(average, list(calls(strategy, hosts, WORLD.rank, lengths, compression)))
        if rounds and not is_pretended:
            line |= measure(average, rounds)
        if WORLD.rank == 0:
            print(json.dumps({**line, "nbytes": 4 * sum(lengths), "arrays": len(lengths)}), flush=True)
        comm.finalize()


def averaging(comm: Any, model: Model, compression: str) -> Callable[[], None]:
    """Return the function that averages, after its first calls, in which buckets are made."""
    average = lambda: comm.multi_node_mean_grad(model)  # noqa: E731
    if compression:
        import mn_compress

        reducer = comm.gradient_reducer(compression=getattr(mn_compress, compression)())
        average = lambda: reducer.average(model)  # noqa: E731
    for _ in range(2):
        average()
    return average


def check(average: Callable[[], None], expected: list[Any]) -> dict[str, Any]:
    """Record an average, and compare it on every rank with the calls that were expected; collective."""
    with record() as found:
        average()
    different = [i for i, (a, b) in enumerate(zip_longest(found, expected)) if a != b]
    first = [(i, found[i : i + 1], expected[i : i + 1]) for i in different[:1]]
    reports = WORLD.allgather((first, len(found), sum(call.nbytes for call in found)))
    differing = [(rank, *each[0]) for rank, each in enumerate(reports) if each[0]]
    return {
        "ranks_as_generated": WORLD.size - len(differing),
        "first_difference": str(differing[:1])[:500] if differing else "",
        "calls": sum(count for _, count, _ in reports),
        "bytes_of_calls": sum(nbytes for *_, nbytes in reports),
    }


def measure(average: Callable[[], None], rounds: int) -> dict[str, Any]:
    """Return the seconds of an average, and the bytes on the links of hosts as the kernel counts them; collective."""
    seconds, sent = [], []
    for _ in range(rounds):
        WORLD.Barrier()
        before = bytes_sent()
        seconds.append(timed(average))
        sent.append(WORLD.allgather((MPI.Get_processor_name(), bytes_sent() - before)))
    links = [list(dict(each).values()) for each in sent]
    return {
        "seconds": statistics.median(seconds),
        "fastest": min(seconds),
        "all_seconds": seconds,
        "link_bytes": statistics.median(sum(each) for each in links),
        "most_link_bytes": statistics.median(max(each) for each in links),
    }


def bytes_sent() -> int:
    """Return how many bytes this host has sent."""
    return int(LINK.read_text()) if LINK.exists() else 0
