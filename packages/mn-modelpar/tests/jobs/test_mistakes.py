"""Common mistakes: each is reported with the culprit; if a rank has to wait, the job ends within the stall time."""

import re

import pytest

HEAD = """
import chainer, chainer.functions as F, chainer.links as L, numpy as np
import mn_modelpar.functions as MF
from mn_comm import create_communicator
from mn_modelpar import MultiNodeChainList
from mpi4py import MPI

MPI.COMM_WORLD.Barrier()  # on a busy machine, one rank may start much later: no other rank stalls meanwhile
comm = create_communicator("naive")
x = chainer.Variable(np.ones((2, 3), np.float32))
"""

# No rank ends the job before all have said for what they wait: on a busy machine, one may come to wait much later.
TOGETHER = """
import pathlib, time
from mn_guard import abort, guard_thread, stall

said = [pathlib.Path(__file__).with_name(f"said-{rank}") for rank in range(comm.size)]
monitor = guard_thread.thread.find(stall.Monitor)

def say(text, write=monitor._write):
    write(text)
    if "has waited for" in text:
        abort.flush_until_read()  # what the launcher has not read yet, it may discard
        said[comm.rank].touch()

def end(why, end_job=monitor._end):
    deadline = time.monotonic() + 40  # before the test gives up, without the messages
    while not all(file.exists() for file in said) and time.monotonic() < deadline:
        time.sleep(0.01)
    end_job(why)

monitor._write, monitor._end = say, end
"""

NO_DELEGATE_ON_THE_SECOND_RECV = """
def model(x):
    MF.send(F.tanh(x), comm, rank=1)  # culprit
    return F.sum(MF.recv(comm, rank=1))

for _ in range(3):
    if comm.rank == 0:
        model(x).backward()
    else:
        MF.send(MF.recv(comm, rank=0), comm, rank=0).backward()
"""

A_DELEGATE_THAT_IS_NOT_RETURNED = """
def model():
    z = MF.recv(comm, rank=0)
    MF.send(z, comm, rank=0)  # forgotten

for _ in range(3):
    if comm.rank == 0:
        phi = MF.send(F.tanh(x), comm, rank=1)  # culprit
        F.sum(MF.recv(comm, rank=1, delegate_variable=phi)).backward()
    else:
        model()
if comm.rank == 1:
    MF.send(np.zeros(1), comm, rank=0)  # the last answer goes out here
else:
    MF.recv(comm, rank=1)
"""

A_RANK_THAT_ENDS = """
if comm.rank == 0:
    MF.send(x, comm, rank=1).backward()  # culprit
else:
    y = MF.recv(comm, rank=0)
"""

A_COMMUNICATOR_THAT_IS_FREED = """
part = comm.split(0, comm.rank)
start = MF.send(x, part, rank=1) if comm.rank == 0 else F.sum(MF.recv(part, rank=0))
start.backward()
part.finalize()
"""

SEND_WITHOUT_RECV = """
if comm.rank == 0:
    MF.send(x, comm, rank=1).backward()  # culprit
else:
    comm.mpi_comm.Probe(0)  # so that the report can say what has arrived
    comm.recv(0, tag=5)
"""

DIFFERENT_COLLECTIVES = """
def one():
    comm.allgather(x.array)  # culprit

def other():
    comm.allreduce(x.array)  # other

one() if comm.rank == 0 else other()
"""

RANK_OUT_TO_NO_LINK = """
model = MultiNodeChainList(comm)
model.add_link(L.Linear(3, 2), rank_in=None, rank_out=1)
if comm.rank == 0:
    model(x).backward()  # culprit
else:
    comm.allreduce(np.ones(1))
"""


def culprit(script, mark="culprit"):
    (line,) = (n for n, text in enumerate((HEAD + script).split("\n"), 1) if text.endswith("# " + mark))
    return rf"model\.py:{line}\b"


@pytest.mark.parametrize(
    ("script", "messages"),
    [
        (
            NO_DELEGATE_ON_THE_SECOND_RECV,
            [r"{culprit}: RuntimeWarning: .* send\(rank=1, tag=0\) called .* never ran"],
        ),
        (
            A_DELEGATE_THAT_IS_NOT_RETURNED,
            [
                r"{culprit}: RuntimeWarning: the gradient of send\(rank=1, tag=0\) .* assumed to be zero: .* rank 1",
                r"{forgotten}: RuntimeWarning: the gradient of send\(rank=0, tag=0\) .* came back from rank 0",
            ],
        ),
    ],
    ids=["no delegate on the second recv", "delegate not returned"],
)
@pytest.mark.parametrize("size", [3, 300_000], ids=["short", "long"])
def test_a_forgotten_delegate_is_named_once_and_keeps_nobody_waiting(mpiexec, script, messages, size):
    # Also at the end: MPICH may fail if long messages have not been received when it stops.
    head = HEAD.replace("np.ones((2, 3)", f"np.ones((2, {size})")
    status, _, errors = mpiexec(2, head + script, CHAINERMN_STALL_SECONDS="20", CHAINERMN_STALL_ABORT="1")
    assert status == 0, errors
    for message in messages:
        pattern = message
        for mark in ("culprit", "forgotten"):
            pattern = pattern.replace("{" + mark + "}", culprit(script, mark)) if f"# {mark}" in script else pattern
        assert len(re.findall(pattern, errors)) == 1, errors


