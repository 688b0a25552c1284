"""Children of os.fork that reach the end of the program: no rank takes such a child for its parent."""

import os
import shutil
import subprocess
import sys

MPIEXEC = shutil.which("mpiexec", path=os.path.dirname(sys.executable))

# The first function that is registered is called last: it ends the child before MPI_Finalize, which may wait forever.
SCRIPT = """
import atexit, os, sys, time
process = os.getpid()
atexit.register(lambda: os.getpid() == process or os._exit(0))
from mn_comm import create_communicator

comm = create_communicator("naive")
if comm.rank == 1:
    comm.send_obj("for rank 0, not for its child", 0, tag=4)
comm.barrier()
if comm.rank == 0:
    if os.fork() == 0:
        sys.exit()
    os.wait()
    time.sleep(4)
comm.barrier()
if comm.rank == 0:
    print(comm.recv_obj(1, tag=4))
"""


def test_a_child_that_ends_receives_nothing_and_says_no_farewell():
    job = subprocess.run(
        [MPIEXEC, "-n", "2", sys.executable, "-c", SCRIPT],
        env={**os.environ, "CHAINERMN_STALL_SECONDS": "1"},
        capture_output=True,
        text=True,
        timeout=40,
    )
    assert (job.returncode, job.stdout) == (0, "for rank 0, not for its child\n"), job.stderr
    assert "without having received" not in job.stderr
    assert job.stderr.count(", a child of rank 0 of 2, has reached the end of the program") == 1, job.stderr
    assert "end a child of os.fork with os._exit" in job.stderr
