"""The messages of all ranks when one waits too long; the thread must not hinder forks or the end of the process."""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

WAIT = """
from mn_comm import create_communicator
from mn_guard import guard_thread, stall
comm = create_communicator("naive").split(0, 0)
comm.barrier()
guard_thread.thread.find(stall.Monitor).limit = 3.0  # not before: on a busy machine, the above takes long
if comm.rank == 0:
    comm.recv(1, tag=3)
else:
    comm.allreduce_obj(1)
"""

FORK = """
import os, warnings
warnings.simplefilter("error")
from mn_comm import create_communicator
from mn_guard import guard_thread, stall
comm = create_communicator("naive")
child = os.fork()
if child == 0:
    os._exit(0 if guard_thread.thread.find(stall.Monitor) is None and guard_thread.thread.runner is None else 1)
assert os.waitpid(child, 0)[1] == 0
assert guard_thread.thread.runner.is_alive()
comm.finalize()
print("done")
"""


# Settings are made once all ranks are there and have imported everything: that may take longer than stalls may.
BEGIN = """
import os
os.environ["CHAINERMN_STALL_SECONDS"] = "0"
import mn_comm
from mpi4py import MPI
if MPI.COMM_WORLD.size > 1:
    mn_comm.create_communicator("naive", MPI.COMM_SELF)
MPI.COMM_WORLD.Barrier()
os.environ.update({settings})
"""


def run(ranks, script, **settings):
    begin = BEGIN.replace("{settings}", repr({"CHAINERMN_STALL_SECONDS": "60", **settings}))
    mpiexec = shutil.which("mpiexec", path=os.path.dirname(sys.executable))
    command = [mpiexec, "-n", str(ranks), sys.executable, "-c", begin + script]
    return subprocess.run(command, capture_output=True, text=True, timeout=70)


ENDED = "has ended the job", "was ended", "was killed", "died of a signal"


@pytest.mark.parametrize("ranks", [2, 4])
def test_every_rank_speaks_and_the_job_ends(ranks):
    job = run(ranks, WAIT, CHAINERMN_STALL_ABORT="1")
    assert job.returncode != 0
    said = rf"^\[chainermn\] rank ([0-9]) of {ranks} \(\S+\)(?:, asked by rank [0-9],)? has waited for \S+ s in (.+)$"
    spoken = re.findall(said, job.stderr, re.M)
    others = [(str(rank), "allreduce_obj(obj=1), at <string>:19 in <module>") for rank in range(1, ranks)]
    assert sorted(spoken) == [("0", "recv(source=1, tag=3), at <string>:17 in <module>"), *others], job.stderr
    # Several ranks may end the job at the same time; nothing is said twice, and there are no other lines.
    ends = re.findall(r"\[chainermn\] rank ([0-9]) ends the job: CHAINERMN_STALL_ABORT is set$", job.stderr, re.M)
    how = rf"\[chainermn\] rank ([0-9]) of {ranks} \(\S+, process [0-9]+\) (?:{'|'.join(ENDED)})"
    ended = re.findall(how, job.stderr)
    assert len(set(ends)) == len(ends), job.stderr
    assert len(set(ended)) == len(ended), job.stderr
    assert job.stderr.count("[chainermn]") == ranks + len(ends) + len(ended), job.stderr


def test_a_fork_while_the_monitor_runs():
    job = run(1, FORK)
    assert (job.returncode, job.stdout) == (0, "done\n"), job.stderr


FINALIZE = """
import threading, time
from mn_comm import create_communicator
from mpi4py import MPI
comm = create_communicator("flat")
comm.gradient_reducer(background=True)
MPI.Finalize()
assert not [thread for thread in threading.enumerate() if "chainermn" in thread.name]
print("done")
"""


def test_a_script_that_finalizes_mpi_itself():
    job = run(2, FINALIZE, CHAINERMN_STALL_SECONDS="1")
    assert (job.returncode, job.stdout.count("done")) == (0, 2), job.stderr


NEVER = """
import sys, threading
import numpy as np
sys.path.insert(0, sys.argv[1])
from fake_model import Model, Param
from mn_comm import create_communicator
from mn_guard import guard_thread, stall
class Never:
    def wait(self):
        guard_thread.thread.find(stall.Monitor).limit = 1.0  # not before: the other rank may be late
        threading.Event().wait()
reducer = create_communicator("flat").gradient_reducer(comm_hook=lambda bucket: Never(), background=sys.argv[2] == "1")
model = Model(p=Param(np.zeros(3), np.zeros(3)))
if sys.argv[2] == "1":
    reduction = reducer.start(model)
    reduction.ready_all()
    reduction.wait()
reducer.average(model)
"""


@pytest.mark.parametrize("background", ["0", "1"])
def test_a_hook_whose_mean_never_comes(background):
    fakes = str(Path(__file__).parents[3] / "mn-comm" / "tests" / "fakes")
    script = NEVER.replace("sys.argv[1]", repr(fakes)).replace("sys.argv[2]", repr(background))
    job = run(2, script, CHAINERMN_STALL_ABORT="1")
    assert job.returncode != 0
    assert re.search(r"has waited for \S+ s in comm_hook, at <string>", job.stderr), job.stderr


FINISHES = """
from mn_comm import create_communicator
comm = create_communicator("naive")
if comm.rank:
    comm.allreduce_obj(1)
"""


