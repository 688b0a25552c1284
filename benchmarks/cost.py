"""What averaging gradients costs: a model of every strategy, linear in parameters that are fitted to measurements.

Time is latencies and bytes, each times a parameter: a message of s bytes takes alpha + s * beta (Hockney, 1994: The
communication challenge for MPP). An allreduce of s bytes over p processes is a reduce-scatter by recursive halving and
an all-gather by recursive doubling: 2 log2(p) messages, 2 (p - 1) / p * s bytes (Thakur, Rabenseifner and Gropp, 2005:
Optimization of collective communication operations in MPICH, section 4.5); if p is no power of two, the processes
beyond the last one hand their data to a neighbour first, and get the result from it in the end.

To this come copies and sums in memory. Processes that outnumber the cores share them: what they compute takes as much
longer, and whenever one waits for another it may have to wait for its turn as well.
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
    "exchanges",
    "features",
    "fit",
    "predict",
    "with_usable_cache",
]

PARAMETERS = {
    "call": "seconds of every call",
    "array": "seconds for each array",
    "pack": "seconds per byte that is packed",
    "add": "seconds per byte that is read or written while arrays in shared memory are added up",
    "stream": "seconds per byte that is read or written while arrays are averaged where they lie",
    "miss": "seconds more per byte that the cache does not hold",
    "sync": "seconds of each message or barrier within a node",
    "shm": "seconds per byte of MPI's messages within a node",
    "far": "seconds more per byte of these that the cache does not hold",
    "crowd": "seconds more of every call where processes outnumber cores: until each has had its turn",
    "turn": "seconds more of each message or barrier within a node where processes outnumber cores",
    "hop": "seconds of each message between nodes",
    "wire": "seconds per byte on a node's link",
    "stall": "seconds more per byte of a long message between nodes, where its ends have to wait for their turns",
}
PIECE_BYTES = 512 * 1024  # of what is averaged where it lies, between two barriers
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
        streamed_bytes: Of those that are averaged where they lie.
    """

    strategy: str
    hosts: tuple[int, ...]
    nbytes: int
    arrays: int
    streamed_bytes: int = 0

    @property
    def ranks(self) -> int:
        """How many processes there are."""
        return sum(self.hosts)


def allreduce_messages(ranks: int, nbytes: float) -> list[float]:
    """Return the bytes of each message, one after the other, in an allreduce."""
    exchanged = exchanges(ranks, nbytes)
    beyond = ranks & (ranks - 1)  # a power of two
    return [nbytes, *exchanged, nbytes] if beyond else exchanged


def exchanges(ranks: int, nbytes: float) -> list[float]:
    """Return the bytes of those messages of an allreduce that go both ways at the same time."""
    halves = [nbytes / 2**i for i in range(1, ranks.bit_length())]
    return halves + halves[::-1]


def features(point: Point, machine: Machine) -> dict[str, float]:
    """Return what each parameter is to be multiplied with, for the seconds of a call."""
    cost: Counter[str] = Counter(call=1, array=point.arrays)
    packed = point.nbytes - point.streamed_bytes
    cost["pack"] = packed
    if point.strategy in ("naive", "flat"):
        cost.update(_messages(point, machine))
    else:
        cost.update(_two_stage(point, machine, packed))
    # The gradients, what they were computed from, and the buffer that they are packed into.
    footprint = point.ranks * (2 * point.nbytes + packed)
    cost["miss"] = (point.nbytes + packed) * max(0, 1 - machine.cache_bytes / footprint)
    crowd = max(1, point.ranks / machine.cores)
    for shared in ("call", "array", "pack", "add", "stream", "miss"):
        cost[shared] *= math.ceil(crowd)  # done in a slice of time each: three processes on two cores take two
    for messages in ("shm", "far"):
        cost[messages] *= crowd
    if crowd > 1:
        cost.update(crowd=1, turn=cost["sync"])
    return {name: cost[name] for name in PARAMETERS}


def _messages(point: Point, machine: Machine) -> Mapping[str, float]:
    """Return the cost of ``naive`` and ``flat``: MPI reduces within each node, then across nodes, and hands it back."""
    calls = point.arrays if point.strategy == "naive" else 1
    each = point.nbytes / calls
    inside = allreduce_messages(max(point.hosts), each)
    across = allreduce_messages(len(point.hosts), each)
    return {
        "sync": calls * len(inside),
        "shm": calls * sum(inside),
        # Each process's array, and what it receives.
        "far": calls * sum(inside) * max(0, 1 - machine.cache_bytes / (2 * point.ranks * each)),
        "hop": calls * len(across),
        "wire": calls * sum(across),
        "stall": calls * _stalled(point, machine, each),
    }


def _two_stage(point: Point, machine: Machine, packed: float) -> Mapping[str, float]:
    """Return the cost of those that know of nodes; see :class:`mn_comm.strategies.two_stage.TwoStage`."""
    inside, nodes = max(point.hosts), len(point.hosts)
    pieces = math.ceil(point.streamed_bytes / PIECE_BYTES)
    if nodes == 1:
        # Each process reads its share of every segment, and writes it to all; or every piece of all into its arrays.
        barriers = (2 if packed else 0) + pieces
        if inside == 1:
            return {"add": 2 * packed, "pack": point.streamed_bytes}
        return {"sync": barriers, "add": 2 * packed, "stream": (3 + inside) * point.streamed_bytes}
    shards = 1 if point.strategy == "hierarchical" else min(point.hosts)
    shard = packed / shards
    across = allreduce_messages(nodes, shard)
    return {
        "sync": 2 if inside > 1 else 0,
        "add": (inside + 2) * shard + (2 * inside - 2) * shard,
        "hop": len(across),
        # All shards share the link.
        "wire": shards * sum(across),
        "stall": _stalled(point, machine, shard) if shards == 1 else 0,
    }


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
