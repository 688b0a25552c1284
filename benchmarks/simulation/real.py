"""Real runs: what they call, what they take, and how many bytes the links of hosts carry."""

from __future__ import annotations

import json
import os
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

__all__ = ["MEASURED", "STRATEGIES", "lengths_of", "measure", "record"]

BENCHMARKS = Path(__file__).resolve().parents[1]
CLUSTER = BENCHMARKS.parent / "tools" / "cluster.py"
NO_CLUSTER = 77
STRATEGIES = ("naive", "flat", "hierarchical", "two_dimensional")
EXACT = [[name, ""] for name in STRATEGIES]
COMPRESSED = [["hierarchical", "Int8"], ["two_dimensional", "Int8"]]
# Gradients that leave enough memory for far more ranks than cores.
SMALL = {"5 MB": [100_003] * 13, "8 MB": [262_144] * 8}
RECORDED = (
    (16, "resnet50", [*EXACT, *COMPRESSED, ["flat", "Int8"]]),
    (16, "wide", [*EXACT, *COMPRESSED]),
    (20, "wide", [*EXACT, *COMPRESSED]),
    (64, "wide", [*EXACT, *COMPRESSED]),
    (256, "5 MB", [*EXACT, *COMPRESSED]),
)
# Hosts and the rate of their links: so low that the network takes most of the time, although all share a few cores.
MEASURED = (
    ((1,) * 4, "100mbit"),
    ((4,) * 4, "100mbit"),
    ((1,) * 16, "100mbit"),
    ((8,) * 8, "20mbit"),
    ((4,) * 12, "20mbit"),
    ((8,) * 32, "10mbit"),
)
ROUNDS = 3


def record(only: str) -> Iterator[dict[str, Any]]:
    """Yield what was recorded on ranks that pretend to run on nodes of eight."""
    for ranks, model, contestants in RECORDED:
        case = f"{ranks} ranks"
        if only in case:
            hosts = [min(8, ranks - begin) for begin in range(0, ranks, 8)]
            launcher = [shutil.which("mpiexec", path=os.path.dirname(sys.executable)) or "mpiexec", "-n", str(ranks)]
            for line in _start(launcher, hosts, contestants, model, 0):
                yield {"case": case, **line}


def measure(only: str) -> Iterator[dict[str, Any]]:
    """Yield what was measured on virtual hosts."""
    for hosts, rate in MEASURED:
        case = f"{len(hosts)} hosts of {hosts[0]}, {rate}"
        if only in case:
            launcher = [sys.executable, str(CLUSTER), "--hosts", ",".join(map(str, hosts)), "--rate", rate, "--"]
            for line in _start(launcher, list(hosts), EXACT, "8 MB", ROUNDS):
                yield {"case": case, "rate": rate, **line}


def _start(
    launcher: list[str], hosts: list[int], contestants: list[list[str]], model: str, rounds: int
) -> list[dict[str, Any]]:
    """Run the job of simulation/job.py, and return what it has printed."""
    job = {"hosts": hosts, "contestants": contestants, "model": model, "lengths": lengths_of(model), "rounds": rounds}
    command = [*launcher, sys.executable, str(BENCHMARKS / "simulate.py"), "record", "--job", json.dumps(job)]
    environ = {**os.environ, "OMP_NUM_THREADS": "1", "MPIR_CVAR_ENABLE_HEAVY_YIELD": "1"}
    done = subprocess.run(command, env=environ, capture_output=True, text=True, timeout=3600)
    if done.returncode == NO_CLUSTER:
        print(f"left out: {done.stderr.strip()}")
        return []
    if done.returncode:
        raise RuntimeError(f"{shlex.join(launcher)} ended with status {done.returncode}\n{done.stdout}{done.stderr}")
    return [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]


def lengths_of(model: str) -> list[int]:
    """Return the number of elements of each gradient."""
    if model in SMALL:
        return SMALL[model]
    import numpy as np
    from models import MODELS

    return [int(np.prod(shape)) for shape in MODELS[model]]
