"""Averages among 1,000 and 10,000 ranks, by simulation; benchmarks/simulation/README.md describes it.

    python benchmarks/simulate.py record     # the calls of real runs on 16 to 256 ranks, compared with generated ones
    python benchmarks/simulate.py measure    # real runs on virtual hosts, at rates at which the network takes most time
    python benchmarks/simulate.py validate   # the same runs, simulated
    python benchmarks/simulate.py run        # 1,000 and 10,000 ranks, simulated
    python benchmarks/simulate.py report     # the tables and the chart

The first four add lines to benchmarks/results/simulated.jsonl, in place of earlier ones of the same cases. ``validate``
and ``run`` need SimGrid's SMPI.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
REAL, SIMULATED = ("record", "measure"), ("validate", "run")
NOTHING_DONE = 77


def main() -> int:
    """Do what was requested."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=[*REAL, *SIMULATED, "report"])
    parser.add_argument("--out", type=Path, default=HERE / "results", help="the folder for the results")
    parser.add_argument("--only", default="", help="a part of the name of the cases to run; default: all")
    parser.add_argument("--job", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.job:
        from simulation.job import run

        run(**json.loads(args.job))
        return 0
    from simulation import real, simgrid, simulated

    figures = args.out / "simulated.jsonl"
    if args.what == "report":
        from simulation.report import report

        report([json.loads(line) for line in figures.read_text().splitlines()], args.out)
        return 0
    missing = simgrid.what_is_missing() if args.what in SIMULATED else ""
    if missing:
        print(f"nothing is simulated: {missing}", file=sys.stderr)
        return NOTHING_DONE
    part = {"record": real.record, "measure": real.measure, "validate": simulated.validate, "run": simulated.run}
    for line in part[args.what](args.only):
        print(json.dumps(line), flush=True)
        keep(figures, {"part": args.what, **line})
    return 0


def keep(figures: Path, line: dict[str, Any]) -> None:
    """Add a line to the figures, in place of an earlier one of the same case."""

    def key(each: dict[str, Any]) -> str:
        return json.dumps([each["part"], each["case"], each["strategy"], each.get("compression", ""), each["model"]])

    found = [json.loads(text) for text in figures.read_text().splitlines()] if figures.exists() else []
    found = [each for each in found if key(each) != key(line)] + [line]
    figures.write_text("".join(json.dumps(each) + "\n" for each in found))


if __name__ == "__main__":
    sys.exit(main())
