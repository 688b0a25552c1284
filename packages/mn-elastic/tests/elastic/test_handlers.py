"""A signal handler of the script raises while the ranks vote, or take leave of each other."""

import pytest

BEGIN = """
import os, signal, sys, threading, time
from mn_comm import RankLost, create_communicator
from mn_comm.ranks.watch import activities
comm = create_communicator("naive", elastic=True)
comm.barrier()
function, how, sent = sys.argv[1:]
main = threading.main_thread().ident

def is_in(function):
    frame = sys._current_frames()[main]
    while frame is not None and frame.f_code.co_name != function:
        frame = frame.f_back
    return frame is not None

def send():
    while not (is_in(function) and activities[main].wait):  # before it is in MPI, the handler would end something else
        time.sleep(0.001)
    os.kill(os.getpid(), signal.SIGUSR1)
    open(sent, "w").close()
    while how == "again and again":
        os.kill(os.getpid(), signal.SIGUSR1)
        time.sleep(0.001)

def handle(*_):
    if how == "exception":
        raise TimeoutError("a limit of the script")
    sys.exit(int(how) if how.isdecimal() else 0)

signal.signal(signal.SIGUSR1, handle)
if comm.rank == 1:
    threading.Thread(target=send, daemon=True).start()
"""
START = f"""{BEGIN}
if comm.rank == 0:
    while not os.path.exists(sent):
        time.sleep(0.01)
"""

GO_ON = """
for _ in range(5 * (comm.rank != 1)):
    try:
        comm.transact(lambda: 1)
    except RankLost:
        pass
print("done", comm.size, flush=True)
"""

VOTES = """
if comm.rank == 2:
    sys.exit()
for _ in range(5):
    try:
        comm.transact(lambda: 1)
    except RankLost:
        pass
print("done", comm.rank, comm.size, flush=True)
"""


@pytest.mark.parametrize("how", ["0", "exception"])
def test_at_the_end(job, how, tmp_path):
    job(2, START, "take_leave", how, str(tmp_path / "sent"))
    assert ("TimeoutError: a limit of the script" in job.stderr) == (how == "exception")
    assert "has left what the ranks agree on, on rank 1: this rank ends" in job.stderr


@pytest.mark.parametrize("how", ["0", "exception", "again and again"])
def test_at_the_end_while_the_others_go_on(job, how, tmp_path):
    assert job(3, START + GO_ON, "take_leave", how, str(tmp_path / "sent")) == ["done 2", "done 2", "done 3"]


# While a rank ends because a signal handler has raised, the next signal comes before the handlers are ignored.
SOON_AGAIN = """
from mn_elastic import ends
ignore_handlers = ends.ignore_handlers
def ignore_late():
    time.sleep(0.1)
    ignore_handlers()
ends.ignore_handlers = ignore_late
"""


def test_at_the_end_while_the_next_signal_comes_soon(job, tmp_path):
    arguments = "take_leave", "again and again", str(tmp_path / "sent")
    assert job(3, START + SOON_AGAIN + GO_ON, *arguments) == ["done 2", "done 2", "done 3"]


# The signal comes in a step of the rank's end that does not wait for others.
PAUSES = """
from mn_elastic import ends
def pause(*args, step={0}, **options):
    if comm.rank == 1:
        activities[main].wait = "nothing", None, time.monotonic_ns()
        try:
            time.sleep(0.3)
        finally:
            activities[main].wait = None
    return step(*args, **options)
{0} = pause
"""


@pytest.mark.parametrize("how", ["0", "exception", "again and again"])
@pytest.mark.parametrize(("begin", "step"), [(START, "ends.stall.finish"), (BEGIN, "ends.report.leave")])
def test_around_the_farewell_while_the_others_go_on(job, begin, step, how, tmp_path):
    printed = job(3, begin + PAUSES.format(step) + GO_ON, "pause", how, str(tmp_path / "sent"))
    assert printed == ["done 2", "done 2", "done 3"]


@pytest.mark.parametrize("how", ["0", "3", "exception"])
def test_in_a_vote_while_another_rank_leaves(job, how, tmp_path):
    assert job(3, START + VOTES, "vote", how, str(tmp_path / "sent")) == ["done 0 1"]


@pytest.mark.parametrize("how", ["0", "3", "exception"])
def test_in_a_vote_that_is_won(job, how, tmp_path):
    """All have completed it, so that all may end together, with this status."""
    status = {"exception": 1}.get(how) or int(how)
    assert job(2, START + "comm.transact(lambda: 1)", "vote", how, str(tmp_path / "sent"), status=status) == []
    assert "this rank ends" not in job.stderr or how != "0"


IN_A_STEP = """
me = comm.rank

def step():
    if me == 1:
        os.kill(os.getpid(), signal.SIGUSR1)
    comm.allreduce_obj(1)

comm.transact(step)
print("done", comm.size, flush=True)
"""


def test_in_a_step(job, monkeypatch, tmp_path):
    """The others do not wait until the stall monitor interrupts them."""
    monkeypatch.setenv("CHAINERMN_STALL_SECONDS", "0")
    assert job(3, START + IN_A_STEP, "no function", "0", str(tmp_path)) == ["done 2"] * 2
