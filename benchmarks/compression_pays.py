"""Up to which speed of the link each compression is faster than none, from the figures that `compression.py` kept.

    python benchmarks/compression_pays.py benchmarks/results/compression.jsonl

The model is that of `cost.py`, without what does not change: a fixed time, for computation and latencies, and one that
is inversely proportional to the speed of the link. Both are taken from the two fastest links that were measured, since
they are where compression begins to pay or ceases to. On slower ones more of the computation hides behind the bytes
that travel.
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
    """Return seconds, and seconds times Gbit/s, of which a step takes the one and, divided by the speed, the other."""
    slow, fast = sorted(seconds)[-2:]
    travelling = max(0.0, (seconds[slow] - seconds[fast]) / (1 / slow - 1 / fast))
    return seconds[fast] - travelling / fast, travelling


def show(model: str, fitted: dict[str, tuple[float, float]]) -> None:
    """Print the model, and where each contestant crosses exact averages."""
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
