"""The output of scaling.py: tables of the model's parameters and errors, and charts."""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Iterable
from pathlib import Path

import cost
import extrapolate
import scaling
from cost import Machine, Point

__all__ = ["report"]

ALLOWED = 0.25
Row = tuple[Point, dict, float]  # a point, its recorded values, and the prediction of the model


def report(lines: list[dict], folder: Path) -> None:
    """Fit the model to the points for fitting; write tables and charts of all points."""
    first, *measured = lines
    whole = scaling.as_machine(first)
    points = [scaling.as_point(line) for line in measured]
    fitted = [(point, line["seconds"]) for point, line in zip(points, measured, strict=True) if line["fitted"]]
    machine = cost.with_usable_cache(*zip(*fitted, strict=True), whole)
    parameters = cost.fit(*zip(*fitted, strict=True), machine)
    predicted = [cost.predict(point, machine, parameters) for point in points]
    rows = list(zip(points, measured, predicted, strict=True))
    use = link_use(rows, first["rate"])
    text = "\n".join(
        [*head(whole, machine, first), *parameter_table(parameters, use), *error_tables(rows), *far_tables(use)]
    )
    (folder / "scaling.md").write_text(text + "\n")
    print(text)
    try:
        from scaling_charts import draw_efficiency, draw_model
    except ImportError as error:
        print(f"no charts: {error}")
        return
    draw_model(rows, folder / "scaling-model.png")
    draw_efficiency(use, folder / "scaling-efficiency.png")


def link_use(rows: list[Row], rate: str) -> float:
    """Return the part of a link's nominal rate that the longest messages between hosts used; 1 if there were none."""
    pairs = [(point.nbytes, point, line) for point, line, _ in rows if set(point.hosts) == {1} and point.hosts[1:]]
    if not pairs:
        return 1.0
    nbytes, point, line = max(pairs, key=lambda pair: (pair[0], -pair[2]["seconds"]))
    nominal = float(rate.removesuffix("gbit")) * 1e9 / 8
    return min(1.0, sum(cost.allreduce_messages(len(point.hosts), nbytes)) / nominal / line["seconds"])


def error(row: Row) -> float:
    """Return the relative error of a prediction."""
    _, line, predicted = row
    return predicted / line["seconds"] - 1


def head(whole: Machine, machine: Machine, first: dict) -> list[str]:
    """Return the introduction of the tables."""
    cache, usable = (each.cache_bytes / 2**20 for each in (whole, machine))
    return [
        "# Scaling: what was measured, and what is modelled",
        "",
        f"Measured on {machine.cores} cores that share {cache:.0f} MiB of cache; several hosts are network namespaces",
        f"of that machine, joined at {first['rate']}, and share its cores. MPICH, float32, gradients in host memory.",
        f"With {usable:.0f} MiB of the cache the model fits best; the rest is in use by others.",
        "The model is `benchmarks/cost.py`; `python benchmarks/scaling.py` repeats measurements, fit and charts.",
    ]


def parameter_table(parameters: dict[str, float], use: float) -> list[str]:
    """Return the table of fitted parameters."""
    rows = [f"| {name} | {value:.3g} | {cost.PARAMETERS[name]} |" for name, value in parameters.items()]
    note = f"Of a link's nominal rate, the longest messages used {100 * use:.0f} %."
    return ["", "## Parameters, fitted", "", "| name | value | is |", "|---|---|---|", *rows, "", note]


def error_tables(rows: list[Row]) -> list[str]:
    """Return the model's errors, by communicator and hosts, and for each point."""
    held = [row for row in rows if not row[1]["fitted"]]
    if not held:
        return []
    groups: dict[tuple, list[Row]] = defaultdict(list)
    for row in held:
        groups[row[0].hosts, row[0].strategy].append(row)
    known = {point.hosts for point, line, _ in rows if line["fitted"]}
    text = ["", "## Predictions of what it was not fitted to", "", summary("All of it", held)]
    text += [summary("Other sizes than fitted", (row for row in held if row[0].hosts in known))]
    text += [summary("Other numbers of processes or hosts", (row for row in held if row[0].hosts not in known))]
    text += ["", "| processes on each host | strategy | points | within 25 % | median error | largest |"]
    text += ["|---|---|---|---|---|---|"]
    for (hosts, strategy), group in groups.items():
        errors = [error(row) for row in group]
        name = ", ".join(map(str, hosts)) + ("" if hosts in known else " (not fitted)")
        middle, largest = statistics.median(map(abs, errors)), max(errors, key=abs)
        text += [f"| {name} | {strategy} | {len(group)} | {within(group)} | {middle:.0%} | {largest:+.0%} |"]
    text += ["", "| processes on each host | strategy | MB | arrays | measured, ms | modelled, ms | error |"]
    text += ["|---|---|---|---|---|---|---|"]
    for row in held:
        point, line, predicted = row
        numbers = f"{point.nbytes / 1e6:.1f} | {point.arrays} | {1e3 * line['seconds']:.2f} | {1e3 * predicted:.2f}"
        text += [f"| {', '.join(map(str, point.hosts))} | {point.strategy} | {numbers} | {error(row):+.0%} |"]
    return text


def within(rows: Iterable[Row]) -> int:
    """Return how many predictions are close enough."""
    return sum(abs(error(row)) <= ALLOWED for row in rows)


def summary(name: str, rows: Iterable[Row]) -> str:
    """Return one line about some predictions."""
    rows = list(rows)
    if not rows:
        return f"- {name}: none."
    middle = statistics.median(abs(error(row)) for row in rows)
    return f"- {name}: {within(rows)} of {len(rows)} within 25 %, half of them within {middle:.0%}."


def far_tables(use: float) -> list[str]:
    """Return the model's predictions for many GPUs."""
    text = ["", "## Modelled: ResNet-50 on many GPUs", ""]
    text += ["Efficiency of weak scaling, with overlap / without; 102 MB of gradients averaged by `two_dimensional`."]
    counts = (8, 32, 128, 512, 1024)
    for cluster in extrapolate.CLUSTERS:
        text += ["", f"{cluster.name}: {1e3 * cluster.compute:.0f} ms a mini-batch; {cluster.source}.", ""]
        text += ["| network | " + " | ".join(f"{n:,}" for n in counts) + " |", "|---" * (len(counts) + 1) + "|"]
        for network in cluster.networks:
            pairs = [
                [extrapolate.efficiency(n, cluster, network, use, overlap=overlap) for overlap in (True, False)]
                for n in counts
            ]
            text += [f"| {network.name} | " + " | ".join(f"{a:.0%} / {b:.0%}" for a, b in pairs) + " |"]
    text += ["", "Published, for comparison:", ""]
    text += [f"- {p.workers} GPUs, {p.efficiency:.0%}: {' '.join(p.what.split())}" for p in extrapolate.PUBLISHED]
    published, modelled = extrapolate.slow_network(use)
    share = (modelled - 1) / (published - 1)
    return [
        *text,
        f"- 32 P100 on 4 nodes, 10 Gbit/s Ethernet: {published:.2f} times as long as on FDR (ChainerMN 1.3,",
        f"  chainer.org, 25 May 2018); the model says {modelled:.2f}. So that software used some {share:.0%} of what",
        "  the model takes the link to carry: the lines are what a network allows, not what all software makes of it.",
    ]
