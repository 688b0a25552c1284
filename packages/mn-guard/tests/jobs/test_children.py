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
from mn_guard import guard_thread, stall
comm.barrier()
guard_thread.thread.find(stall.Monitor).limit = 60.0
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


# A worker may be made before the first communicator, when there is nothing to watch yet.
WORKER = """
import os, sys, time
from mn_comm.building_blocks import Worker

Worker()
if os.fork() == 0:
    from mn_comm import create_communicator

    comm = create_communicator("naive")
    Worker().put(lambda: (time.sleep(0.2), print("done", flush=True)))
    sys.exit()
os.wait()
"""


def test_tasks_of_a_child_end_though_its_parent_had_a_worker_already():
    job = subprocess.run([sys.executable, "-c", WORKER], capture_output=True, text=True, timeout=40)
    assert (job.returncode, job.stdout) == (0, "done\n"), job.stderr


STATUS = """
import atexit, sys
from mn_comm.building_blocks import Worker

Worker()
atexit.register(lambda: comm.barrier())
from mn_comm import create_communicator

comm = create_communicator("naive")
if comm.rank == 1:
    sys.exit(3)
comm.allreduce_obj(1)
"""


def test_the_exit_status_is_looked_at_before_the_scripts_own_functions_though_there_was_a_worker_already():
    job = subprocess.run([MPIEXEC, "-n", "2", sys.executable, "-c", STATUS], capture_output=True, text=True, timeout=40)
    assert job.returncode == 3, job.stderr
    assert "exit status 3 on rank 1" in job.stderr
