"""What grows with the number of ranks, up to 10,000, when a rank is lost; see docs/recovery-model.md.

    python benchmarks/recovery_model.py

It prints the table of that page. Constants are medians that ``recovery_parts.py``, ``recovery.py`` and ``restart.py``
measured (``results/elastic.jsonl``). Everything about networks, and about how often something fails, is an assumption,
which has a name here.
"""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from pathlib import Path

__all__ = ["Assumed", "Measured", "connections", "lost_time", "parts", "per_step", "read"]

RESULTS = Path(__file__).parent / "results" / "elastic.jsonl"
VOTES = 6  # in a recovery: to give up, on who leaves, for the duplicate and two parts of it, and at the end
VOTES_IN_SHRINK = 2  # one finds the ranks that have failed, and one finds no others
NEW_COMMUNICATORS = 4  # the shrunk one, its duplicate, and those of a node's ranks and of one place on all nodes
ROUNDS_OF_EACH = 5  # the time of each, in votes: with two ranks, a duplicate takes as long as five votes
NAME_BYTES = 32  # of a pickled name
COLOR_BYTES = 8
SILENCE_SECONDS, END_SECONDS = 2.5, 0.5  # as in mn_guard.supervised and mn_elastic.supervision
BEATS_PER_SECOND = 2.5


@dataclass(frozen=True)
class Measured:
    """Times that were measured, in seconds.

    Attributes:
        notice: From a kill until the others complete a step; MPI's own recovery is a small part of this.
        vote: For a vote of two ranks on one node.
        name: For reading the name of one rank's node.
        place: For finding out where one rank runs.
        lost: For finding out whether one rank is lost.
        deal: For dealing the samples of one rank, in each step.
        deal_again: For dealing them again, to other ranks.
        beat: For the supervisor to send a sign of life to one keeper, and to receive one.
        restart: From the end of one attempt until a step of the next, of two ranks on one node.
    """

    notice: float
    vote: float
    name: float
    place: float
    lost: float
    deal: float
    deal_again: float
    beat: float
    restart: float


@dataclass(frozen=True)
class Assumed:
    """Values that were not measured here.

    Attributes:
        per_node: Ranks on a node.
        latency: Seconds for a message between two nodes, including MPI's own work.
        rate: Bytes per second of a node's link, each way.
        step: Seconds for a step, which is repeated.
        hours_of_a_rank: Hours until a given rank fails. 16,384 GPUs had 419 interruptions in 54 days (Llama 3).
        kept_every: Seconds between two states that are saved in memory.
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
    """Return in how many rounds all of some ranks learn something, if twice as many know it after each round."""
    return math.ceil(math.log2(max(1, count)))


def collective(ranks: int, measured: Measured, assumed: Assumed) -> float:
    """Return the seconds for a small collective operation: up a tree, and down again."""
    inside = min(ranks, assumed.per_node)
    nodes = -(-ranks // assumed.per_node)
    return rounds(inside) * measured.vote + 2 * rounds(nodes) * assumed.latency


def parts(ranks: int, measured: Measured, assumed: Assumed) -> dict[str, float]:
    """Return the seconds of each part of a recovery in place, by name.

    Args:
        ranks: The number of ranks, at least 2.
        measured: Constants that were measured.
        assumed: Constants that were not.
    """
    one = collective(ranks, measured, assumed)
    sent = ranks * (NAME_BYTES + 2 * COLOR_BYTES) / assumed.rate if ranks > assumed.per_node else 0.0
    return {
        "notice": measured.notice + rounds(-(-ranks // assumed.per_node)) * assumed.latency,
        "votes": (VOTES + VOTES_IN_SHRINK) * one,
        "communicators": NEW_COMMUNICATORS * ROUNDS_OF_EACH * one,
        "where the ranks are": sent + ranks * (measured.name + measured.place + measured.lost),
        "deal again": ranks * measured.deal_again,
        "the step again": assumed.step,
    }


def per_step(ranks: int, measured: Measured, assumed: Assumed) -> dict[str, float]:
    """Return the seconds that are added to each step, by name, while no rank dies."""
    return {"the vote": collective(ranks, measured, assumed), "the iterator": ranks * measured.deal}


def connections(ranks: int, measured: Measured, assumed: Assumed) -> dict[str, float]:
    """Return the supervisor's work for the keepers: connections, messages per second, and the part of a core."""
    nodes = -(-ranks // assumed.per_node)
    return {
        "connections": nodes,
        "messages a second": 2 * BEATS_PER_SECOND * nodes,
        "part of a core": BEATS_PER_SECOND * nodes * measured.beat,
    }


def lost_time(ranks: int, measured: Measured, assumed: Assumed) -> dict[str, float]:
    """Return the part of all time that is lost to failures, for each way of continuing."""
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
        notice=median(killed[-1]["seconds"]["SIGKILL"]),
        vote=two[-1]["seconds"]["agree"],
        name=of_one["read the names of their nodes"],
        place=of_one["find this rank's place among them"],
        lost=of_one["say who is lost"],
        deal=of_one["deal their samples"],
        deal_again=of_one["deal those of a lost one again"],
        beat=most["seconds"]["tell each keeper of a beat, and hear one"] / (most["ranks"] // Assumed.per_node),
        restart=median(min(started, key=lambda line: line["megabytes"])["seconds"]["memory"]["restart"]),
    )


def median(values: list[float]) -> float:
    """Return the median: the middle value, or the mean of the two in the middle."""
    ordered = sorted(values)
    return (ordered[(len(ordered) - 1) // 2] + ordered[len(ordered) // 2]) / 2


def table(measured: Measured, assumed: Assumed, sizes: tuple[int, ...] = (2, 16, 128, 1_000, 10_000)) -> str:
    """Return the table on the page: what grows with the number of ranks."""
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
    """Return a number with two digits, or with all digits before the point."""
    return f"{value:,.0f}" if value >= 10 else f"{value:.2g}"


if __name__ == "__main__":
    print(table(read(), Assumed()))
