"""The charts of the scaling study."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from pathlib import Path

import extrapolate
import matplotlib
from cost import Point

matplotlib.use("Agg")
from matplotlib import pyplot as plt
from matplotlib.axes import Axes
from matplotlib.lines import Line2D

__all__ = ["draw_efficiency", "draw_model"]

COLOURS = ("#2a6f97", "#d1495b", "#66a182", "#edae49", "#7768ae", "#8d6a4f", "#00798c", "#e07be0", "#444444")
GREY = "#9aa0a6"


def draw_model(rows: Sequence[tuple[Point, dict, float]], file: Path) -> None:
    """Draw predictions of the model against measurements, for every point."""
    figure, axes = plt.subplots(figsize=(7.5, 6.5), layout="constrained")
    seconds = [1e3 * line["seconds"] for _, line, _ in rows]
    ends = [0.7 * min(seconds), 1.4 * max(seconds)]
    axes.fill_between(ends, [0.75 * x for x in ends], [1.25 * x for x in ends], color="#e9ecef", lw=0)
    axes.plot(ends, ends, color=GREY, lw=1)
    layouts = dict.fromkeys(point.hosts for point, _, _ in rows)
    colours = dict(zip(layouts, itertools.cycle(COLOURS), strict=False))
    for hosts, colour in colours.items():
        for fitted in (True, False):
            pairs = [(line["seconds"], s) for p, line, s in rows if p.hosts == hosts and line["fitted"] == fitted]
            xs, ys = zip(*pairs, strict=True) if pairs else ((), ())
            style = {"facecolors": "none", "edgecolors": colour, "alpha": 0.5} if fitted else {"color": colour}
            axes.scatter([1e3 * x for x in xs], [1e3 * y for y in ys], s=26, linewidths=1, **style)
    axes.set(xscale="log", yscale="log", xlim=ends, ylim=ends)
    axes.set(xlabel="measured, milliseconds", ylabel="modelled, milliseconds")
    near = [abs(s / line["seconds"] - 1) <= 0.25 for _, line, s in rows if not line["fitted"]]
    title = f"Averaging gradients: {sum(near)} of {len(near)} predictions within 25 % of what was measured"
    axes.set_title(title, loc="left", fontsize=11)
    dots = [Line2D([], [], marker="o", ls="", color=c, label=_name(hosts)) for hosts, c in colours.items()]
    dots += [
        Line2D([], [], marker="o", ls="", mfc="none", color=GREY, label="hollow: the model was fitted to it"),
        Line2D([], [], marker="o", ls="", color=GREY, label="full: predicted"),
        plt.Rectangle((0, 0), 1, 1, color="#e9ecef", label="within 25 %"),
    ]
    axes.legend(handles=dots, fontsize=8, frameon=False, loc="upper left")
    axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(file, dpi=130)
    plt.close(figure)


def _name(hosts: tuple[int, ...]) -> str:
    if len(hosts) == 1:
        return f"1 host, {hosts[0]} process" + "es" * (hosts[0] > 1)
    return f"{len(hosts)} hosts with " + ", ".join(map(str, hosts))


def draw_efficiency(use: float, file: Path) -> None:
    """Draw the efficiency of training according to the model, and published results."""
    figure, panels = plt.subplots(1, len(extrapolate.CLUSTERS), figsize=(13, 6), sharey=True, layout="constrained")
    networks = list(dict.fromkeys(n for cluster in extrapolate.CLUSTERS for n in cluster.networks))
    colours = dict(zip(networks, COLOURS, strict=False))
    for number, (axes, cluster) in enumerate(zip(panels, extrapolate.CLUSTERS, strict=True)):
        for network in cluster.networks:
            for overlap in (True, False):
                line = [extrapolate.efficiency(n, cluster, network, use, overlap=overlap) for n in extrapolate.WORKERS]
                axes.plot(extrapolate.WORKERS, line, color=colours[network], ls="-" if overlap else "--", lw=1.8)
        published = _publish(axes, number)
        axes.set_xscale("log", base=2)
        axes.set_xticks(extrapolate.WORKERS, [f"{n:,}" for n in extrapolate.WORKERS])
        axes.set(xlabel="GPUs", ylim=(0, 1.05))
        axes.set_title(f"Nodes of {cluster.name}", loc="left", fontsize=10)
        axes.grid(axis="y", color="#e9ecef")
        axes.spines[["top", "right"]].set_visible(False)
        handles = [Line2D([], [], color=colours[network], label=network.name) for network in cluster.networks]
        handles += [Line2D([], [], color=GREY, label="modelled, communication overlapped")]
        handles += [Line2D([], [], color=GREY, ls="--", label="modelled, one after the other")]
        handles += published
        place = {"loc": "upper left", "bbox_to_anchor": (0, -0.12)}
        axes.legend(handles=handles, fontsize=8, frameon=False, ncols=2, **place)
    panels[0].set_ylabel("efficiency of weak scaling")
    figure.suptitle(
        f"ResNet-50, 102 MB of gradients, modelled (lines) and published (points); of what was measured here, this "
        f"takes only\nthat messages use {100 * use:.0f} % of a link",
        x=0.01,
        ha="left",
        fontsize=10,
    )
    figure.savefig(file, dpi=130)
    plt.close(figure)


def _publish(axes: Axes, number: int) -> list[Line2D]:
    """Draw the published points of one panel, and return them for its legend."""
    points = [point for point in extrapolate.PUBLISHED if point.cluster == number]
    style = {"color": "black", "ls": "", "ms": 7, "zorder": 5}
    return [
        axes.plot([p.workers], [p.efficiency], marker=marker, label=f"published: {p.what}", **style)[0]
        for marker, p in zip("oD", points, strict=False)
    ]