def test_a_rank_that_ends_without_a_backward_pass_keeps_nobody_waiting(mpiexec):
    status, _, errors = mpiexec(2, HEAD + A_RANK_THAT_ENDS, CHAINERMN_STALL_SECONDS="20", CHAINERMN_STALL_ABORT="1")
    assert status == 0, errors
    assert re.search(rf"{culprit(A_RANK_THAT_ENDS)}: RuntimeWarning: .* assumed to be zero: .* rank 1", errors), errors


def test_a_graph_that_lives_longer_than_its_communicator(mpiexec):
    status, _, errors = mpiexec(2, HEAD + A_COMMUNICATOR_THAT_IS_FREED)
    assert status == 0, errors
    assert "Traceback" not in errors


@pytest.mark.parametrize(
    ("script", "messages"),
    [
        (
            SEND_WITHOUT_RECV,
            [
                r"for the gradient of send\(rank=1, tag=0\) called at \S*{culprit}",
                r"has waited for \S+ s in recv\(source=0, tag=5\)",
                r"a message from rank 0 has arrived, but no receive waits for its tag 0",
            ],
        ),
        (
            DIFFERENT_COLLECTIVES,
            [
                r"has waited for \S+ s in allgather\(x=<float32 array of shape \(2, 3\)>\)",
                r"has waited for \S+ s in allreduce",
                "{culprit}",
                "{other}",
            ],
        ),
        (
            RANK_OUT_TO_NO_LINK,
            [
                r"for the gradient of send\(rank=1, tag=0\) called at \S*{culprit}, for link 0 \(Linear, rank_in=None, "
                r"rank_out=1\) of MultiNodeChainList",
                r"rank 1 of 2 .* has waited for \S+ s in allreduce",
            ],
        ),
    ],
    ids=["send without recv", "collectives", "rank_out"],
)
def test_a_mistake_is_named(mpiexec, script, messages):
    script = TOGETHER + script
    status, _, errors = mpiexec(2, HEAD + script, CHAINERMN_STALL_SECONDS="3", CHAINERMN_STALL_ABORT="1")
    assert status != 0
    places = {mark: culprit(script, mark) for mark in ("culprit", "other") if f"# {mark}" in script}
    for message in messages:
        pattern = message
        for mark, place in places.items():
            pattern = pattern.replace("{" + mark + "}", place)
        assert re.search(pattern, errors), errors


def test_slow_ranks_are_no_mistake(mpiexec):
    script = """
import pathlib, sys, threading, time, traceback
from mn_guard import guard_thread, stall

waits = pathlib.Path(__file__).with_name("waits")

def tell_that_it_waits(main):
    names = set()
    while not {"wait", "wait_for_answer"} <= names:
        time.sleep(0.01)
        names = {frame.f_code.co_name for frame, _ in traceback.walk_stack(sys._current_frames()[main])}
    waits.touch()

def wait_for_answer():
    answered.wait()

if comm.rank == 0:
    while not waits.exists():
        time.sleep(0.01)
if comm.rank == 1:
    answered = threading.Event()
    monitor = guard_thread.thread.find(stall.Monitor)
    write = monitor._write
    monitor._write = lambda text: (write(text), answered.set())
    threading.Thread(target=tell_that_it_waits, args=[threading.get_ident()]).start()
    wait_for_answer()
assert comm.allreduce(np.ones(1)) == 2
print("done", comm.rank)
"""
    status, printed, errors = mpiexec(2, HEAD + script, CHAINERMN_STALL_SECONDS="1")
    assert status == 0, errors
    assert printed.count("done") == 2
    assert len(re.findall(r"rank 0 of 2 \(\S+\) has waited for \d+\.\d s in allreduce", errors)) == 1
    asked = (
        r"rank 1 of 2 \(\S+\), asked by rank 0, is not waiting for other ranks; at \S*model\.py.*: answered\.wait\(\)"
    )
    assert len(re.findall(asked, errors)) == 1


def test_the_monitor_can_be_switched_off(mpiexec):
    script = "import threading; assert threading.active_count() == 1; print('alone')"
    status, printed, errors = mpiexec(1, HEAD + script, CHAINERMN_STALL_SECONDS="0")
    assert (status, printed) == (0, "alone\n"), errors
