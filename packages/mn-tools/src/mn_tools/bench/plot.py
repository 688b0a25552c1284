"""A chart of the figures; the only module that needs matplotlib."""

from __future__ import annotations

from typing import Any

from mn_tools.bench.advice_report import COMMUNICATING, COMPUTING, GROUPS, recommendations, shown
from mn_tools.bench.advise import Advice
from mn_tools.bench.contestants import MPI_ALLREDUCE
from mn_tools.bench.report import Report, human_bytes, human_seconds

# Okabe and Ito's colours, which colour-blind people can distinguish.
_COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#8c6d31", "#999999")


def draw(report: Report, file: str) -> None:
    """Draw time and bus bandwidth over size.

    Args:
        report: The figures.
        file: The file; its extension determines the format.
    """
    from matplotlib.figure import Figure

    figure = Figure(figsize=(11, 4.8), layout="constrained")
    times, bandwidths = figure.subplots(1, 2)
    names = list(dict.fromkeys(row.strategy for row in report.rows))
    for axes in (times, bandwidths):
        axes.set_prop_cycle(color=_COLOURS, marker=list("osD^vP*X"))
    for name in names:
        rows = [row for row in report.rows if row.strategy == name]
        style: dict[str, Any] = {"lw": 1.5, "markersize": 5}
        if name == MPI_ALLREDUCE:
            style = {"color": "black", "marker": "", "ls": "--", "lw": 2, "zorder": 3}
        sizes = [row.bytes for row in rows]
        times.plot(sizes, [row.seconds * 1e3 for row in rows], label=name, **style)
        bandwidths.plot(sizes, [row.bus_bandwidth / 1e9 for row in rows], **style)
    times.set_yscale("log")
    times.set_ylabel("time, ms")
    bandwidths.set_ylabel("bus bandwidth, GB/s")
    ticks = sorted({row.bytes for row in report.rows})
    for axes in (times, bandwidths):
        axes.set_xscale("log", base=2)
        axes.set_xticks(ticks, [human_bytes(tick) for tick in ticks], rotation=45, ha="right", fontsize=8)
        axes.minorticks_off()
        axes.set_xlabel("gradients of one rank")
        axes.grid(alpha=0.3)
        axes.spines[["top", "right"]].set_visible(False)
    figure.legend(loc="outside right center", frameon=False)
    machines = report.machines
    figure.suptitle(f"{machines.ranks} ranks on {len(machines.nodes)} node(s), {report.memory}; {machines.mpi}")
    figure.savefig(file, dpi=120)


def draw_advice(advice: Advice, file: str) -> None:
    """Draw the expected time of a step with each choice.

    Args:
        advice: The figures.
        file: The file; its extension determines the format.
    """
    from matplotlib.figure import Figure

    groups = {exact: shown(advice, exact) for exact in GROUPS}
    heights = [max(1, len(group)) for group in groups.values()]
    figure = Figure(figsize=(9, 1.2 + 0.27 * sum(heights)), layout="constrained")
    named = recommendations(advice)
    all_axes = figure.subplots(2, 1, sharex=True, height_ratios=heights)
    for axes, exact in zip(all_axes, GROUPS, strict=True):
        rows = groups[exact]
        milliseconds = [each.seconds * 1e3 for each in rows]
        computing = [min(each, advice.compute * 1e3) for each in milliseconds]
        rest = [all_ - part for all_, part in zip(milliseconds, computing, strict=True)]
        places = range(len(rows))
        axes.barh(places, computing, color=_COLOURS[0], label=COMPUTING)
        axes.barh(places, rest, left=computing, color=_COLOURS[1], label=COMMUNICATING)
        axes.set_yticks(places, [f"{each.choice.strategy}, {each.choice}" for each in rows], fontsize=8)
        for tick, each in zip(axes.get_yticklabels(), rows, strict=True):
            tick.set_fontweight("bold" if each in named else "normal")
        for place, length in zip(places, milliseconds, strict=True):
            axes.annotate(f" {human_seconds(length / 1e3)}", (length, place), va="center", fontsize=8)
        axes.invert_yaxis()
        axes.set_title(GROUPS[exact], loc="left", fontsize=10)
        axes.spines[["top", "right"]].set_visible(False)
    all_axes[-1].set_xlabel("one step, ms; the recommended ones in bold")
    figure.legend(
        *all_axes[0].get_legend_handles_labels(), loc="outside lower right", ncols=2, frameon=False, fontsize=8
    )
    machines, arrays = advice.machines, advice.arrays
    figure.suptitle(
        f"{arrays.name}, {arrays.nbytes / 1e6:.3g} MB: {machines.ranks} ranks on {len(machines.nodes)} node(s)",
        fontsize=11,
    )
    figure.savefig(file, dpi=110)
