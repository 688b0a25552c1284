"""From some ranks to 10,000: what grows with their number when one is lost; see docs/recovery-model.md.

    python benchmarks/recovery_model.py

It prints the table of that page. Constants are medians that ``recovery_parts.py`` and ``recovery.py`` measured
(``results/elastic.jsonl``); everything that has to do with a network, and with how often something fails, is an
assumption, and has a name here.
"""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from pathlib import Path

__all__ = ["Assumed", "Measured", "connections", "lost_time", "parts", "per_step", "read"]

RESULTS = Path(__file__).parent / "results" / "elastic.jsonl"
VOTES = 6  # of a recovery: to give up, who leaves, for the duplicate and two parts of it, and at the end
VOTES_IN_SHRINK = 2  # one that finds who has failed, and one that finds nobody else
NEW_COMMUNICATORS = 4  # the shrunk one, its duplicate, the ranks of a node, and those of a place on all nodes
ROUNDS_OF_EACH = 5  # votes: a duplicate of two ranks takes as long as five of them
NAME_BYTES = 32  # of a pickled name
COLOR_BYTES = 8
SILENCE_SECONDS, END_SECONDS = 2.5, 0.5  # as in mn_comm.supervised and mn_tools.elastic
BEATS_PER_SECOND = 2.5


@dataclass(frozen=True)
class Measured:
    """What was measured, in seconds.

    Attributes:
        notice: From a kill until the step that the others complete, of which MPI's own recovery is a small part.
        vote: Of two ranks on one node.
        name: To read the name of a rank's node.
        place: To find out about one rank where it runs.
        lost: To find out about one rank whether it is there.
        deal: To deal the samples of one rank, in each step.
        beat: For the supervisor to tell a keeper that it is there, and to hear one.
        restart: From the end of one attempt until a step of the next, of two ranks on one node.
    """

    notice: float
    vote: float
    name: float
    place: float
    lost: float
    deal: float
    beat: float
    restart: float


@dataclass(frozen=True)
class Assumed:
    """What was not measured here.

    Attributes:
        per_node: Ranks on a node.
        latency: Seconds of a message between two nodes, with MPI's own work.
        rate: Bytes per second of a node's link, each way.
        step: Seconds of a step, which is done again.
        hours_of_a_rank: Hours until one rank of its own fails. 16,384 GPUs had 419 interruptions in 54 days (Llama 3).
        kept_every: Seconds between two states that are kept in memory.
        saved_every: Seconds between two checkpoints.
    """

    per_node: int = 8
    latency: float = 5e-6
    rate: float = 12.1e9
    step: float = 0.3
    hours_of_a_rank: float = 16_384 * 54 * 24 / 419
    kept_every: float = 30.0
    saved_every: float = 1800.0


def rounds(count: int) -> int:
    """Return how many times the number of those who know something has to double until all of some do."""
    return math.ceil(math.log2(max(1, count)))


