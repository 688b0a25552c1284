"""Draw the figures that the benchmarks have saved.

    python benchmarks/draw.py FIGURES.jsonl FOLDER

One chart for each benchmark, model and number of ranks: the median time of each contestant as a bar, the fastest on
top. For a training with a target, it is the time until the score reached the target.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
from matplotlib import pyplot as plt

OURS, OTHERS, FLOOR = "#2a6f97", "#adb5bd", "#e9c46a"
REFERENCES = ("memory copy", "computation alone", "communication alone", "one process alone", "the check alone")


def main() -> None:
    """Draw a chart for each line that has times."""
    figures, folder = Path(sys.argv[1]), Path(sys.argv[2])
    folder.mkdir(parents=True, exist_ok=True)
    for line in figures.read_text().splitlines():
        found = json.loads(line)
        if "seconds" in found:
            draw(found, folder)


def draw(figures: dict[str, Any], folder: Path) -> None:
    """Draw one chart."""
    seconds = dict(sorted(figures.get("reached", figures["seconds"]).items(), key=lambda item: -item[1]))
    parts = [figures["benchmark"], figures.get("model"), figures.get("network"), f"{figures['ranks']}-ranks"]
    parts += [f"{figures['busy']}-busy"] if figures.get("busy") else []
    name = "-".join(part for part in parts if part).replace(" ", "").replace("/", "")
    figure, axes = plt.subplots(figsize=(8, 0.45 * len(seconds) + 1.2), layout="constrained")
    bars = axes.barh(list(seconds), [1e3 * s for s in seconds.values()], color=[colour(each) for each in seconds])
    axes.bar_label(bars, fmt="%.1f", padding=3)
    axes.set_xlabel("median milliseconds")
    axes.set_title(name.replace("-", ", ", 2).replace("-", " "))
    axes.spines[["top", "right"]].set_visible(False)
    axes.margins(x=0.1)
    figure.savefig(folder / f"{name}.png", dpi=120)
    plt.close(figure)


def colour(name: str) -> str:
    """Return the colour of a contestant's bar."""
    if name in REFERENCES:
        return FLOOR
    return OURS if name.startswith(("ours", "overlapped", "double")) else OTHERS


if __name__ == "__main__":
    main()
