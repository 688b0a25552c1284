"""A rank dies while the ranks evaluate, aggregate or save together: the remaining ranks repeat it among themselves."""

import pytest

pytestmark = pytest.mark.rest

START = """
import os, signal, sys
from types import SimpleNamespace
import chainer
import chainer.links as L
import numpy as np
import mn_extensions
from mn_comm import create_communicator
from mn_comm.ranks.watch import Activity

comm = create_communicator("naive", elastic=True)
me = comm.rank

def die_at_wait(number):
    wait_for = Activity.wait_for
    left = [number]
    def waits(self, *args):
        left[0] -= 1
        if left[0] < 0:
            os.kill(os.getpid(), signal.SIGKILL)
        return wait_for(self, *args)
    Activity.wait_for = waits

def say(*words):
    print(*words, flush=True)

class Reporting(chainer.Chain):
    def __init__(self):
        super().__init__()
        self.add_persistent("seen", np.array([float(me)]))
        with self.init_scope():
            self.linear = L.Linear(2, 3, initialW=1)

    def forward(self, x):
        chainer.report({"mean": float(x.mean())}, self)

net = Reporting()
reporter = chainer.Reporter()
reporter.add_observer("main", net)
reporter.__enter__()
samples = np.full((4, 1), float(me), "f4")

class MeanOfAll(mn_extensions.GenericMultiNodeEvaluator):
    def calc_local(self, x):
        return float(x.mean())

    def aggregate(self, results):
        return sum(results) / len(results)

def iterator():
    return chainer.iterators.SerialIterator(samples, 2, repeat=False, shuffle=False)

def evaluate(weighted):
    evaluator = chainer.training.extensions.Evaluator(iterator(), net)
    made = mn_extensions.create_multi_node_evaluator(evaluator, comm, weighted=weighted)
    return lambda: float(made.evaluate()["main/mean"])

def aggregate():
    made = mn_extensions.ObservationAggregator(comm, "x")
    trainer = SimpleNamespace(observation={"x": float(me)}, updater=SimpleNamespace(iteration=1))
    made.comm_trigger = lambda trainer: True
    def run():
        made(trainer)
        found, trainer.observation["x"] = trainer.observation["x"], float(me)
        return found
    return run

def persistent():
    made = mn_extensions.AllreducePersistent(net, comm)
    def run():
        net.seen[...] = me
        made()
        return float(net.seen[0])
    return run

actions = {
    "plain": evaluate(False),
    "weighted": evaluate(True),
    "generic": lambda made=MeanOfAll(comm, iterator(), net): made(None) if comm.rank == 0 else made(None) or 1.0,
    "aggregate": aggregate(),
    "persistent": persistent(),
}
"""

TOGETHER = """
action = actions[sys.argv[1]]
action()
if me == 1:
    die_at_wait(int(sys.argv[2]))
for _ in range(9):
    result = action()
say(result, comm.size)
"""


@pytest.mark.parametrize("wait", [0, 2])
@pytest.mark.parametrize("name", ["plain", "weighted", "generic", "aggregate", "persistent"])
def test_the_result_is_that_of_those_who_are_left(job, name, wait):
    assert job(3, START + TOGETHER, name, str(wait)) == ["1.0 2", "1.0 2"]


CHECKPOINT = """
checkpointer = mn_extensions.create_multi_node_checkpointer("run", comm, path="cp", cp_interval=2, gc_interval=1)
if me == int(sys.argv[1]):
    open(f"cp/tmp-run.{me}.3.killed", "w").close()  # as if it were killed while it writes
for iteration in range(1, 6):
    if iteration == 3 and me == int(sys.argv[1]):
        die_at_wait(int(sys.argv[2]))
    net.linear.W.array[...] = iteration
    checkpointer.save(net, iteration)
assert not [name for name in os.listdir("cp") if name.endswith(".2")], os.listdir("cp")  # of lost ranks neither
again = mn_extensions.create_multi_node_checkpointer("run", comm, path="cp")
net.linear.W.array[...] = 0
say(again.maybe_load(net), net.linear.W.array[0, 0], comm.size)
checkpointer.finalize()
comm.barrier()
if comm.rank == 0:
    say(os.listdir("cp"))
"""


@pytest.mark.parametrize(("rank", "wait"), [(0, 0), (0, 3), (2, 2), (1, 5), (1, 6)])
def test_a_checkpoint_is_one_of_those_who_are_left(job, tmp_path, rank, wait):
    (tmp_path / "cp").mkdir()
    assert job(3, START + CHECKPOINT, str(rank), str(wait)) == ["5 5.0 2", "5 5.0 2", "[]"]


CREATED = """
if me == 1:
    die_at_wait(int(sys.argv[2]))
checkpointer = mn_extensions.create_multi_node_checkpointer("run", comm, path=eval(sys.argv[1]))
checkpointer.path = "cp"
checkpointer.save(net, 1)
say(checkpointer.maybe_load(net), comm.size)
"""


@pytest.mark.parametrize(("path", "wait"), [("None", 0), ("None", 1), ("'cp'", 2), ("'cp'", 4), ("None", 4)])
def test_a_checkpointer_while_it_is_created(job, tmp_path, path, wait):
    assert job(3, START + CREATED, path, str(wait)) == ["1 2", "1 2"]


SNAPSHOT = """
snapshot = chainer.training.extensions.snapshot(target=net, filename="snapshot", autoload=True)
made = mn_extensions.multi_node_snapshot(comm, snapshot, [[0], [1, 2, 3]])
trainer = SimpleNamespace(out=".", updater=SimpleNamespace(iteration=1))
made.initialize(trainer)
comm.barrier()
if me == 1:
    die_at_wait(0)
total = comm.transact(lambda: comm.allreduce_obj(1))
assert (made.master, made.replica_set) == ((0, {0}) if me == 0 else (1, {1, 2})), (made.master, made.replica_set)
net.linear.W.array[...] = 10 + made.master
made(trainer)
comm.barrier()
net.linear.W.array[...] = 0
other = mn_extensions.multi_node_snapshot(comm, snapshot, [[0]])
snapshot.filename = "snapshot"
other = mn_extensions.multi_node_snapshot(comm, snapshot, [[0]])
other.initialize(trainer)
say(net.linear.W.array[0, 0], total)
"""


def test_a_group_of_replicas_has_a_new_lowest_rank(job, tmp_path):
    assert job(4, START + SNAPSHOT) == ["10.0 3", "11.0 3", "11.0 3"]
    assert {path.name for path in tmp_path.iterdir()} == {"snapshot.0", "snapshot.1"}