def collective(ranks: int, measured: Measured, assumed: Assumed) -> float:
    """Return the seconds of something small that all ranks do together: up a tree, and down again."""
    inside = min(ranks, assumed.per_node)
    nodes = -(-ranks // assumed.per_node)
    return rounds(inside) * measured.vote + 2 * rounds(nodes) * assumed.latency


def parts(ranks: int, measured: Measured, assumed: Assumed) -> dict[str, float]:
    """Return the seconds of each part of a recovery in place, by name.

    Args:
        ranks: How many there are, 2 or more.
        measured: Constants that were measured.
        assumed: Constants that were not.
    """
    one = collective(ranks, measured, assumed)
    sent = ranks * (NAME_BYTES + 2 * COLOR_BYTES) / assumed.rate if ranks > assumed.per_node else 0.0
    return {
        "notice": measured.notice + rounds(-(-ranks // assumed.per_node)) * assumed.latency,
        "votes": (VOTES + VOTES_IN_SHRINK) * one,
        "communicators": NEW_COMMUNICATORS * ROUNDS_OF_EACH * one,
        "who is where": sent + ranks * (measured.name + measured.place + measured.lost),
        "deal again": ranks * measured.deal,
        "the step again": assumed.step,
    }


def per_step(ranks: int, measured: Measured, assumed: Assumed) -> dict[str, float]:
    """Return the seconds that a step takes more, by name, while nobody dies."""
    return {"the vote": collective(ranks, measured, assumed), "the iterator": ranks * measured.deal}


def connections(ranks: int, measured: Measured, assumed: Assumed) -> dict[str, float]:
    """Return what the supervisor has to do with the keepers: connections, messages a second, and part of a core."""
    nodes = -(-ranks // assumed.per_node)
    return {
        "connections": nodes,
        "messages a second": 2 * BEATS_PER_SECOND * nodes,
        "part of a core": BEATS_PER_SECOND * nodes * measured.beat,
    }


def lost_time(ranks: int, measured: Measured, assumed: Assumed) -> dict[str, float]:
    """Return which part of all time is lost to failures, by what is done about them."""
    hours = assumed.hours_of_a_rank / ranks
    restart = SILENCE_SECONDS + END_SECONDS + measured.restart
    seconds = {
        "in place": sum(parts(ranks, measured, assumed).values()),
        "restart from memory": restart + assumed.kept_every / 2,
        "restart from checkpoints": restart + assumed.saved_every / 2,
    }
    return {name: each / (3600 * hours + each) for name, each in seconds.items()}


def read(file: Path = RESULTS) -> Measured:
    """Return the constants that were measured."""
    lines = [json.loads(line) for line in file.read_text().splitlines()]
    alone = [line for line in lines if line["benchmark"] == "recovery_parts" and line["alone"]]
    two = [line for line in lines if line["benchmark"] == "recovery_parts" and not line["alone"] and line["ranks"] == 2]
    killed = [line for line in lines if line["benchmark"] == "recovery" and line["ranks"] == 2]
    started = [line for line in lines if line["benchmark"] == "restart" and line["mpi"] == "Open MPI"]
    most = max(alone, key=lambda line: line["ranks"])
    of_one = {name: seconds / most["ranks"] for name, seconds in most["seconds"].items()}
    return Measured(
        notice=median(killed[-1]["seconds"]["recovery"]),
        vote=two[-1]["seconds"]["agree"],
        name=of_one["read the names of their nodes"],
        place=of_one["find this rank's place among them"],
        lost=of_one["say who is lost"],
        deal=of_one["deal those of a lost one again"],
        beat=most["seconds"]["tell each keeper of a beat, and hear one"] / (most["ranks"] // Assumed.per_node),
        restart=median(min(started, key=lambda line: line["megabytes"])["seconds"]["memory"]["restart"]),
    )


def median(values: list[float]) -> float:
    """Return the middle one, or the mean of the two in the middle."""
    ordered = sorted(values)
    return (ordered[(len(ordered) - 1) // 2] + ordered[len(ordered) // 2]) / 2


def table(measured: Measured, assumed: Assumed, sizes: tuple[int, ...] = (2, 16, 128, 1_000, 10_000)) -> str:
    """Return tables of what grows, as they are on the page."""
    lines = [f"| | {' | '.join(f'{size:,}' for size in sizes)} |", "|---|" + "---|" * len(sizes)]
    for name in parts(2, measured, assumed):
        cells = [number(1e3 * parts(size, measured, assumed)[name]) for size in sizes]
        lines.append(f"| {name}, ms | {' | '.join(cells)} |")
    for name in per_step(2, measured, assumed):
        cells = [number(1e3 * per_step(size, measured, assumed)[name]) for size in sizes]
        lines.append(f"| in each step: {name}, ms | {' | '.join(cells)} |")
    for name in connections(2, measured, assumed):
        cells = [number(connections(size, measured, assumed)[name]) for size in sizes]
        lines.append(f"| supervisor: {name} | {' | '.join(cells)} |")
    for name in lost_time(2, measured, assumed):
        cells = [number(100 * lost_time(size, measured, assumed)[name]) for size in sizes]
        lines.append(f"| lost: {name}, % | {' | '.join(cells)} |")
    return "\n".join(lines)


def number(value: float) -> str:
    """Return a number with two digits, or with all before the point."""
    return f"{value:,.0f}" if value >= 10 else f"{value:.2g}"


if __name__ == "__main__":
    print(table(read(), Assumed()))
