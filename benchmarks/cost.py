"""What averaging gradients costs: a model of every strategy, linear in parameters that are fitted to measurements.

Time is latencies and bytes, each times a parameter: a message of s bytes takes alpha + s * beta (Hockney, 1994: The
communication challenge for MPP). An allreduce of s bytes over p processes is a reduce-scatter by recursive halving and
an all-gather by recursive doubling: 2 log2(p) messages, 2 (p - 1) / p * s bytes (Thakur, Rabenseifner and Gropp, 2005:
Optimization of collective communication operations in MPICH, section 4.5); if p is no power of two, the processes
beyond the last one hand their data to a neighbour first, and get the result from it in the end.

Gradients travel in buckets, one after the other, and to their messages come copies and sums in memory. ``naive`` (a
bucket for each gradient) and ``flat`` copy gradients into a bucket, have MPI add it up in place among all processes,
divide it, and copy it back; so do the others on nodes of one process each. Elsewhere those add up in memory that the
processes of a node share: each copies what others are to add up into its own, adds up one share of the bucket from all
of theirs, and copies the sums of the others from there; in between they wait for each other at barriers. On several
nodes the sums are averaged across these by MPI before. See :mod:`mn_comm.strategies`.

Processes that outnumber the cores share them: what they compute takes as much longer, and whenever one waits for
another it may have to wait for its turn as well.
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
# Of the share of each process in a bucket on a single node: while each has a core, and where they outnumber the cores.
SHARE_BYTES = 256 * 1024, 4 * 1024 * 1024
# Of other buckets: in memory that processes share, and in their own.
SHARED_BUCKET_BYTES, OWN_BUCKET_BYTES = 16 * 1024 * 1024, 4 * 1024 * 1024
SLOTS = 2  # of memory that processes share: buckets take turns
CHECK_BYTES = 32  # of the check that all processes have the same gradients
# MPICH fetches longer messages from their sender, which takes both ends to be running. Where there are more hosts than
# cores, a pair was seen to send first one way and then the other: twice as long as both ways at once.
LONG_BYTES = 4 * 1024 * 1024
# Of the cache, to try.
CACHE_PARTS = [i / 20 for i in range(20, 0, -1)]


@dataclass(frozen=True)
class Machine:
    """Where it was measured.

    Args:
        cores: How many there are, for all processes together.
        cache_bytes: Of the last level of cache, for all together.
    """

    cores: int
    cache_bytes: float


@dataclass(frozen=True)
class Point:
    """One thing to measure.

    Args:
        strategy: The communicator's name.
        hosts: How many processes each node has.
        nbytes: Of all gradients together.
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
    beyond = ranks & (ranks - 1)  # a power of two
    return [nbytes, *exchanged, nbytes] if beyond else exchanged


def exchanges(ranks: int, nbytes: float) -> list[float]:
    """Return the bytes of those messages of an allreduce that go both ways at the same time."""
    halves = [nbytes / 2**i for i in range(1, ranks.bit_length())]
    return halves + halves[::-1]


def buckets(point: Point, machine: Machine) -> int:
    """Return how many buckets the gradients travel in."""
    if point.strategy == "naive":
        return point.arrays
    limit = SHARED_BUCKET_BYTES if point.shares_memory else OWN_BUCKET_BYTES
    if point.shares_memory and len(point.hosts) == 1:
        limit = SHARE_BYTES[point.ranks > machine.cores] * point.ranks
    return math.ceil(point.nbytes / limit)


def features(point: Point, machine: Machine) -> dict[str, float]:
    """Return what each parameter is to be multiplied with, for the seconds of a call."""
    cost: Counter[str] = Counter(call=1, array=point.arrays)
    cost.update(_allreduce(point, machine, CHECK_BYTES))
    count = buckets(point, machine)
    bucket = point.nbytes / count
    for name, value in (_in_shared_memory if point.shares_memory else _by_messages)(point, machine, bucket).items():
        cost[name] += count * value
    # Each gradient is read and written, and so is its place in a bucket; the former beside what it was computed from.
    memory = bucket * min(count, SLOTS if point.shares_memory else 1)
    beyond = _beyond_cache(machine, 2 * point.ranks * point.nbytes) + _beyond_cache(machine, point.ranks * memory)
    cost["miss"] = 2 * point.nbytes * beyond
    crowd = max(1, point.ranks / machine.cores)
    for shared in ("call", "array", "copy", "add", "miss"):
        cost[shared] *= math.ceil(crowd)  # done in a slice of time each: three processes on two cores take two
    for messages in ("shm", "far"):
        cost[messages] *= crowd
    if crowd > 1:
        cost.update(crowd=1, turn=cost["sync"])
    return {name: cost[name] for name in PARAMETERS}


