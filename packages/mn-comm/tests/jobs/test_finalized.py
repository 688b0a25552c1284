"""A rank that fails after the script has finalized MPI: no other rank waits for it."""

import os
import shutil
import subprocess
import sys

import pytest

MPIEXEC = shutil.which("mpiexec", path=os.path.dirname(sys.executable))
SCRIPT = """
import sys
from mn_comm import create_communicator
from mpi4py import MPI

rank = create_communicator("naive").rank
MPI.Finalize()
if rank == 1:
    {}
"""


@pytest.mark.parametrize("end", ["raise ValueError('no font for the picture')", "sys.exit('no font for the picture')"])
def test_the_reason_is_seen(end):
    command = [MPIEXEC, "-n", "2", sys.executable, "-c", SCRIPT.replace("{}", end)]
    job = subprocess.run(command, capture_output=True, text=True, timeout=40)
    assert job.returncode == 1, job.stderr
    assert "no font for the picture\n" in job.stderr
    # The messages of MPICH and Open MPI about a call after MPI was finalized.
    assert "after finalizing" not in job.stderr
    assert "MPI_FINALIZE was invoked" not in job.stderr
