"""The soak: the same tasks again and again leave nothing behind, and what grows is named."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.rest

SCRIPT = Path(__file__).parents[2] / "tools" / "soak.py"


def soak(*arguments):
    launcher = shutil.which("mpiexec", path=os.path.dirname(sys.executable))
    return subprocess.run(
        [launcher, "-n", "2", sys.executable, SCRIPT, *arguments],
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=220,
    )


def test_nothing_is_left_behind():
    # In so few rounds, the memory of a process still varies; a real run takes 20 minutes, and allows 1 %.
    job = soak("--rounds", "8", "--growth", "0.1")
    assert job.returncode == 0, job.stdout + job.stderr
    assert "rank 1: " in job.stdout
    assert "GREW" not in job.stdout


@pytest.mark.parametrize(
    ("leak", "grown"), [("descriptors", "descriptors"), ("memory", "malloc"), ("objects", "Python's blocks")]
)
def test_what_grows_is_named(leak, grown):
    job = soak("--rounds", "20", "--only", "split", "--leak", leak)
    assert job.returncode == 1, job.stdout + job.stderr
    lines = [line for line in job.stdout.splitlines() if line.strip().startswith(f"{grown} ")]
    assert len(lines) == 2
    assert all(line.endswith("GREW") for line in lines)
