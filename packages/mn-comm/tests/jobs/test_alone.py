"""Without mn-guard, creating communicators and averaging start no thread and no process, and install no handler."""

import os
import subprocess
import sys

ALONE = """
import atexit, faulthandler, os, signal, sys, threading
sys.modules["mn_guard"] = None  # as if it were not installed

from mpi4py import MPI
registered, at_fork = [], []
register = atexit.register
atexit.register = lambda function, *rest: registered.append(function) or register(function, *rest)
register_at_fork = os.register_at_fork
os.register_at_fork = lambda **which: at_fork.append(which) or register_at_fork(**which)
before = (sys.excepthook, sys.exit, [signal.getsignal(number) for number in signal.valid_signals()])
import numpy as np
import mn_comm
comm = mn_comm.create_communicator("naive")
ours = [name for name in sys.modules if name.partition(".")[0].startswith("mn_")]
other = comm.split(0, comm.rank)
comm.allreduce(np.ones(3))
comm.allgather_obj(comm.rank)
assert threading.enumerate() == [threading.main_thread()], threading.enumerate()
assert (sys.excepthook, sys.exit, [signal.getsignal(number) for number in signal.valid_signals()]) == before
assert signal.set_wakeup_fd(-1) == -1
assert not faulthandler.is_enabled()
assert not registered and not at_fork, (registered, at_fork)
if sys.version_info >= (3, 12):
    assert not any(sys.monitoring.get_tool(number) for number in range(6))
assert not any(name.startswith("mn_guard.") for name in sys.modules)
print(len(ours) - 1)
"""


def test_a_library_user_gets_nothing_that_was_not_asked_for(tmp_path):
    launcher = os.path.join(os.path.dirname(sys.executable), "mpiexec")
    job = subprocess.run([launcher, "-n", "2", sys.executable, "-c", ALONE], capture_output=True, text=True, timeout=60)
    assert job.returncode == 0, job.stdout + job.stderr
    assert all(int(count) <= 30 for count in job.stdout.split())
