"""Trainings that are restarted, and continue from the state in the memory of their node."""

import os
import subprocess
import sys

import pytest

TRAINING = """
import os, signal, sys
import chainer
import chainer.links as L
import chainermn
import numpy as np
from chainer.training import extensions

attempt = int(os.environ["CHAINERMN_SUPERVISOR"].split()[-1])
comm = chainermn.create_communicator("naive")
np.random.seed(0)
model = L.Classifier(L.Linear(10, 4))
optimizer = chainermn.create_multi_node_optimizer(chainer.optimizers.Adam(), comm).setup(model)
random = np.random.RandomState(1)
data = chainer.datasets.TupleDataset(random.rand(70, 10).astype("f"), random.randint(0, 4, 70).astype("i"))
if sys.argv[1] == "elastic":
    iterator = chainermn.iterators.ElasticIterator(data, 4, comm, seed=0)
else:
    iterator = chainer.iterators.SerialIterator(chainermn.scatter_dataset(data, comm), 4)
updater = chainer.training.StandardUpdater(iterator, optimizer)
trainer = chainer.training.Trainer(updater, (40, "iteration"), out="result")
log = extensions.LogReport(trigger=(5, "iteration"))
if comm.rank == 0 or sys.argv[1] == "logged":
    trainer.extend(log)
keeper = chainermn.extensions.create_memory_keeper(comm)
trainer.extend(keeper, trigger=(10, "iteration"))

@trainer.extend
@chainer.training.make_extension(trigger=(1, "iteration"), priority=-200)
def die(trainer):
    if trainer.updater.iteration == int(sys.argv[2]) and attempt == 1 and comm.rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)

resumed = keeper.maybe_load(trainer)
trainer.run()
digest = [float(param.array.astype("d").sum()) for _, param in sorted(model.namedparams())]
print("end", resumed, updater.iteration, optimizer.t, len(log.log) if comm.rank == 0 else 8, digest, flush=True)
"""


@pytest.fixture
def train(tmp_path):
    """Train under the supervisor, with a rank that dies in a given iteration; return the ranks' output at the end."""

    def run(kind, when):
        script = tmp_path / "training.py"
        script.write_text(TRAINING)
        command = [sys.executable, "-m", "chainermn", "elastic", "-n", "2", str(script), kind, str(when)]
        environ = {**os.environ, "OMP_NUM_THREADS": "1"}
        done = subprocess.run(command, capture_output=True, text=True, timeout=220, cwd=tmp_path, env=environ)
        assert done.returncode == 0, done.stderr
        return [line.split(" ", 5) for line in done.stdout.splitlines() if line.startswith("end")]

    return run


def test_it_ends_with_the_parameters_that_it_would_have_had(train):
    undisturbed, resumed = train("elastic", 99), train("elastic", 25)
    assert [line[1:5] for line in undisturbed] == [["None", "40", "39", "8"]] * 2
    assert [line[1:5] for line in resumed] == [["20", "40", "39", "8"]] * 2
    assert {line[5] for line in undisturbed + resumed} == {undisturbed[0][5]}


def test_before_anything_was_kept_it_begins_again(train):
    assert [line[1:5] for line in train("elastic", 5)] == [["None", "40", "39", "8"]] * 2


def test_iterators_of_chainer_go_on_as_well(train):
    assert [line[1:5] for line in train("scattered", 35)] == [["30", "40", "39", "8"]] * 2


def test_an_extension_that_rank_0_does_not_have(train):
    assert [line[1:4] for line in train("logged", 25)] == [["20", "40", "39"]] * 2


TRAININGS = """
import os, signal
import chainermn
import mn_comm

attempt = int(os.environ["CHAINERMN_SUPERVISOR"].split()[-1])
comm = chainermn.create_communicator("naive")

class Counter:
    total = 0
    def serialize(self, serializer):
        self.total = int(serializer("total", self.total))

for fold in range(3):
    counter = Counter()
    keeper = chainermn.extensions.create_memory_keeper(comm)
    begin = keeper.maybe_load(counter) or 0
    for step in range(begin, 10):
        if (attempt, fold, step) == (1, 1, 7) and comm.rank == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        counter.total += comm.allreduce_obj(1)
        keeper.keep(counter, step + 1)
    if comm.rank == 0:
        print(f"fold {fold} from {begin}: {counter.total}", flush=True)
"""


def test_several_trainings_in_a_script_do_not_load_each_others_state(tmp_path):
    script = tmp_path / "training.py"
    script.write_text(TRAININGS)
    command = [sys.executable, "-m", "chainermn", "elastic", "-n", "2", str(script)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=220, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    folds = [line for line in done.stdout.splitlines() if line.startswith("fold")]
    assert folds == ["fold 0 from 0: 20", *(f"fold {fold} from 0: 20" for fold in range(3))]
    assert "training 1 of this script is repeated: the state in memory is of training 2" in done.stderr