def _allreduce(point: Point, machine: Machine, nbytes: float) -> Mapping[str, float]:
    """Return the cost of MPI's allreduce among all: within each node, then across nodes, and back."""
    inside = allreduce_messages(max(point.hosts), nbytes)
    across = allreduce_messages(len(point.hosts), nbytes)
    return {
        "sync": len(inside),
        "shm": sum(inside),
        # Each process's array, and what it receives.
        "far": sum(inside) * _beyond_cache(machine, 2 * point.ranks * nbytes),
        "hop": len(across),
        "wire": sum(across),
        "stall": _stalled(point, machine, nbytes),
    }


def _by_messages(point: Point, machine: Machine, nbytes: float) -> Mapping[str, float]:
    """Return the cost of a bucket that MPI adds up among all: copied in, divided if there are several, copied out."""
    return {"copy": (4 if point.ranks == 1 else 6) * nbytes, **_allreduce(point, machine, nbytes)}


def _in_shared_memory(point: Point, machine: Machine, nbytes: float) -> Mapping[str, float]:
    """Return the cost of a bucket that the processes of a node add up, each its share of it."""
    inside, nodes = max(point.hosts), len(point.hosts)
    of_others = (inside - 1) / inside * nbytes
    if nodes == 1:
        # The sum of the own share goes to the gradients at once, from the cache.
        return {"sync": 2, "copy": 2 * of_others + 2 * of_others, "add": (1 + 2 / inside) * nbytes}
    owners = 1 if point.strategy == "hierarchical" else min(point.hosts)
    across = allreduce_messages(nodes, nbytes / owners)
    return {
        "sync": 2 if owners == inside else 3,  # where not everyone owns what it added up, its owner waits for it
        "copy": 2 * of_others + 2 * nbytes / owners + 2 * nbytes,
        "add": (1 + 1 / inside) * nbytes,
        "hop": len(across),
        # All owners share the link.
        "wire": owners * sum(across),
        "stall": _stalled(point, machine, nbytes) if owners == 1 else 0,
    }


def _beyond_cache(machine: Machine, nbytes: float) -> float:
    """Return which part of so many bytes the cache does not hold."""
    return max(0, 1 - machine.cache_bytes / nbytes)


def _stalled(point: Point, machine: Machine, nbytes: float) -> float:
    """Return the bytes of those messages of an allreduce that are held up, if they have the link for themselves."""
    if len(point.hosts) <= machine.cores:
        return 0
    return sum(each for each in exchanges(len(point.hosts), nbytes) if each >= LONG_BYTES)


def predict(point: Point, machine: Machine, parameters: Mapping[str, float]) -> float:
    """Return the seconds that a call takes."""
    return sum(parameters[name] * value for name, value in features(point, machine).items())


def fit(points: Sequence[Point], seconds: Sequence[float], machine: Machine) -> dict[str, float]:
    """Return the parameters, none of them negative, whose predictions have the least squared relative errors.

    A parameter that no point depends on is 0.
    """
    rows = [list(features(point, machine).values()) for point in points]
    relative = np.array(rows, float) / np.array(seconds, float)[:, None]
    return dict(zip(PARAMETERS, _non_negative_least_squares(relative, np.ones(len(points))), strict=True))


def with_usable_cache(points: Sequence[Point], seconds: Sequence[float], machine: Machine) -> Machine:
    """Return the machine with as much of its cache as lets the fit explain the times best.

    The rest is in use by others: programs, the system, and the neighbours of a virtual machine.
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
    """Return the least squares in the columns in use, and put those out of use that would become negative."""
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
