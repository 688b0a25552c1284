"""A rank dies at every possible place, and the others continue with the same communicator."""

import pytest

STRATEGIES = ["naive", "flat", "hierarchical", "two_dimensional", "single_node", "non_cuda_aware"]

START = """
import os, signal, sys, threading
import numpy as np
import mn_comm
from mn_comm import Change, RankLost, create_communicator
from mn_comm.building_blocks import MPI
from mn_comm.ranks.watch import Activity
from fake_model import Model, Param

comm = create_communicator(sys.argv[1], elastic=True)
me, size = comm.rank, comm.size

def die():
    os.kill(os.getpid(), signal.SIGKILL)

def model(length=20_000):
    return Model(a=Param(np.zeros(3), np.full(3, 1.0 + me)), b=Param(np.zeros(length, "f4"), np.full(length, me, "f4")))

def average():
    made = model()
    comm.multi_node_mean_grad(made)
    return [float(made.params[name].grad[-1]) for name in "ab"]

def die_at_wait(number, after=None):
    "Die before the next wait of that number, counted from the first of a name."
    wait_for = Activity.wait_for
    left = [number, after is None]
    def waits(self, call, what, *args):
        left[1] = left[1] or what == after
        left[0] -= left[1]
        if left[0] < 0:
            die()
        return wait_for(self, call, what, *args)
    Activity.wait_for = waits

def say(*words):
    print(*words, flush=True)
"""

LOSE_ONE = """
changes = []
assert comm.on_change(changes.append) == changes.append
say(average())
if me == 1:
    die()
try:
    average()
except RankLost as error:
    assert "multi_node_mean_grad: lost rank 1 of 3, 2 continue" in str(error)
    assert [error.change] == changes
    (change,) = changes
    assert (change.lost, change.survivors, change.old_rank, change.rank) == ((1,), (0, 2), me, comm.rank)
say(comm.transact(average))
say(comm.rank, comm.size, comm.intra_rank, comm.intra_size, comm.inter_rank, comm.inter_size, comm.generation)
say(comm.mpi_comm.size, comm.allreduce_obj([me]))
"""


@pytest.mark.parametrize("name", [*STRATEGIES, "dummy"])
def test_the_others_go_on(job, name):
    printed = job(3, START + LOSE_ONE, name)
    if name != "dummy":
        assert printed == sorted(
            [*["[2.0, 1.0]"] * 3, *["[2.0, 1.0]"] * 2, "0 2 0 2 0 1 1", "1 2 1 2 0 1 1", *["2 [0, 2]"] * 2]
        )
    assert "lost rank 1 of 3, 2 continue (" in job.stderr


COMMUNICATES = """
@comm.on_change
def add(change):
    if me == 0:
        comm.allreduce_obj(1)

if me == 1:
    die()
comm.transact(average)
say("complete", comm.size)
"""


def test_a_function_of_on_change_that_communicates_ends_only_its_rank(job):
    assert job(3, START + COMMUNICATES, "naive") == ["complete 1"]
    assert "RuntimeError: expected a function of on_change not to communicate" in job.stderr


AGREE = """
if me == 1:
    die_at_wait(int(sys.argv[2]))
mn_comm.expect_same(comm, "number", 1)
try:
    with mn_comm.raise_on_all(comm):
        if comm.rank == 0:
            raise KeyError("on rank 0 only")
except KeyError:
    say("raised", comm.size)
"""


@pytest.mark.parametrize("wait", range(4))
def test_a_check_is_repeated_by_those_who_are_left(job, wait):
    assert job(3, START + AGREE, "naive", str(wait)) == ["raised 2"] * 2