def test_a_rank_that_has_come_to_its_end_is_named_and_not_waited_for():
    job = run(3, FINISHES, CHAINERMN_STALL_SECONDS="1")
    assert job.returncode != 0
    assert "rank 0 has reached the end of its program, but this rank still waits for it" in job.stderr


IN_HALVES = """
import numpy as np
from mn_comm import create_communicator
from mn_comm.collectives import mean_in_place
comm = create_communicator("naive")
if comm.rank:
    mean_in_place(comm.ranks, np.zeros(3, np.float16))
"""


def test_a_mean_by_messages_between_ranks_waits_for_all_of_them():
    """Rank 1 waits for rank 2, rank 2 for rank 0."""
    job = run(3, IN_HALVES, CHAINERMN_STALL_SECONDS="1")
    assert job.returncode != 0
    assert "rank 0 has reached the end of its program, but this rank still waits for it" in job.stderr


LATE = """
import time
from mn_comm import create_communicator
comm = create_communicator("naive")
others = comm.split(0 if comm.rank else 1, 0)
if comm.rank == 1:
    time.sleep(4)
if comm.rank:
    others.allreduce_obj(1)
    print("done")
"""


# The members of a part wait for each other while it is created; then a rank of another part may have ended.
LATE_IN_A_SPLIT = """
import time
from mn_comm import create_communicator
from mn_comm.ranks import context
comm, contexts = create_communicator("naive"), context.Contexts

def create_late(*args):
    time.sleep(4 * (comm.rank == 2))
    return contexts(*args)

context.Contexts = create_late
comm.split(0 if comm.rank else 1, 0)
if comm.rank:
    print("done")
"""


@pytest.mark.parametrize("script", [LATE, LATE_IN_A_SPLIT], ids=["later", "in a split"])
def test_a_rank_that_ends_early_ends_nothing_that_goes_on_without_it(script):
    job = run(3, script, CHAINERMN_STALL_SECONDS="1")
    # Launchers forward the ranks' output in pieces.
    assert (job.returncode, sorted(job.stdout)) == (0, sorted("done\ndone\n")), job.stderr
    assert "rank 2 of 3" in job.stderr


STOPPED = """
import os, signal, time
from mn_comm import create_communicator
from mn_guard import guard_thread, stall
comm = create_communicator("naive")
others = comm.allgather_obj(os.getpid())

def is_stopped(process):
    with open(f"/proc/{process}/stat") as file:
        return file.read().rpartition(")")[2].split()[0] == "T"

def let_it_continue(text):
    write(text)
    if "does not answer" in text:
        os.kill(others[1], signal.SIGCONT)

if comm.rank == 0:
    while not is_stopped(others[1]):
        time.sleep(0.01)
    monitor = guard_thread.thread.find(stall.Monitor)
    write, monitor._write, monitor.limit = monitor._write, let_it_continue, 1.0
else:
    os.kill(os.getpid(), signal.SIGSTOP)
comm.allreduce_obj(1)
"""


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="other systems have no /proc")
def test_a_rank_that_does_not_answer_is_named():
    job = run(2, STOPPED)
    assert job.returncode == 0, job.stderr
    assert job.stderr.count("rank 1 does not answer") == 1


PARTNER_FINISHES = """
from mn_comm import create_communicator
comm = create_communicator("naive")
if comm.rank == 0:
    {}
"""
WAITS = ["comm.recv(1)", "comm.recv_obj(source=1, tag=3)", "comm.recv_obj(1)"]


@pytest.mark.parametrize("wait", WAITS)
def test_a_rank_that_waits_for_one_that_has_come_to_its_end_ends_the_job(wait):
    job = run(2, PARTNER_FINISHES.replace("{}", wait), CHAINERMN_STALL_SECONDS="1")
    assert job.returncode != 0
    assert "rank 1 has reached the end of its program, but this rank still waits for it" in job.stderr


HAS_EXITED = """
import atexit, sys, threading
from mn_comm import create_communicator
comm, other = create_communicator("naive"), create_communicator("naive")
if comm.rank == 1:
    {}
    sys.exit(3)
comm.recv_obj(1)
"""
STILL_WAITS = {
    "in a function of atexit": "atexit.register(comm.barrier)",
    "in a thread": "threading.Thread(target=other.recv_obj, args=(0,)).start()",
}


@pytest.mark.parametrize("where", STILL_WAITS)
def test_a_rank_that_has_exited_and_still_waits_ends_the_job_with_its_status(where):
    job = run(2, HAS_EXITED.replace("{}", STILL_WAITS[where]), CHAINERMN_STALL_SECONDS="1")
    assert job.returncode == 3, job.stderr
    assert "rank 1 ends the job: this rank has asked for exit status 3, but still waits" in job.stderr


ONLY_A_THREAD_WAITS = """
import os, threading, time
from mn_comm import create_communicator
comm = create_communicator("naive")
if comm.rank == 0:
    threading.Thread(target=comm.recv_obj, args=(1,), daemon=True).start()
    time.sleep(5)
    print("done", flush=True)
    os._exit(0)  # MPI may crash if a thread is inside it at its end
"""


def test_a_thread_may_wait_for_a_rank_that_has_come_to_its_end():
    job = run(2, ONLY_A_THREAD_WAITS, CHAINERMN_STALL_SECONDS="1")
    assert job.stdout.startswith("done\n"), job.stderr
    assert "has reached the end of its program" not in job.stderr
