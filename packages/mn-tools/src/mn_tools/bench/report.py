"""The results, as a table and as JSON, and the recommended communicator."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from statistics import median
from typing import Any

from mn_comm.building_blocks import STRATEGIES
from mn_tools.bench.contestants import MPI_ALLREDUCE
from mn_tools.bench.machines import Machines
from mn_tools.bench.measure import preferred

HOST, GPU = "host memory", "GPU memory"


@dataclass(frozen=True)
class Row:
    """The figures of one contestant at one size.

    Attributes:
        strategy: Its name.
        bytes: The size of one rank's gradients.
        seconds: The time of one averaging: the median of the rounds, each on the slowest rank.
        fastest: The time of the fastest round.
        rounds: How many there were.
        algorithm_bandwidth: ``bytes / seconds``.
        bus_bandwidth: This number times 2(n-1)/n, on n ranks.
        ratio: ``seconds``, divided by those of ``MPI_Allreduce``.
    """

    strategy: str
    bytes: int
    seconds: float
    fastest: float
    rounds: int
    algorithm_bandwidth: float
    bus_bandwidth: float
    ratio: float


@dataclass
class Report:
    """All results.

    Attributes:
        machines: The environment.
        memory: ``host memory`` or ``GPU memory``.
        arrays: The number of arrays into which the bytes were divided.
        latencies: Times in seconds, by operation.
        rows: The figures, by size, the contestants in the order in which they ran.
        refusals: Why some communicators cannot run here, by name.
        wrong: Contestants with wrong results: the name, and the bytes.
        notes: Further remarks.
    """

    machines: Machines
    memory: str
    arrays: int
    latencies: dict[str, float] = field(default_factory=dict)
    rows: list[Row] = field(default_factory=list)
    refusals: dict[str, str] = field(default_factory=dict)
    wrong: list[tuple[str, int]] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)


def rows_of(nbytes: int, ranks: int, seconds: Mapping[str, Sequence[float]]) -> list[Row]:
    """Return the figures for one size.

    Args:
        nbytes: The size of one rank's gradients.
        ranks: How many ranks there are.
        seconds: The times of each round, by contestant; ``MPI_Allreduce`` is one of them.
    """
    base = median(seconds[MPI_ALLREDUCE])
    rows = []
    for name, each in seconds.items():
        middle = median(each)
        bandwidth = nbytes / middle
        on_the_bus = bandwidth * 2 * (ranks - 1) / ranks
        rows.append(Row(name, nbytes, middle, min(each), len(each), bandwidth, on_the_bus, middle / base))
    return rows


def recommended(report: Report) -> Row | None:
    """Return the row of the communicator to choose for the largest size, or ``None`` if there is none."""
    rows = report.rows
    largest = max((row.bytes for row in rows), default=0)
    left_out = {"dummy", *(name for name, _ in report.wrong)}
    if report.memory == HOST and any(row.strategy == "two_dimensional" for row in rows):
        left_out.add("non_cuda_aware")  # the same algorithm under another name
    order = [name for name in STRATEGIES if name not in left_out]
    candidates = [row for row in rows if row.bytes == largest and row.strategy in order]
    if not candidates:
        return None
    return preferred(candidates, lambda row: row.seconds, lambda row: order.index(row.strategy))


def to_json(report: Report) -> dict[str, Any]:
    """Return the figures as an object for ``json``: seconds, bytes, and bytes per second."""
    best = recommended(report)
    return {**asdict(report), "machines": report.machines.figures(), "recommended": best and best.strategy}


def to_lines(report: Report) -> Iterator[str]:
    """Yield the lines of the table."""
    yield from heading(report.machines, report.notes)
    yield f"gradients of float32 in {report.memory}, in {report.arrays} array{'s' * (report.arrays > 1)}"
    yield ""
    for name, seconds in report.latencies.items():
        yield f"{name:44}{human_seconds(seconds):>12}"
    width = max((len(row.strategy) for row in report.rows), default=0) + 2
    for nbytes in dict.fromkeys(row.bytes for row in report.rows):
        yield ""
        yield f"{human_bytes(nbytes):{width}}{'time':>12}{'algbw GB/s':>12}{'busbw GB/s':>12}{'/ MPI':>8}"
        for row in report.rows:
            if row.bytes == nbytes:
                bandwidths = f"{row.algorithm_bandwidth / 1e9:12.3f}{row.bus_bandwidth / 1e9:12.3f}"
                yield f"{row.strategy:{width}}{human_seconds(row.seconds):>12}{bandwidths}{row.ratio:8.2f}"
    yield ""
    for name, reason in report.refusals.items():
        yield f"cannot run here: {name}: {reason}"
    for name, nbytes in report.wrong:
        yield f"WRONG RESULT: {name}, {human_bytes(nbytes)}"
    yield _last_line(report)


def heading(machines: Machines, notes: Sequence[str]) -> Iterator[str]:
    """Yield lines that say where a measurement was made, and what to keep in mind."""
    nodes = ", ".join(f"{node.host} ({node.ranks} ranks, {node.cores} cores)" for node in machines.nodes)
    count = len(machines.nodes)
    yield f"{machines.ranks} ranks on {count} node{'s' * (count > 1)}: {nodes}"
    yield f"{machines.mpi}, MPI {machines.standard}; within a node: {machines.within_nodes}"
    for warning in machines.warnings():
        yield f"WARNING: {warning}"
    for note in notes:
        yield f"note: {note}"


def _last_line(report: Report) -> str:
    best = recommended(report)
    if best is None:
        return "no communicator to recommend: none of those asked for has averaged anything"
    how = f"{human_seconds(best.seconds)}, {1 / best.ratio:.2f} times as fast as {MPI_ALLREDUCE}"
    return f"for {human_bytes(best.bytes)} of gradients choose {best.strategy} ({how})"


def human_bytes(nbytes: int) -> str:
    """Return a number of bytes in the largest unit in which it is a whole number."""
    units = ["B", "KiB", "MiB", "GiB"]
    while nbytes % 1024 == 0 and len(units) > 1:
        nbytes //= 1024
        units.pop(0)
    return f"{nbytes} {units[0]}"


def human_seconds(seconds: float) -> str:
    """Return a time in µs, ms or s, with three digits or more."""
    for factor, unit in ((1e6, "µs"), (1e3, "ms")):
        if seconds * factor < 1000:
            return f"{seconds * factor:.{2 if seconds * factor < 10 else 1}f} {unit}"
    return f"{seconds:.2f} s"
