"""The cost of averaging gradients: a model of every strategy, linear in parameters that are fitted to measurements.

The time consists of latencies and bytes, each multiplied by a parameter: a message of s bytes takes alpha + s * beta
(Hockney, 1994: The communication challenge for MPP). An allreduce of s bytes over p processes is a reduce-scatter by
recursive halving and an all-gather by recursive doubling: 2 log2(p) messages, 2 (p - 1) / p * s bytes (Thakur,
Rabenseifner and Gropp, 2005: Optimization of collective communication operations in MPICH, section 4.5). If p is not a
power of two, the processes above the largest power of two first send their data to a neighbor, and get the result from
it at the end.

Gradients are sent in buckets, one after the other; in addition to the messages, there are copies and sums in memory.
``naive`` (one bucket for each gradient) and ``flat`` copy gradients to a bucket, let MPI add it up in place among all
processes, divide it, and copy it back. On nodes with one process each, the other strategies do the same. Otherwise,
they add up in memory that the processes of a node share: each process copies the parts that others add up to its own
memory, adds up one share of the bucket from the memory of all, and copies the sums of the other shares from there. In
between, they wait for each other at barriers. With several nodes, MPI averages the sums across nodes before the last
copy. See :mod:`mn_comm.gradients.strategies`.

If there are more processes than cores, they share the cores: their computation takes correspondingly longer, and a
process that waits for another one may also have to wait for a core.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

__all__ = [
    "PARAMETERS",
    "Machine",
    "Point",
    "allreduce_messages",
    "buckets",
    "exchanges",
    "features",
    "fit",
    "predict",
    "with_usable_cache",
]

PARAMETERS = {
    "call": "seconds of every call",
    "array": "seconds for each array",
    "copy": "seconds per byte that is read or written while arrays are copied or divided",
    "add": "seconds per byte that is read or written while shares in shared memory are added up",
    "miss": "seconds more per byte of gradients and buckets that the cache does not hold",
    "sync": "seconds of each message or barrier within a node",
    "shm": "seconds per byte of MPI's messages within a node",
    "far": "seconds more per byte of these that the cache does not hold",
    "crowd": "seconds more of every call where processes outnumber cores: until each has had its turn",
    "turn": "seconds more of each message or barrier within a node where processes outnumber cores",
    "hop": "seconds of each message between nodes",
    "wire": "seconds per byte on a node's link",
    "stall": "seconds more per byte of a long message between nodes, where its ends have to wait for their turns",
}
# Of each process's share in a bucket on a single node: if each process has a core, and if there are more processes.
SHARE_BYTES = 256 * 1024, 4 * 1024 * 1024
# Of other buckets: in memory that processes share, and in each process's own memory.
SHARED_BUCKET_BYTES, OWN_BUCKET_BYTES = 16 * 1024 * 1024, 4 * 1024 * 1024
SLOTS = 2  # of memory that processes share: buckets take turns
CHECK_BYTES = 32  # of the check that all processes have the same gradients
# MPICH fetches longer messages from their sender, which requires both ends to be running. With more hosts than cores, a
# pair was observed to send first in one direction and then in the other, which takes twice as long as both at once.
LONG_BYTES = 4 * 1024 * 1024
# Parts of the cache to try.
CACHE_PARTS = [i / 20 for i in range(20, 0, -1)]


@dataclass(frozen=True)
class Machine:
    """The machine on which the points were measured.

    Args:
        cores: The number of cores, for all processes together.
        cache_bytes: The size of the last-level cache, for all processes together.
    """

    cores: int
    cache_bytes: float


@dataclass(frozen=True)
class Point:
    """A configuration to measure.

    Args:
        strategy: The communicator's name.
        hosts: How many processes each node has.
        nbytes: The size of all gradients together.
        arrays: How many gradients there are.
    """

    strategy: str
    hosts: tuple[int, ...]
    nbytes: int
    arrays: int

    @property
    def ranks(self) -> int:
        """How many processes there are."""
        return sum(self.hosts)

    @property
    def shares_memory(self) -> bool:
        """Whether the processes of a node add up in memory that they share."""
        return self.strategy not in ("naive", "flat") and max(self.hosts) > 1


def allreduce_messages(ranks: int, nbytes: float) -> list[float]:
    """Return the bytes of each message, one after the other, in an allreduce."""
    exchanged = exchanges(ranks, nbytes)
    beyond = ranks & (ranks - 1)  # p is a power of two
    return [nbytes, *exchanged, nbytes] if beyond else exchanged


def exchanges(ranks: int, nbytes: float) -> list[float]:
    """Return the bytes of those messages of an allreduce that are sent in both directions at the same time."""
    halves = [nbytes / 2**i for i in range(1, ranks.bit_length())]
    return halves + halves[::-1]


def buckets(point: Point, machine: Machine) -> int:
    """Return the number of buckets in which the gradients are sent."""
    if point.strategy == "naive":
        return point.arrays
    limit = SHARED_BUCKET_BYTES if point.shares_memory else OWN_BUCKET_BYTES
    if point.shares_memory and len(point.hosts) == 1:
        limit = SHARE_BYTES[point.ranks > machine.cores] * point.ranks
    return math.ceil(point.nbytes / limit)


def features(point: Point, machine: Machine) -> dict[str, float]:
    """Return the factor of each parameter in the seconds of a call."""
    cost: Counter[str] = Counter(call=1, array=point.arrays)
    cost.update(_allreduce(point, machine, CHECK_BYTES))
    count = buckets(point, machine)
    bucket = point.nbytes / count
    for name, value in (_in_shared_memory if point.shares_memory else _by_messages)(point, machine, bucket).items():
        cost[name] += count * value
    # Each gradient is read and written, and so is its place in a bucket; the gradient also has the data it was computed
    # from.
    memory = bucket * min(count, SLOTS if point.shares_memory else 1)
    beyond = _beyond_cache(machine, 2 * point.ranks * point.nbytes) + _beyond_cache(machine, point.ranks * memory)
    cost["miss"] = 2 * point.nbytes * beyond
    crowd = max(1, point.ranks / machine.cores)
    for shared in ("call", "array", "copy", "add", "miss"):
        cost[shared] *= math.ceil(crowd)  # processes run in time slices: three processes on two cores take two
    for messages in ("shm", "far"):
        cost[messages] *= crowd
    if crowd > 1:
        cost.update(crowd=1, turn=cost["sync"])
    return {name: cost[name] for name in PARAMETERS}


def _allreduce(point: Point, machine: Machine, nbytes: float) -> Mapping[str, float]:
    """Return the cost of MPI's allreduce among all processes: within each node, then across nodes, and back."""
    inside = allreduce_messages(max(point.hosts), nbytes)
    across = allreduce_messages(len(point.hosts), nbytes)
    return {
        "sync": len(inside),
        "shm": sum(inside),
        # Each process's array, and the data that it receives.
        "far": sum(inside) * _beyond_cache(machine, 2 * point.ranks * nbytes),
        "hop": len(across),
        "wire": sum(across),
        "stall": _stalled(point, machine, nbytes),
    }


