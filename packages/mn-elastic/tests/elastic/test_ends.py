"""Whatever ends a rank ends only this rank, and the others continue immediately."""

import glob
import os
import time

import pytest
from processes import IS_ALIVE

CODE = """
import os, signal, sys, time
import numpy as np
from mn_comm import RankLost, create_communicator
comm = create_communicator("naive", elastic=True)
me = comm.rank
began = time.monotonic()
comm.on_change(lambda change: print(f"after {time.monotonic() - began:.3f}", comm.size, flush=True))

def end(how):
    if how == "exception":
        raise ValueError("the end")
    if how == "hook":
        sys.excepthook = lambda *_: sys.stderr.write("a hook of its own\\n")
        raise ValueError("the end")
    if how == "exit":
        sys.exit(3)
    if how == "_exit":
        os._exit(3)
    if how == "end":
        sys.exit()
    os.kill(os.getpid(), getattr(signal, how))

comm.barrier()
began = time.monotonic()
if me == 1:
    end(sys.argv[1])
for i in range(20):
    try:
        comm.allreduce_obj(1)
    except RankLost:
        pass
print(comm.size, flush=True)
"""


def times_and_rest(printed):
    times = [float(line.split()[1]) for line in printed if line.startswith("after")]
    return times, [line for line in printed if not line.startswith("after")]


@pytest.mark.parametrize("how", ["SIGKILL", "SIGSEGV", "SIGTERM", "exception", "exit", "_exit", "hook", "end"])
def test_the_others_go_on(job, how, monkeypatch):
    monkeypatch.setenv("CHAINERMN_STALL_SECONDS", "2" if how == "end" else "60")
    times, printed = times_and_rest(job(3, CODE, how))
    assert printed == ["2", "2"]
    assert len(times) == 2
    # Half a second on an idle machine; here, other programs may run.
    assert max(times) < 20
    assert job.stderr.count("Traceback") == (how == "exception")
    said = {"exception": "ValueError: the end", "exit": "exit status 3 on rank 1", "SIGTERM": "SIGTERM on rank 1"}
    said |= {"_exit": "os._exit(3) on rank 1", "end": "no longer waits: rank 1 has reached the end of its program"}
    assert {**said, "hook": "a hook of its own"}.get(how, "") in job.stderr
    if how in said:  # the death of a rank that has explained itself is no news
        assert "called os._exit" not in job.stderr and "was killed by" not in job.stderr


TWICE = f"""
{IS_ALIVE}
import os, signal, threading, time
from mn_comm import RankLost, create_communicator
from mn_comm.ranks.watch import activities
from mn_elastic import ends
from mn_guard import guard_thread
comm = create_communicator("naive", elastic=True)
processes = comm.allgather_obj(os.getpid())

def wait_until(condition):
    while not condition():
        time.sleep(0.001)

def send_twice():
    waits = activities[threading.main_thread().ident]
    counts = guard_thread.thread.find(ends._EndAtOnce)
    wait_until(lambda: waits.wait)  # from then on, the main thread is in MPI
    os.kill(os.getpid(), signal.SIGTERM)
    wait_until(lambda: counts._count == 1)  # two that are pending are one
    os.kill(os.getpid(), signal.SIGTERM)

if comm.rank == 0:
    threading.Thread(target=send_twice, daemon=True).start()
else:
    deadline = time.monotonic() + 20
    while is_alive(processes[0]) and time.monotonic() < deadline:
        time.sleep(0.01)
    print("alive" if is_alive(processes[0]) else "ended")
try:
    comm.barrier()
except RankLost:
    print(comm.size)
"""


def test_a_second_sigterm_ends_a_rank_that_waits_for_others(job):
    assert job(2, TWICE) == ["1", "ended"]
    assert "another SIGTERM on rank 0: it ends immediately" in job.stderr


BUSY = """
import time
from mn_comm import create_communicator
comm = create_communicator("naive", elastic=True)
comm.barrier()
if comm.rank == 0:
    time.sleep(6)  # busy for longer than the limit, while one rank has ended, and another one waits
    comm.send_obj("from 0", 2)
    print(comm.recv_obj(1))
elif comm.rank == 1:
    comm.send_obj("from 1", 0)
else:
    print(comm.recv_obj(0))
"""


def test_a_rank_that_has_ended_interrupts_nobody_who_does_not_wait_for_it(job, monkeypatch):
    monkeypatch.setenv("CHAINERMN_STALL_SECONDS", "1")
    assert job(3, BUSY) == ["from 0", "from 1"]
    assert "in recv_obj(" in job.stderr
    assert "no longer waits" not in job.stderr
    assert "lost rank" not in job.stderr


AT_THE_END = """
import os, signal, sys, time
from mn_comm import create_communicator
from mn_elastic import ends
from mn_guard.exit_sequence import Step, at_exit
comm = create_communicator("naive", elastic=True)
comm.barrier()
how, notes = sys.argv[1:]

def exit_last(status, exit=ends._exit):  # then the launcher ends the others
    signal.setitimer(signal.ITIMER_REAL, 0)
    while len(os.listdir(notes)) < 2:
        time.sleep(0.01)
    exit(status)

def note(rank=comm.rank):
    how = "without MPI_Finalize" if ends._very_end.state else "MPI_Finalize"
    open(f"{notes}/{rank} {how}", "w").close()

if comm.rank == 1:
    ends._exit = exit_last
    time.sleep(0.2)  # the others have reached the end
    if how == "fails":
        raise ValueError("at the end")
    os.kill(os.getpid(), signal.SIGKILL)
at_exit(Step.FINISHED, note)
"""


