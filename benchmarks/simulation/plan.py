"""From the calls of a rank to what is simulated, and to what the formula of cost.py says of the same.

Between nodes, every message is simulated. Within a node, nothing is: there the time is that of the formula, for copies
and sums in memory, and MPI's messages in shared memory.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path

import cost
import scaling
from cost import Machine, Point

from simulation.messages import calls, leaders_of

__all__ = ["Case", "Fit", "bytes_between", "fitted", "formula", "steps", "within"]

FIGURES = Path(__file__).resolve().parents[1] / "results" / "scaling.jsonl"
BETWEEN_NODES = ("hop", "wire", "stall")


@dataclass(frozen=True)
class Case:
    """What is averaged by which ranks.

    Attributes:
        strategy: The communicator's name.
        hosts: How many ranks each node has.
        lengths: The number of elements of each gradient, in the order of their names.
    """

    strategy: str
    hosts: tuple[int, ...]
    lengths: tuple[int, ...]

    @property
    def point(self) -> Point:
        """The same, as the formula takes it."""
        return Point(self.strategy, self.hosts, 4 * sum(self.lengths), len(self.lengths))


@dataclass(frozen=True)
class Fit:
    """The formula, fitted: its parameters, the machine, and the part of a link's rate that is used."""

    parameters: Mapping[str, float]
    machine: Machine
    use: float

    def on_cluster(self, case: Case) -> Fit:
        """Return the formula for a cluster in which each rank has a core, and each node such a cache."""
        machine = Machine(sum(case.hosts), self.machine.cache_bytes * len(case.hosts))
        return replace(self, machine=machine)


@cache
def fitted(file: Path = FIGURES) -> Fit:
    """Return the formula, fitted to what scaling.py has measured."""
    from scaling_report import link_use

    first, *lines = map(json.loads, file.read_text().splitlines())
    points = [scaling.as_point(line) for line in lines]
    chosen = [(point, line["seconds"]) for point, line in zip(points, lines, strict=True) if line["fitted"]]
    machine = cost.with_usable_cache(*zip(*chosen, strict=True), scaling.as_machine(first))
    parameters = cost.fit(*zip(*chosen, strict=True), machine)
    rows = [(point, line, 0.0) for point, line in zip(points, lines, strict=True)]
    return Fit(parameters, machine, link_use(rows, first["rate"]))


def within(case: Case, fit: Fit) -> float:
    """Return the seconds of an average that are not spent between nodes, by the formula."""
    found = cost.features(case.point, fit.machine)
    return sum(fit.parameters[name] * value for name, value in found.items() if name not in BETWEEN_NODES)


def formula(case: Case, fit: Fit, rate: float, latency: float) -> float:
    """Return the seconds of an average by the formula, on a network in which only the links of nodes have a limit.

    Args:
        case: The case.
        fit: The formula's parameters.
        rate: Bytes per second of a node's link.
        latency: Seconds of a message.
    """
    found = cost.features(case.point, fit.machine)
    return within(case, fit) + found["hop"] * latency + found["wire"] / (fit.use * rate)


def bytes_between(case: Case) -> float:
    """Return the bytes that all nodes together send to others in an average, by MPICH's algorithms."""
    nodes = len(case.hosts)
    most = 1 << (nodes.bit_length() - 1)
    beyond = nodes - most
    found = 0.0
    for call in calls(case.strategy, case.hosts, 0, case.lengths):
        if call.kind == "Allreduce":
            nbytes = call.nbytes * max(1, leaders_of(case.strategy, case.hosts))
            found += 2 * beyond * nbytes + 2 * (most - 1) * nbytes
    return found


def steps(case: Case, fit: Fit | None, *, alone: bool = True) -> Iterator[str]:
    """Yield the lines of a plan for replay.cpp: those of the first rank of each node, which takes part in everything.

    The ranks of a node send messages of the same size to the same nodes at the same time, and the link divides its rate
    equally among them. So one rank can stand for all: its messages have the size of theirs together.

    MPI adds up what it receives from other nodes, which takes as long as adding up in shared memory. The formula has no
    term for this: at the rate to which it was fitted, it is a small part of the time of the link.

    Args:
        case: The case.
        fit: The formula's parameters; ``None`` if nothing but the network takes time.
        alone: Whether one rank stands for all ranks of its node.
    """
    nodes, leaders = len(case.hosts), max(1, leaders_of(case.strategy, case.hosts))
    inside, total = 0.0 if fit is None else within(case, fit), 4 * sum(case.lengths)
    add = 0.0 if fit is None else 3 * fit.parameters["add"] * (nodes - 1) / nodes
    for call in calls(case.strategy, case.hosts, 0, case.lengths):
        if call.kind == "Iallreduce":
            yield f"doubling {call.nbytes * (max(case.hosts) if alone else 1)}"
        elif call.kind == "Barrier":
            yield "meet"
        else:
            share = call.nbytes * leaders / total
            yield f"delay {inside * share + add * call.nbytes:.9g}"
            yield f"allreduce 1 {call.nbytes * leaders}" if alone else f"allreduce {leaders} {call.nbytes}"