EACH_OPERATION = """
operations = {
    "bcast": lambda: comm.bcast(np.ones(3), root=0),
    "gather": lambda: comm.gather(np.ones(3)),
    "allgather": lambda: comm.allgather(np.ones(3)),
    "scatter": lambda: comm.scatter(np.ones((comm.size, 2))),
    "alltoall": lambda: comm.alltoall([np.ones(3)] * comm.size),
    "allreduce": lambda: comm.allreduce(np.ones(3)),
    "reduce": lambda: comm.reduce(np.ones(3)),
    "reduce_scatter": lambda: comm.reduce_scatter(np.ones(comm.size)),
    "barrier": lambda: comm.barrier(),
    "bcast_obj": lambda: comm.bcast_obj("x"),
    "gather_obj": lambda: comm.gather_obj("x"),
    "allgather_obj": lambda: comm.allgather_obj("x"),
    "scatter_obj": lambda: comm.scatter_obj(["x"] * comm.size),
    "allreduce_obj": lambda: comm.allreduce_obj("x"),
}
operation = operations[sys.argv[2]]
operation()
if me == 1:
    die_at_wait(int(sys.argv[3]))
for _ in range(9):  # it may come through the first, and die in a later one
    try:
        operation()
    except RankLost as error:
        assert str(error).startswith(sys.argv[2]), error
        break
operation()
say(comm.size, comm.generation)
"""
OPERATIONS = ["bcast", "gather", "scatter", "alltoall", "reduce_scatter", "barrier", "bcast_obj", "allreduce_obj"]


@pytest.mark.parametrize("name", OPERATIONS)
def test_an_operation_raises_on_all_survivors_or_on_none(job, name):
    assert job(3, START + EACH_OPERATION, "naive", name, str(len(name) % 3)) == ["2 1", "2 1"]


IN_RECOVERY = """
average()
if me == 0:
    die()
if me == 1:
    die_at_wait(int(sys.argv[2]), after="Shrink")
say(comm.transact(average), comm.size)
"""


# Shrink, Dup, Agree, allgather, Split, Agree, Split, Agree, Allreduce, Agree: it dies before each, then after all.
@pytest.mark.parametrize("wait", [1, 2, 3, 4, 5, 8, 9, 10])
def test_another_one_dies_while_they_recover(job, wait):
    assert job(4, START + IN_RECOVERY, "two_dimensional", str(wait)) == ["[3.5, 2.5] 2", "[3.5, 2.5] 2"]


# Open MPI sometimes returns from a collective operation without an error, but also without the data of a dead rank.
WITHOUT_DATA = """
import pickle

def fail_without_data():
    while not MPI.Comm.Get_failed(comm.mpi_comm).size:
        MPI.COMM_SELF.Iprobe()
    raise pickle.UnpicklingError("invalid load key")
"""
IN_A_TRANSACTION = """
if me == 1:
    die()
sizes = []
def attempt():
    sizes.append(comm.size)
    if len(sizes) == 1:
        fail_without_data()
    return average()
say(comm.transact(attempt), sizes)
"""
IN_THE_RECOVERY = """
import mn_comm.ranks.context
discover, calls = mn_comm.ranks.context.discover, []
def discover_or_fail(ranks):
    calls.append(ranks)
    if len(calls) == 1 and me == 1:
        die()
    while len(calls) == 1 and not MPI.Comm.Get_failed(ranks).size:
        MPI.COMM_SELF.Iprobe()
    if len(calls) == 1:
        raise pickle.UnpicklingError("invalid load key")
    return discover(ranks)

mn_comm.ranks.context.discover = discover_or_fail
if me == 0:
    die()
say(comm.transact(average), comm.size)
"""


def test_an_operation_that_returns_without_the_data_of_a_dead_rank(job):
    assert job(3, START + WITHOUT_DATA + IN_A_TRANSACTION, "naive") == ["[2.0, 1.0] [3, 2]"] * 2


def test_the_same_while_they_recover(job):
    assert job(4, START + WITHOUT_DATA + IN_THE_RECOVERY, "naive") == ["[3.5, 2.5] 2"] * 2