@pytest.mark.parametrize(("how", "status"), [("dies", 0), ("fails", 1)])
def test_mpi_is_not_finalized_if_a_rank_does_not_come_while_the_others_end(job, how, status, tmp_path):
    notes = tmp_path / "notes"
    notes.mkdir()
    assert job(3, AT_THE_END, how, str(notes), status=status) == []
    assert sorted(os.listdir(notes)) == ["0 without MPI_Finalize", "2 without MPI_Finalize"]


ALL = """
from mn_comm import create_communicator
comm = create_communicator("naive", elastic=True)
raise ValueError("a mistake in the script")
"""


def test_a_job_whose_ranks_all_fail_has_failed(job):
    job(2, ALL, status=1)
    assert "no rank continues" in job.stderr
    assert "a mistake in the script" in job.stderr


STATUS = """
import os, signal, sys
from mn_comm import create_communicator, transact

def main():
    comm = create_communicator("naive", elastic=True)
    if comm.rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    for _ in range(20):
        transact(comm, lambda: comm.allreduce_obj(1))
    return 3

sys.exit(main())
"""


def test_the_status_after_a_loss_is_that_of_the_script(job):
    job(3, STATUS, status=3)


POOL = """
import multiprocessing
from mn_comm import create_communicator
comm = create_communicator("naive", elastic=True)
pool = multiprocessing.get_context("fork").Pool(2)
pool.map(abs, range(4))
pool.terminate()
pool.join()
print("done", comm.allreduce_obj(1), flush=True)
"""


def test_workers_of_a_pool_can_be_ended(job):
    assert job(2, POOL) == ["done 2", "done 2"]


CHILD = """
import multiprocessing.shared_memory, os, signal, sys, time
from mn_comm import RankLost, create_communicator
comm = create_communicator("naive", elastic=True)
queue = multiprocessing.Queue()
mine = multiprocessing.shared_memory.SharedMemory(f"{sys.argv[2]}-{comm.rank}", create=True, size=1)

def work():  # like the workers of Chainer's MultiprocessIterator
    signal.alarm(100)
    queue.get()

multiprocessing.get_context("fork").Process(target=work, daemon=True).start()
comm.barrier()
if comm.rank:
    if sys.argv[1] == "exception":
        raise ValueError("the end")
    os.kill(os.getpid(), getattr(signal, sys.argv[1]))
if sys.argv[1] == "exception":
    time.sleep(4)  # the others end without its vote
while comm.size > 1:
    try:
        comm.allreduce_obj(1)
    except RankLost:
        pass
mine.unlink()
print("done", flush=True)
"""


@pytest.mark.parametrize("how", ["SIGKILL", "SIGTERM", "exception"])
def test_the_children_of_ranks_end_with_them(job, how):
    """They hold the pipes that the launcher reads, which waited until they had ended as well."""
    name = f"chainermn-{os.getpid()}-{how}"
    assert job(3, CHILD, how, name) == ["done"]
    deadline = time.monotonic() + 20
    while (left := glob.glob(f"/dev/shm/{name}*")) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not left  # removed by multiprocessing's resource tracker


NORMAL_END = """
import os, subprocess, sys
from mn_comm import create_communicator
comm = create_communicator("naive", elastic=True)
comm.barrier()
subprocess.Popen(["sh", "-c", f"sleep 2; echo saved > {sys.argv[1]}/{comm.rank}"])
os._exit(0)
"""


def test_the_children_of_ranks_that_end_normally_may_continue(job, tmp_path):
    job(2, NORMAL_END, str(tmp_path))  # the launcher waits for them
    assert sorted(each.name for each in tmp_path.iterdir()) == ["0", "1"]


PART = """
from mpi4py import MPI
from mn_comm import create_communicator
try:
    create_communicator("naive", MPI.COMM_WORLD.Split(MPI.COMM_WORLD.rank, 0), elastic=True)
except ValueError as error:
    print(str(error).partition(" with ")[0], flush=True)
"""


def test_a_part_of_the_processes_is_refused(job):
    assert job(2, PART) == ["expected all 2 processes of the job"] * 2


BLOCKED = """
import signal
signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGALRM})
from mpi4py import MPI
from mn_comm import create_communicator
comm = create_communicator("naive", elastic=True)
comm.barrier()
if comm.rank == 1:
    raise ValueError("the end")
try:
    MPI.COMM_WORLD.recv(source=1)  # no vote
except MPI.Exception:
    print("noticed", flush=True)
"""


def test_a_rank_waits_for_a_vote_for_a_short_time_only(job):
    """It is ended by SIGALRM, even if the script has blocked it."""
    assert job(2, BLOCKED) == ["noticed"]


NOT_ELASTIC = {
    "an exception on rank 0": """
if comm.rank == 0:
    raise ValueError("the end")
comm.allgather_obj(None)
""",
    "an exception on all ranks": "expect_same(comm, 'the end', comm.rank)",
    "a rank that dies then": """
try:
    expect_same(comm, "the end", comm.rank)
except ValueError:
    if comm.rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    raise
""",
}


@pytest.mark.parametrize("what", NOT_ELASTIC)
def test_an_ordinary_communicator_under_the_same_launcher(job, what):
    # With --with-ft ulfm, the other ranks went on after MPI_Abort, and waited forever.
    preamble = "import os, signal\nfrom mn_comm import create_communicator, expect_same\n"
    job(4, preamble + "comm = create_communicator('naive')\n" + NOT_ELASTIC[what], status=1)
    assert "the end" in job.stderr