def _by_messages(point: Point, machine: Machine, nbytes: float) -> Mapping[str, float]:
    """Return the cost of a bucket that MPI adds up: copied in, divided if there are several processes, copied out."""
    return {"copy": (4 if point.ranks == 1 else 6) * nbytes, **_allreduce(point, machine, nbytes)}


def _in_shared_memory(point: Point, machine: Machine, nbytes: float) -> Mapping[str, float]:
    """Return the cost of a bucket that the processes of a node add up, each process its share."""
    inside, nodes = max(point.hosts), len(point.hosts)
    of_others = (inside - 1) / inside * nbytes
    if nodes == 1:
        # The sum of a process's own share is written to the gradients immediately, from the cache.
        return {"sync": 2, "copy": 2 * of_others + 2 * of_others, "add": (1 + 2 / inside) * nbytes}
    owners = 1 if point.strategy == "hierarchical" else min(point.hosts)
    across = allreduce_messages(nodes, nbytes / owners)
    return {
        "sync": 2 if owners == inside else 3,  # if another process owns the sum, it waits for it
        "copy": 2 * of_others + 2 * nbytes / owners + 2 * nbytes,
        "add": (1 + 1 / inside) * nbytes,
        "hop": len(across),
        # All owners share the link.
        "wire": owners * sum(across),
        "stall": _stalled(point, machine, nbytes) if owners == 1 else 0,
    }