# Rank 1 notices the loss before it sends anything, and rank 0 afterwards, while it waits for rank 1.
BEFORE_IT_SENDS = """
import contextlib
from unittest import mock
from mn_comm.collectives import objects

call = {
    "gather_obj": lambda: comm.gather_obj(me),
    "allgather_obj": lambda: comm.allgather_obj(me),
    "scatter_obj": lambda: comm.scatter_obj(range(comm.size) if comm.rank == comm.size - 1 else None, comm.size - 1),
}[sys.argv[2]]
call()
def attempt():
    if comm.size == 2 or me == 0:
        agrees = comm.size == 2
        with contextlib.nullcontext() if agrees else mock.patch.object(objects.agreement, "raise_on_all", nobody_fails):
            return call()
    if me == 2:
        die()
    while not MPI.Comm.Get_failed(comm.mpi_comm).size:
        MPI.COMM_SELF.Iprobe()
    raise MPI.Exception(MPI.ERR_PROC_FAILED)

nobody_fails = contextlib.contextmanager(lambda ranks: iter([None]))
comm.transact(attempt)
say(comm.size)
"""


@pytest.mark.parametrize("name", ["gather_obj", "allgather_obj", "scatter_obj"])
def test_a_rank_that_gives_up_before_it_sends_an_object(job, name):
    assert job(3, START + BEFORE_IT_SENDS, "naive", name) == ["2", "2"]


FROM_THE_DEAD = """
average()
if me == 1:
    die()
try:
    if me == 2:
        comm.recv_obj(1)
    comm.recv_obj(2)  # from one that is alive, and never sends
except RankLost as error:
    say(str(error)[:9])
if comm.rank == 0:
    comm.send(np.arange(3), 1)
else:
    say(comm.recv(0))
"""


def test_receiving_from_the_dead_and_from_the_living(job):
    assert job(3, START + FROM_THE_DEAD, "flat") == ["[0 1 2]", "recv_obj:", "recv_obj:"]


ONE_IS_LEFT = """
average()
if me:
    die()
comm.transact(average)
say(comm.size, average())
"""


def test_one_is_left(job):
    assert job(4, START + ONE_IS_LEFT, "hierarchical") == ["1 [1.0, 0.0]"]


IN_THE_BACKGROUND = """
reducer = comm.gradient_reducer(background=True, bucket_bytes=1000, sets=2)
def overlapped():
    made = model()
    reduction = reducer.start(made)
    reduction.ready_all()
    reduction.wait()
    return [float(made.params[name].grad[-1]) for name in "ab"]
comm.transact(overlapped)
if me == 0:
    die_at_wait(int(sys.argv[2]))
for _ in range(4):
    means = comm.transact(overlapped)
say(means)
"""


@pytest.mark.parametrize("wait", [0, 2, 3])
def test_gradients_that_travel_in_the_background(job, wait):
    assert job(3, START + IN_THE_BACKGROUND, "two_dimensional", str(wait)) == ["[2.5, 1.5]"] * 2


THEIRS = """
import os, pathlib, sys
from mpi4py import MPI
from mn_comm import create_communicator
site = pathlib.Path(os.environ["SITE"])
info = site / "their_package-1.2.dist-info"
info.mkdir(parents=True, exist_ok=True)
(site / "their_package.py").write_text('''
import mn_comm
class Twice(mn_comm.Communicator):
    "Twice the mean."
    strategy = "two_dimensional"
    factor = 2
    def comm_hook(self, bucket):
        return bucket.average().then(lambda mean: self.factor * mean)
class Ring(mn_comm.Strategy):
    name = "ring"
    def mean(self, ranks, flat):
        passed, received = flat.copy(), flat.copy()
        for _ in range(ranks.size - 1):
            sending = ranks.Isend(passed, (ranks.rank + 1) % ranks.size)
            ranks.Recv(received, (ranks.rank - 1) % ranks.size)
            ranks.wait(sending, "Isend")
            flat += received
            passed, received = received, passed
        flat /= ranks.size
class Own(mn_comm.Communicator):
    def multi_node_mean_grad(self, model, zero_fill=False):
        pass
class Prepared(Twice):
    def __init__(self, mpi_comm):
        super().__init__(mpi_comm)
''')
(info / "METADATA").write_text("Metadata-Version: 2.1\\nName: their-package\\nVersion: 1.2\\n")
names = "".join(f"{name.lower()} = their_package:{name}\\n" for name in ("Twice", "Own", "Prepared", "Ring"))
(info / "entry_points.txt").write_text("[mn_comm.strategies]\\n" + names)
MPI.COMM_WORLD.Barrier()
sys.path.insert(0, str(site))
"""

