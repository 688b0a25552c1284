"""A rank that is killed while the others wait for it in a collective, and ranks that are ended from outside."""

import os
import re
import shutil
import signal
import subprocess
import sys
import time

import pytest

# For another thread: whether the main thread is in functions of these names.
MAIN_IS_IN = """
import os, signal, sys, threading
main = threading.main_thread().ident

def main_is_in(*functions):
    frame, names = sys._current_frames()[main], set()
    while frame is not None:
        names.add(frame.f_code.co_name)
        frame = frame.f_back
    return names.issuperset(functions)
"""

# A thread of rank 0 kills the victim as soon as its main thread is in the operation, or waits in it.
KILL = (
    MAIN_IS_IN
    + """
import numpy as np
from mn_comm import create_communicator
from mn_comm.ranks.watch import activities
comm = create_communicator("naive")
processes = comm.allgather_obj(os.getpid())

def kill():
    while not main_is_in("allreduce") or (sys.argv[3] == "waits" and activities[main].wait is None):
        pass
    os.kill(processes[int(sys.argv[1])], getattr(signal, sys.argv[2], 40))

if comm.rank == 0:
    threading.Thread(target=kill, daemon=True).start()
if comm.rank == 1:
    comm.recv_obj(0)
comm.allreduce(np.ones(3))
"""
)

SHOW_SHARED_MEMORY = """
import os, re
from mpi4py import MPI
for each in {*re.findall(r"/dev/shm/(?:mpich_shm|sm_segment)\\S+$", open("/proc/self/maps").read(), re.M)}:
    os.write(1, f"of MPI: {each}\\n".encode())
"""

POOL = """
import multiprocessing
from mn_comm import create_communicator
create_communicator("naive")
pool = multiprocessing.get_context("fork").Pool(2)
pool.map(abs, range(4))
pool.terminate()
pool.join()
print("done")
"""

# Most of the children are ended before their first instruction.
CHILDREN = """
import os, signal
from mn_comm import create_communicator
create_communicator("naive")
for _ in range(200):
    child = os.fork()
    while not child:
        pass
    os.kill(child, signal.SIGTERM)
    assert os.waitpid(child, 0)[1] == signal.SIGTERM
assert signal.pthread_sigmask(signal.SIG_BLOCK, ()) == set()
print("done")
"""

OWN_HANDLER = """
import os, signal, sys
signal.signal(signal.SIGTERM, lambda *_: sys.exit(7))
from mn_comm import create_communicator
create_communicator("naive")
os.kill(os.getpid(), signal.SIGTERM)
"""

# The signal comes during a fork, whose functions ignore exceptions.
DURING_A_FORK = """
import os, signal, sys
from mn_comm import create_communicator
from mn_guard.forks import around_forks
create_communicator("naive")
signal.signal(signal.SIGTERM, lambda *_: told.append("told"))
told = []
around_forks(before=lambda: os.kill(os.getpid(), signal.SIGTERM))
for _ in range(2):
    child = os.fork()
    if not child:
        os._exit(0)
    os.waitpid(child, 0)
    assert told.pop() == "told"
assert signal.pthread_sigmask(signal.SIG_BLOCK, ()) == set()
print("done")
"""

NO_STDERR = """
import os, signal, sys
sys.__stderr__ = None
from mn_comm import create_communicator
create_communicator("naive")
print("created", flush=True)
os.kill(os.getpid(), signal.SIGTERM)
"""

NO_DESCRIPTOR = """
import resource, sys
import mn_comm
resource.setrlimit(resource.RLIMIT_NOFILE, (256, 256))
comm = mn_comm.create_communicator("naive")
if comm.rank == 1:
    files = []
    try:
        while True:
            files.append(open("/dev/null"))
    except OSError:
        if sys.argv[1] == "exception":
            raise
    sys.exit(3)
comm.allreduce_obj(1)
"""

SIGNAL_AT_THE_END = (
    MAIN_IS_IN
    + """
import mn_comm
from mn_comm.building_blocks import Worker
received = []

def end(*_):
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    received.append(True)
    sys.exit(3)

signal.signal(signal.SIGTERM, end)
comm = mn_comm.create_communicator("naive")
worker = Worker()

def task():
    while comm.rank == 1 and not main_is_in("close_all", "await_end"):
        pass
    # Python does not notice a signal that comes just before a thread begins to wait.
    while comm.rank == 1 and not received:
        os.kill(os.getpid(), signal.SIGTERM)
    comm.mpi_comm.recv(source=0, tag=1)  # for ever
worker.put(task)
"""
)

