"""Runs replay.cpp with SimGrid's SMPI."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from collections.abc import Iterable
from pathlib import Path

__all__ = ["Simulator", "what_is_missing"]

SOURCE = Path(__file__).resolve().parent / "replay.cpp"
FOLDER = SOURCE.parents[2] / "result" / "simulation"
# The fluid model without corrections for TCP: latency, and bandwidth that is shared max-min fairly. The algorithm of
# allreduce is that of MPICH. Nothing else takes time.
SETTINGS = {
    "network/model": "CM02",
    "network/bandwidth-factor": "1",
    "network/latency-factor": "1",
    "network/TCP-gamma": "1e15",
    "network/weight-S": "0",
    "network/crosstraffic": "0",
    "smpi/allreduce": "rab_rdb",
    "smpi/wtime": "0",
    "smpi/simulate-computation": "no",
    "smpi/privatization": "no",
    "contexts/stack-size": "64",
    "contexts/guard-size": "0",
}


def what_is_missing() -> str:
    """Return why nothing can be simulated here, or an empty string."""
    missing = [name for name in ("smpicxx", "smpirun") if shutil.which(name) is None]
    return f"there is no {', '.join(missing)}: install SimGrid (Debian: libsimgrid-dev and g++)" if missing else ""


class Simulator:
    """The compiled replay.

    Args:
        folder: The folder for the program, and for the files of each run.
    """

    def __init__(self, folder: Path = FOLDER) -> None:
        self._folder = folder / str(os.getpid())  # several may run at the same time
        self._folder.mkdir(parents=True, exist_ok=True)
        self._program = folder / "replay"
        if not self._program.exists() or self._program.stat().st_mtime < SOURCE.stat().st_mtime:
            subprocess.run(["smpicxx", "-std=c++17", "-O2", str(SOURCE), "-o", str(self._program)], check=True)

    def seconds(
        self,
        platform: str,
        nodes: Iterable[int],
        steps: Iterable[str],
        *,
        on_host: int = 1,
        timeout: float = 3600,
        **settings: str,
    ) -> float:
        """Return the simulated seconds of an average.

        Args:
            platform: The network, with hosts node-0, node-1 and so on.
            nodes: The host of each node.
            steps: The plan.
            on_host: How many ranks of each node are simulated; with 1, it stands for all of them.
            timeout: The seconds that this may take.
            settings: More of SMPI's settings.
        """
        hosts = [f"node-{number}" for number in nodes for _ in range(on_host)]
        files = {"platform.xml": platform, "hosts": "\n".join(hosts) + "\n", "plan": "\n".join(steps) + "\n"}
        for name, text in files.items():
            (self._folder / name).write_text(text)
        smpi = {f"smpi/{name}": value for name, value in settings.items()}
        command = ["smpirun", "-np", str(len(hosts)), "-platform", "platform.xml", "-hostfile", "hosts"]
        command += [f"--cfg={name}:{value}" for name, value in {**SETTINGS, **smpi}.items()]
        command += ["--log=root.thres:critical", str(self._program), "plan", str(on_host)]
        done = subprocess.run(command, cwd=self._folder, capture_output=True, text=True, timeout=timeout)
        found = [line for line in done.stdout.splitlines() if line.startswith("{")]
        if done.returncode or not found:
            raise RuntimeError(f"smpirun ended with status {done.returncode}\n{done.stdout}{done.stderr}")
        return float(json.loads(found[-1])["seconds"])