REFUSE = """
for name, what in (("own", "multi_node_mean_grad"), ("prepared", "__init__")):
    try:
        create_communicator(name, elastic=True)
    except ValueError as error:
        assert f"with elastic=True, got {name.title()}, which replaces {what}" in str(error), error
    else:
        raise AssertionError(name)
"""

TWICE = """
assert comm.strategy == "two_dimensional" and type(comm).__name__ == "ElasticTwice"
say(average())
if me == 1:
    die()
say(comm.transact(average))
"""


RING = """
say(comm.strategy, average())
if me == 1:
    die()
say(comm.strategy, comm.transact(average))
"""


def test_a_communicator_of_another_package(job, tmp_path, monkeypatch):
    """Its strategy and its hook are used, before a loss and after it; what cannot be kept is refused."""
    monkeypatch.setenv("SITE", str(tmp_path / "site"))
    assert job(3, THEIRS + REFUSE + START + TWICE, "twice") == ["[4.0, 2.0]"] * 3 + ["[4.0, 2.0]"] * 2


def test_a_strategy_of_another_package(job, tmp_path, monkeypatch):
    """It averages before a loss, and among the remaining ranks after it."""
    monkeypatch.setenv("SITE", str(tmp_path / "site"))
    assert job(3, THEIRS + START + RING, "ring") == ["ring [2.0, 1.0]"] * 5


NOT_FOR_TWO = """
from mn_comm.gradients.strategies import STRATEGIES

class NotForTwo(STRATEGIES["flat"]):
    def __init__(self, context):
        super().__init__(context)
        if context.ranks.size == 2:
            raise ValueError("expected another number of ranks")

STRATEGIES["flat"] = NotForTwo
"""


def test_a_strategy_that_the_remaining_ranks_cannot_create(job):
    """All of them fail, and so does the job."""
    die = "if me == 1:\n    die()\ncomm.barrier()\n"
    job(3, NOT_FOR_TWO + START + die, "flat", status=1)
    assert job.stderr.count("ValueError: expected another number of ranks") == 2
    assert "no rank continues: the job ends" in job.stderr


REFUSED = """
import pytest
with pytest.raises(NotImplementedError, match="parts"):
    comm.split(0, 0)
with pytest.raises(RuntimeError, match="replaces it by itself"):
    comm.mpi_comm = MPI.COMM_WORLD
with pytest.raises(ValueError, match="expected compression without elastic=True"):
    comm.gradient_reducer(compression="any")
with pytest.raises(ValueError, match="averages in host memory with elastic=True, got pure_nccl"):
    create_communicator("pure_nccl", elastic=True)
with pytest.raises(ValueError, match="expected the same shape|shape"):
    comm.allreduce(np.ones(2 + me))
say(comm.generation, average())
"""


def test_what_is_refused_and_mistakes_that_are_no_losses(job):
    assert job(2, START + REFUSED, "naive") == ["0 [1.5, 0.5]"] * 2


def test_a_job_without_fault_tolerance_is_refused_on_all_ranks(job):
    code = """
from mn_comm import create_communicator
try:
    create_communicator("naive", elastic=True)
except RuntimeError as error:
    print("mpiexec --with-ft ulfm" in str(error), flush=True)
"""
    assert job(2, code, options=()) == ["True", "True"]


NOT_A_LOSS = """
calls = []
def fail():
    calls.append(0)
    if len(calls) == 1 and me == 0:
        raise MPI.Exception(MPI.ERR_OTHER)
    comm.barrier()
    return len(calls)
say(comm.transact(fail), comm.size)
def always():
    raise MPI.Exception(MPI.ERR_OTHER)
try:
    comm.transact(always)
except RuntimeError as error:
    say(error)
"""


def test_errors_of_mpi_without_a_loss(job):
    message = "MPI failed 3 times in a row, although no rank was lost"
    assert job(2, START + NOT_A_LOSS, "naive") == ["2 2", "2 2", message, message]