# The handler of an alarm of the program raises while this rank ends all others.
ALARM_AT_THE_END = """
import signal, sys
from mn_comm import create_communicator
from mn_guard import exit_status

said = []  # why it ends all others; from then on, nothing keeps it from that

def say(text, write=exit_status.say):
    write(text)
    said.append(text)

def late(*_):
    if said:
        raise {"exception": TimeoutError, "exit": SystemExit}[sys.argv[1]](4)

signal.signal(signal.SIGALRM, late)
exit_status.say = say
comm = create_communicator("naive")
comm.barrier()
if comm.rank == 1:
    signal.setitimer(signal.ITIMER_REAL, 0.02, 0.02)
    sys.exit(3)
comm.barrier()
"""

MPIEXEC = shutil.which("mpiexec", path=os.path.dirname(sys.executable))


def run(ranks, script, *args):
    command = [MPIEXEC, "-n", str(ranks), sys.executable, "-c", script, *args]
    return subprocess.run(command, capture_output=True, text=True, timeout=30)


@pytest.mark.parametrize(("ranks", "name"), [(2, "SIGKILL"), (3, "SIGKILL"), (2, "signal 40")])
def test_a_rank_that_is_killed_ends_the_others(ranks, name):
    job = run(ranks, KILL, "1", name, "waits")
    assert job.returncode != 0
    # If the launcher asks for the status early, only the launcher knows how the rank died.
    how = f"(was killed by {name}|died of a signal, or called os._exit)"
    assert re.search(rf"\[chainermn\] rank 1 of {ranks} \(.+\) {how}", job.stderr), job.stderr


@pytest.mark.parametrize(("end", "status"), [("exception", 1), ("exit", 3)])
def test_a_rank_without_descriptors_ends_the_others(end, status):
    job = run(2, NO_DESCRIPTOR, end)
    assert job.returncode == status, job.stderr
    assert "on rank 1" in job.stderr
    assert "has reached the end" not in job.stderr  # the stall monitor did not have to end them


def test_a_signal_at_the_end_of_one_rank_ends_the_others():
    job = run(2, SIGNAL_AT_THE_END)
    assert job.returncode == 3, job.stderr
    assert "exit status 3 on rank 1" in job.stderr


@pytest.mark.parametrize("what", ["exception", "exit"])
def test_an_alarm_at_the_end_of_one_rank_does_not_keep_it_from_ending_the_others(what):
    job = run(2, ALARM_AT_THE_END, what)
    assert job.returncode == 3, job.stderr
    assert job.stderr.count("exit status 3 on rank 1") == 1
    assert "Traceback" not in job.stderr


def test_the_witness_may_be_unwanted(monkeypatch):
    monkeypatch.setenv("CHAINERMN_WITNESS", "0")
    job = run(2, KILL, "1", "SIGKILL", "waits")
    assert job.returncode != 0
    assert "[chainermn] rank 1 of 2" not in job.stderr


@pytest.mark.parametrize("when", ["begins", "waits"])
def test_a_rank_that_is_ended_names_its_operation(when):
    job = run(2, KILL, "0", "SIGTERM", when)
    assert job.returncode != 0
    assert "was ended by SIGTERM in allreduce, at <string>:" in job.stderr, job.stderr


@pytest.mark.parametrize("script", [POOL, CHILDREN])
def test_workers_of_a_pool_are_ended_in_silence(script):
    job = run(1, script)
    assert (job.returncode, job.stdout) == (0, "done\n"), job.stderr
    assert "most recent call first" not in job.stderr


@pytest.mark.skipif(not os.path.isdir("/dev/shm"), reason="no shared memory in files")
@pytest.mark.parametrize("name", ["SIGKILL", "SIGABRT"])
def test_no_shared_memory_is_left_behind(name):
    """The process of the node removes it, maybe after the launcher has ended."""
    job = run(2, SHOW_SHARED_MEMORY + KILL, "0", name, "waits")
    files = re.findall(r"^of MPI: (\S+)$", job.stdout, re.M)
    assert job.returncode != 0
    assert files, job.stdout
    deadline = time.monotonic() + 30
    while (left := [each for each in files if os.path.exists(each)]) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not left


def test_a_handler_of_the_program_is_left_alone():
    job = run(1, OWN_HANDLER)
    assert job.returncode == 7, job.stderr
    assert "most recent call first" not in job.stderr


def test_a_handler_of_the_program_is_called_during_a_fork():
    job = run(1, DURING_A_FORK)
    assert (job.returncode, job.stdout) == (0, "done\n"), job.stderr
    assert "ignored" not in job.stderr


def test_without_a_file_behind_stderr():
    # Without the launcher, which may drop output that was written before the end.
    job = subprocess.run([sys.executable, "-c", NO_STDERR], capture_output=True, text=True, timeout=30)
    assert (job.returncode, job.stdout, job.stderr) == (-signal.SIGTERM, "created\n", "")
