"""The link speed below which each compression is faster than none, from the figures that `compression.py` saved.

    python benchmarks/compression_pays.py benchmarks/results/compression.jsonl

The model is that of `cost.py`, reduced to a fixed time, for computation and latencies, and a time that is inversely
proportional to the speed of the link. Both are computed from the two fastest links that were measured, because the
limit is near them. On slower links, more of the computation is hidden behind the transfer.
"""

from __future__ import annotations

import json
import sys
from collections import defaultdict
from collections.abc import Mapping
from pathlib import Path

EXACT = "exact"
UNITS = {"Mbit/s": 1e-3, "Gbit/s": 1.0}


def main() -> None:
    """Print a table for each model."""
    # For each model and contestant: the speeds of links in Gbit/s, and the seconds of a step.
    points: dict[str, dict[str, dict[float, float]]] = defaultdict(lambda: defaultdict(dict))
    for line in Path(sys.argv[1]).read_text().splitlines():
        figures = json.loads(line)
        for name, seconds in figures["seconds"].items():
            points[figures["model"]][name][speed(figures["network"])] = seconds
    for model, contestants in points.items():
        if len(contestants[EXACT]) > 1:
            show(model, {name: fit(each) for name, each in contestants.items()})


def speed(network: str) -> float:
    """Return the speed of a link, in Gbit/s."""
    number, unit = network.split()
    return float(number) * UNITS[unit]


def fit(seconds: Mapping[float, float]) -> tuple[float, float]:
    """Return seconds, and seconds times Gbit/s: a step takes the former plus the latter divided by the speed."""
    slow, fast = sorted(seconds)[-2:]
    travelling = max(0.0, (seconds[slow] - seconds[fast]) / (1 / slow - 1 / fast))
    return seconds[fast] - travelling / fast, travelling


def show(model: str, fitted: dict[str, tuple[float, float]]) -> None:
    """Print the model, and the speed at which each contestant is as fast as exact averages."""
    print(f"\n{model}: milliseconds of a step at W Gbit/s")
    fixed, sent = fitted[EXACT]
    for name, (own_fixed, own_sent) in fitted.items():
        line = f"{name:34}{1e3 * own_fixed:8.0f} + {1e3 * own_sent:6.1f} / W"
        if name != EXACT:
            pays = (sent - own_sent) / (own_fixed - fixed) if own_fixed > fixed else float("inf")
            line += "   pays at any speed" if pays == float("inf") else f"   pays below {pays:.1f} Gbit/s"
        print(line)


if __name__ == "__main__":
    main()
