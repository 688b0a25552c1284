"""Several hosts on this machine, if they can be created."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.rest

ROOT = Path(__file__).parents[2]
NOT_HERE = 77


@pytest.mark.parametrize("ranks", ["2,1", "1,2", "2,2"])
def test_strategies(ranks, tmp_path):
    command = [sys.executable, "-m", "mpi4py", "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider", "--color=no"]
    job = subprocess.run(
        [sys.executable, ROOT / "tools/cluster.py", "--hosts", ranks, "--", *command, ROOT / "tests/cluster"],
        env={**os.environ, "RANKS_PER_HOST": ranks},
        capture_output=True,
        text=True,
        timeout=220,
    )
    if job.returncode == NOT_HERE:
        pytest.skip(job.stderr.strip())
    assert job.returncode == 0, job.stdout + job.stderr
    assert " passed" in job.stdout


END = """
from mn_comm import create_communicator
comm = create_communicator("naive")
comm.allreduce_obj(comm.rank)
"""


def test_an_end_without_a_word():
    # UCX warned about messages that were not received: those by which ranks inform each other that they have ended.
    job = subprocess.run(
        [sys.executable, ROOT / "tools/cluster.py", "--hosts", "2,1", "--", sys.executable, "-c", END],
        capture_output=True,
        text=True,
        timeout=220,
    )
    if job.returncode == NOT_HERE:
        pytest.skip(job.stderr.strip())
    assert (job.returncode, job.stdout, job.stderr) == (0, "", "")
