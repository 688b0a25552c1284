"""What is simulated: the real runs, to compare, and those that no machine here can run."""

from __future__ import annotations

import json
import random
import time
from collections.abc import Iterator
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple

from simulation.networks import NETWORKS, Network, fat_tree, star
from simulation.plan import Case, bytes_between, fitted, formula, steps
from simulation.real import MEASURED, STRATEGIES, lengths_of
from simulation.simgrid import Simulator

__all__ = ["TREES", "run", "validate"]

NODE = 8
RANKS = (1000, 10000)
POWERS_OF_TWO = (1024, 8192)
MEGABIT = 1e6 / 8
RATES = {"100mbit": 100 * MEGABIT, "20mbit": 20 * MEGABIT, "10mbit": 10 * MEGABIT, "1gbit": 1000 * MEGABIT}


class Tree(NamedTuple):
    """A fat tree, and where the nodes of a job are in it.

    Attributes:
        taper: How many nodes share a link between switches.
        scattered: Whether the nodes of a job are anywhere in it; otherwise they are numbered in its order.
    """

    taper: int
    scattered: bool

    @property
    def name(self) -> str:
        """Its name in the tables."""
        return f"1:{self.taper}, {'scattered' if self.scattered else 'in order'}"


TREES = tuple(Tree(taper, scattered) for scattered in (False, True) for taper in (1, 2, 4))
FULL, SCATTERED = TREES[0], TREES[3]
RING = "lr"  # SMPI's name of the allreduce in a ring


def validate(only: str) -> Iterator[dict[str, Any]]:
    """Yield the simulated times of the runs on virtual hosts, of this study and of scaling.py."""
    fit = fitted()
    simulator = Simulator()
    for name, rate, case, model in _real_cases():
        if only not in name:
            continue
        network = Network(rate, RATES[rate], fit.parameters["hop"])
        platform = star(len(case.hosts), network, fit.use)
        yield {
            "case": name,
            "rate": rate,
            "hosts": case.hosts,
            "strategy": case.strategy,
            "model": model,
            "simulated": simulator.seconds(platform, range(len(case.hosts)), steps(case, fit)),
            "network_alone": simulator.seconds(platform, range(len(case.hosts)), steps(case, None)),
            "formula": formula(case, fit, network.rate, network.latency),
            "bytes": bytes_between(case),
        }


def _real_cases() -> Iterator[tuple[str, str, Case, str]]:
    lengths = tuple(lengths_of("8 MB"))
    for hosts, rate in MEASURED:
        for strategy in STRATEGIES:
            yield f"{len(hosts)} hosts of {hosts[0]}, {rate}", rate, Case(strategy, hosts, lengths), "8 MB"
    for line in map(json.loads, (Path(__file__).parents[1] / "results" / "scaling.jsonl").read_text().splitlines()):
        hosts = tuple(line.get("hosts", ()))
        if len(hosts) > 1 and not line["fitted"]:
            case = Case(line["strategy"], hosts, (line["nbytes"] // 4 // line["arrays"],) * line["arrays"])
            yield f"hosts {', '.join(map(str, hosts))}, 1gbit", "1gbit", case, f"{line['shape'][0]} MiB"


def run(only: str) -> Iterator[dict[str, Any]]:
    """Yield the simulated times on fat trees."""
    simulator = Simulator()
    for ranks, model, strategy, network, tree, algorithm in _cases():
        name = f"{ranks} ranks, {network.name}, {tree.name}{algorithm and ', ' + algorithm}"
        if only in f"{name}, {strategy}, {model}":
            yield {"case": name, **_simulate(simulator, ranks, model, strategy, network, tree, algorithm)}


def _cases() -> Iterator[tuple[int, str, str, Network, Tree, str]]:
    """Yield what is simulated, the fastest first: ranks, gradients, strategy, network, tree, SMPI's algorithm."""
    fast = NETWORKS[1]
    plain = [(ranks, tree, "") for ranks, tree in product(RANKS, TREES)]
    plain += [(ranks, tree, "") for ranks, tree in product(POWERS_OF_TWO, (FULL, SCATTERED))]
    plain += [(1000, tree, RING) for tree in (FULL, SCATTERED)]
    for ranks, tree, algorithm in plain:
        yield ranks, "resnet50", "two_dimensional", fast, tree, algorithm
    rest = product(reversed(STRATEGIES), RANKS, ("resnet50", "wide"), (FULL, SCATTERED), NETWORKS)
    for strategy, ranks, model, tree, network in rest:
        yield ranks, model, strategy, network, tree, ""


def _simulate(
    simulator: Simulator, ranks: int, model: str, strategy: str, network: Network, tree: Tree, algorithm: str
) -> dict[str, Any]:
    case = Case(strategy, (NODE,) * (ranks // NODE), tuple(lengths_of(model)))
    fit = fitted().on_cluster(case)
    nodes = list(range(len(case.hosts)))
    if tree.scattered:
        random.Random(0).shuffle(nodes)
    settings = {"allreduce": algorithm} if algorithm else {}
    began = time.perf_counter()
    platform = fat_tree(len(nodes), network, fit.use, tree.taper)
    seconds = simulator.seconds(platform, nodes, steps(case, fit), **settings)
    return {
        "ranks": ranks,
        "strategy": strategy,
        "model": model,
        "network": network.name,
        "tree": tree.name,
        "algorithm": algorithm,
        "simulated": seconds,
        "formula": formula(case, fit, network.rate, network.latency),
        "took": time.perf_counter() - began,
    }
