"""The chart of the simulation."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
from matplotlib import pyplot as plt
from matplotlib.axes import Axes

from simulation.networks import NETWORKS
from simulation.simulated import RANKS, TREES

__all__ = ["draw"]

COLOURS = ("#2a6f97", "#d1495b", "#66a182", "#edae49")
GREY = "#9aa0a6"


def draw(pairs: Sequence[tuple[dict[str, Any], dict[str, Any]]], lines: Sequence[dict[str, Any]], file: Path) -> None:
    """Draw what was measured against what was simulated, and what trees do to an average."""
    figure, (left, right) = plt.subplots(1, 2, figsize=(13, 5.5), layout="constrained")
    _draw_pairs(left, pairs)
    _draw_trees(right, lines)
    for axes in (left, right):
        axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(file, dpi=130)
    plt.close(figure)


def _draw_pairs(axes: Axes, pairs: Sequence[tuple[dict[str, Any], dict[str, Any]]]) -> None:
    strategies = dict(zip(dict.fromkeys(line["strategy"] for line, _ in pairs), COLOURS, strict=False))
    markers = dict(zip(dict.fromkeys(sum(line["hosts"]) for line, _ in pairs), "osD^vP", strict=False))
    for line, other in pairs:
        style = {"color": strategies[line["strategy"]], "marker": markers[sum(line["hosts"])], "ls": "", "ms": 7}
        axes.plot(line["fastest"], other["network_alone"], **style)
    ends = [0.8, 40]
    axes.plot(ends, ends, color=GREY, lw=1)
    axes.fill_between(ends, [0.75 * x for x in ends], [1.25 * x for x in ends], color="#e9ecef", lw=0)
    axes.set(xscale="log", yscale="log", xlim=ends, ylim=ends)
    axes.set(xlabel="measured on virtual hosts, seconds", ylabel="simulated, network alone, seconds")
    axes.set_title("8 MB at 10 to 100 Mbit/s, 2 cores for all ranks; grey: within 25 %", loc="left", fontsize=10)
    handles = [plt.Line2D([], [], color=c, marker="o", ls="", label=name) for name, c in strategies.items()]
    handles += [plt.Line2D([], [], color=GREY, marker=m, ls="", label=f"{n} ranks") for n, m in markers.items()]
    axes.legend(handles=handles, fontsize=8, frameon=False)


def _draw_trees(axes: Axes, lines: Sequence[dict[str, Any]]) -> None:
    fast = NETWORKS[1].name
    tapers = sorted({tree.taper for tree in TREES})
    for ranks, colour in zip(RANKS, COLOURS, strict=False):
        found = {
            line["tree"]: line
            for line in lines
            if (line["ranks"], line["model"], line["strategy"]) == (ranks, "resnet50", "two_dimensional")
            and (line["network"], line["algorithm"]) == (fast, "")
        }
        for scattered, style in ((False, "-"), (True, "--")):
            trees = [tree for tree in TREES if tree.scattered == scattered and tree.name in found]
            seconds = [1e3 * found[tree.name]["simulated"] for tree in trees]
            label = f"{ranks:,} ranks, nodes {'scattered over the tree' if scattered else 'in its order'}"
            axes.plot([tree.taper for tree in trees], seconds, color=colour, ls=style, marker="o", label=label)
        if found:
            formula = 1e3 * next(iter(found.values()))["formula"]
            axes.axhline(formula, color=colour, lw=1, ls=":", label=f"{ranks:,} ranks, formula")
    axes.set_xticks(tapers, [f"1:{taper}" for taper in tapers])
    axes.set(xlabel="nodes that share a link between switches", ylabel="milliseconds", ylim=(0, None))
    axes.set_title(f"ResNet-50 by two_dimensional at {fast}, simulated", loc="left", fontsize=10)
    axes.legend(fontsize=8, frameon=False)
