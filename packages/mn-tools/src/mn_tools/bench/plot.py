"""A chart of the figures; the only module that needs matplotlib."""

from __future__ import annotations

from typing import Any

from mn_tools.bench.contestants import MPI_ALLREDUCE
from mn_tools.bench.report import Report, human_bytes

__all__ = ["draw"]

# Okabe and Ito's colours, which colour-blind people can distinguish.
_COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#8c6d31", "#999999")
_MARKERS = "osD^vP*X"


def draw(report: Report, file: str) -> None:
    """Draw time and bus bandwidth over size.

    Args:
        report: The figures.
        file: The file; its extension determines the format.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(11, 4.8), layout="constrained")
    FigureCanvasAgg(figure)
    times, bandwidths = figure.subplots(1, 2)
    names = list(dict.fromkeys(row.strategy for row in report.rows))
    others = [name for name in names if name != MPI_ALLREDUCE]
    for name in names:
        rows = [row for row in report.rows if row.strategy == name]
        style = _style(others.index(name)) if name in others else {"color": "black", "ls": "--", "lw": 2, "zorder": 3}
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


def _style(number: int) -> dict[str, Any]:
    return {
        "color": _COLOURS[number % len(_COLOURS)],
        "marker": _MARKERS[number % len(_MARKERS)],
        "markersize": 5,
        "lw": 1.5,
    }
