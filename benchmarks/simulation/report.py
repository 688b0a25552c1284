"""The tables and the chart of what was recorded, measured and simulated."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from simulation.networks import LEAF, NETWORKS
from simulation.simulated import FULL, RANKS, RING, SCATTERED, TREES

__all__ = ["report"]

Line = dict[str, Any]
MEGA = 1e6


def report(lines: Sequence[Line], folder: Path) -> None:
    """Write the tables, and draw the chart if matplotlib is installed."""
    of = {part: [line for line in lines if line["part"] == part] for part in ("record", "measure", "validate", "run")}
    pairs = paired(of["measure"], of["validate"])
    text = "\n".join(
        [
            *HEAD,
            *recorded([*of["record"], *of["measure"]]),
            *validated(pairs),
            *earlier(of["validate"], folder / "scaling.jsonl"),
            *by_network(of["run"]),
            *by_tree(of["run"]),
        ]
    )
    (folder / "simulated.md").write_text(text + "\n")
    print(text)
    try:
        from simulation.chart import draw
    except ImportError as error:
        print(f"no chart: {error}")
        return
    draw(pairs, of["run"], folder / "simulated.png")


HEAD = [
    "# Averages among 1,000 and 10,000 ranks, simulated",
    "",
    "Written by `benchmarks/simulate.py report`; `benchmarks/simulation/README.md` describes what is simulated.",
    "",
]


def paired(measured: Iterable[Line], simulated: Sequence[Line]) -> list[tuple[Line, Line]]:
    """Return what was measured, each with the simulation of the same."""
    found = {(line["case"], line["strategy"], line["model"]): line for line in simulated}
    pairs = [(line, found.get((line["case"], line["strategy"], line["model"]))) for line in measured]
    return [(line, other) for line, other in pairs if other is not None]


def rows(head: str, body: Iterable[Sequence[object]]) -> list[str]:
    """Return a table."""
    columns = head.count("|") + 1
    return [f"| {head} |", "|" + "---|" * columns, *(f"| {' | '.join(map(str, each))} |" for each in body), ""]


def recorded(lines: Sequence[Line]) -> list[str]:
    """Return the table of recorded calls."""
    body = []
    for line in sorted(lines, key=lambda line: sum(line["hosts"])):
        ranks, name = sum(line["hosts"]), line["strategy"] + (f", {line['compression']}" if line["compression"] else "")
        equal = f"{line['ranks_as_generated']} of {ranks}"
        body.append((ranks, len(line["hosts"]), line["model"], name, f"{line['calls']:,}", equal))
    head = "ranks | nodes | gradients | strategy | calls of all ranks | ranks whose calls are as generated"
    return ["## Recorded calls", "", *rows(head, body)]


def validated(pairs: Sequence[tuple[Line, Line]]) -> list[str]:
    """Return the table of runs on virtual hosts, and of the same runs simulated."""
    body = []
    for line, other in pairs:
        measured = line["fastest"]
        body.append(
            (
                sum(line["hosts"]),
                line["case"],
                line["strategy"],
                f"{line['link_bytes'] / MEGA:.1f}",
                f"{other['bytes'] / line['link_bytes'] - 1:+.1%}",
                f"{measured:.2f}",
                f"{other['network_alone']:.2f}, {other['network_alone'] / measured - 1:+.0%}",
                f"{other['simulated']:.2f}, {other['simulated'] / measured - 1:+.0%}",
                f"{other['formula']:.2f}, {other['formula'] / measured - 1:+.0%}",
            )
        )
    head = (
        "ranks | on | strategy | MB on all links, counted | simulated | seconds, measured | simulated, network alone | "
        "simulated, with time in nodes | formula"
    )
    return ["## Measured and simulated: 8 MB on virtual hosts", "", *rows(head, body)]


def earlier(lines: Sequence[Line], file: Path) -> list[str]:
    """Return how well the runs of scaling.py, at 1 Gbit/s, are simulated."""
    import json

    measured = {}
    for line in map(json.loads, file.read_text().splitlines()):
        hosts = line.get("hosts", ())
        if len(hosts) > 1:
            case = f"hosts {', '.join(map(str, hosts))}, 1gbit"
            measured[case, line["strategy"], f"{line['shape'][0]} MiB"] = line["seconds"]
    body = []
    chosen = [line for line in lines if (line["case"], line["strategy"], line["model"]) in measured]
    for case in dict.fromkeys(line["case"] for line in chosen):
        found = [line for line in chosen if line["case"] == case]
        errors = {
            kind: [line[kind] / measured[case, line["strategy"], line["model"]] - 1 for line in found]
            for kind in ("simulated", "formula")
        }
        cells = [f"{statistics.median(map(abs, each)):.0%}, {max(each, key=abs):+.0%}" for each in errors.values()]
        body.append((case.removesuffix(", 1gbit"), len(found), *cells))
    head = "on | runs | error of the simulation: median, largest | error of the formula: median, largest"
    return ["## The runs of the scaling study at 1 Gbit/s, with at most 4 ranks", "", *rows(head, body)]


def by_network(lines: Sequence[Line]) -> list[str]:
    """Return the tables of seconds by strategy and network."""
    text: list[str] = ["## Simulated: milliseconds of an average", ""]
    for model, what in (("resnet50", "ResNet-50, 102 MB"), ("wide", "a transformer's encoder, 50 MB")):
        for ranks in RANKS:
            body = []
            for strategy in ("naive", "flat", "hierarchical", "two_dimensional"):
                cells = []
                for network in NETWORKS:
                    found = {
                        line["tree"]: line
                        for line in lines
                        if (line["ranks"], line["model"], line["strategy"]) == (ranks, model, strategy)
                        and line["network"] == network.name
                        and not line["algorithm"]
                    }
                    cells.append(_cell(found.get(FULL.name), found.get(SCATTERED.name)))
                if any(cells):
                    body.append((strategy, *(cell or "not simulated" for cell in cells)))
            if body:
                head = f"{what}, {ranks:,} ranks | " + " | ".join(network.name for network in NETWORKS)
                text += rows(head, body)
    note = "Formula, then simulated with nodes in the order of the tree, then simulated with nodes scattered over it."
    return [*text, note, ""]


def _cell(full: Line | None, scattered: Line | None) -> str:
    if full is None:
        return ""
    last = f"{1e3 * scattered['simulated']:,.0f}" if scattered else "not simulated"
    return f"{1e3 * full['formula']:,.0f}, {1e3 * full['simulated']:,.0f}, {last}"


def by_tree(lines: Sequence[Line]) -> list[str]:
    """Return the table of trees, of powers of two, and of the ring."""
    lines = [
        line
        for line in lines
        if (line["model"], line["strategy"], line["network"]) == ("resnet50", "two_dimensional", NETWORKS[1].name)
    ]
    cases = list(dict.fromkeys((line["ranks"], line["algorithm"]) for line in lines))
    body = []
    for ranks, algorithm in sorted(cases):
        found = {line["tree"]: line for line in lines if (line["ranks"], line["algorithm"]) == (ranks, algorithm)}
        cells = [f"{1e3 * found[tree.name]['simulated']:,.0f}" if tree.name in found else "" for tree in TREES]
        formula = "" if algorithm else f"{1e3 * next(iter(found.values()))['formula']:,.0f}"
        body.append((f"{ranks:,}" + (", in a ring" if algorithm == RING else ""), formula, *cells))
    head = "ranks | formula | " + " | ".join(tree.name for tree in TREES)
    title = f"## ResNet-50 by `two_dimensional` at {NETWORKS[1].name}, by tree: milliseconds"
    note = (
        f"Switches of {LEAF} nodes; 1:4 means that four nodes share a link between switches. "
        "Nodes are in the order of the tree, or scattered over it."
    )
    return [title, "", "<!-- trees -->", "", *rows(head, body), note, "", "<!-- end of trees -->"]