def _beyond_cache(machine: Machine, nbytes: float) -> float:
    """Return the part of this number of bytes that the cache cannot hold."""
    return max(0, 1 - machine.cache_bytes / nbytes)


def _stalled(point: Point, machine: Machine, nbytes: float) -> float:
    """Return the bytes of those messages of an allreduce that are held up, if no other messages use the link."""
    if len(point.hosts) <= machine.cores:
        return 0
    return sum(each for each in exchanges(len(point.hosts), nbytes) if each >= LONG_BYTES)


def predict(point: Point, machine: Machine, parameters: Mapping[str, float]) -> float:
    """Return the predicted seconds of a call."""
    return sum(parameters[name] * value for name, value in features(point, machine).items())


def fit(points: Sequence[Point], seconds: Sequence[float], machine: Machine) -> dict[str, float]:
    """Return the nonnegative parameters whose predictions have the smallest sum of squared relative errors.

    A parameter that no point depends on is 0.
    """
    rows = [list(features(point, machine).values()) for point in points]
    relative = np.array(rows, float) / np.array(seconds, float)[:, None]
    return dict(zip(PARAMETERS, _non_negative_least_squares(relative, np.ones(len(points))), strict=True))


def with_usable_cache(points: Sequence[Point], seconds: Sequence[float], machine: Machine) -> Machine:
    """Return the machine with the cache size with which the fit explains the times best.

    The rest is used by others: programs, the system, and other virtual machines.
    """

    def misfit(candidate: Machine) -> float:
        parameters = fit(points, seconds, candidate)
        return sum(
            (predict(point, candidate, parameters) / time - 1) ** 2 for point, time in zip(points, seconds, strict=True)
        )

    return min((replace(machine, cache_bytes=machine.cache_bytes * part) for part in CACHE_PARTS), key=misfit)


def _non_negative_least_squares(matrix: np.ndarray, target: np.ndarray) -> list[float]:
    """Minimise ``|matrix @ x - target|`` over x >= 0, by the method of Lawson and Hanson (1974, chapter 23)."""
    scale = np.linalg.norm(matrix, axis=0)
    scale[scale == 0] = 1
    scaled = matrix / scale
    x = np.zeros(len(scale))
    used = np.zeros(len(scale), bool)
    for _ in range(10 * len(scale)):
        slope = scaled.T @ (target - scaled @ x)
        slope[used] = 0
        if slope.max() <= 1e-10 * len(target):
            break
        used[slope.argmax()] = True
        x = _back_inside(scaled, target, x, used)
    return list(map(float, x / scale))


def _back_inside(matrix: np.ndarray, target: np.ndarray, x: np.ndarray, used: np.ndarray) -> np.ndarray:
    """Return the least squares in the active columns, and deactivate columns that would become negative."""
    while True:
        best = np.zeros_like(x)
        best[used] = np.linalg.lstsq(matrix[:, used], target, rcond=None)[0]
        below = used & (best <= 0)
        if not below.any():
            return best
        reach = (x[below] / np.maximum(x[below] - best[below], 1e-300)).min()
        x = x + reach * (best - x)
        used &= x > 1e-14
        x = np.where(used, x, 0)
