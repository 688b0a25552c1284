"""A message that is never received is reported, and does not keep another rank from reaching its end."""

import os
import shutil
import subprocess
import sys

import pytest

MPIEXEC = shutil.which("mpiexec", path=os.path.dirname(sys.executable))

# Rank 0 is still working when rank 1 ends. If rank 1 ends correctly, it waits for rank 0 in MPI_Finalize.
SCRIPT = """
import os, select, sys
import numpy as np
from mn_comm import create_communicator

comm = create_communicator("naive")
size = int(sys.argv[1])
if comm.rank == 0:
    comm.send_obj("nobody receives this", 1, tag=5)
    requests = [comm.mpi_comm.Isend(np.ones(size), 1, 7) for _ in range(3)]
other = comm.bcast_obj(os.getpid(), root=1)
if comm.rank == 0:
    select.select([os.pidfd_open(other)], [], [], 1)
    print("rank 0 has reached its end")
"""


@pytest.mark.parametrize("size", [1, 1_000_000])
def test_the_sender_comes_to_its_end(size):
    job = subprocess.run(
        [MPIEXEC, "-n", "2", sys.executable, "-c", SCRIPT, str(size)], capture_output=True, text=True, timeout=30
    )
    assert (job.returncode, job.stdout) == (0, "rank 0 has reached its end\n"), job.stderr
    assert (
        "[chainermn] rank 1 of 2 has ended without having received all messages: "
        "1 from rank 0 with tag 5, 3 from rank 0 with tag 7; each send needs a recv\n"
    ) in job.stderr
    assert "rank 0 of 2" not in job.stderr
