"""Trainings in which one rank after another is killed at a random moment, each followed by a restart.

There are a few kills by default; CHAINERMN_TEST_KILLS sets another number.
"""

import os
import re
import shutil
import subprocess
import sys

import numpy as np
import pytest

from mn_extensions.checkpoint.manifest import iterations_of

RANKS = 2
KILLS = int(os.environ.get("CHAINERMN_TEST_KILLS", "4"))
ITERATIONS = 60 * KILLS  # it must not end before it has been killed this often
SEEDS = range(1000, 1000 + KILLS)

SCRIPT = """
import os, signal, sys, threading
import numpy as np
import mn_extensions
import chainer
import chainer.functions as F
import chainer.links as L
from mn_comm import create_communicator
from mn_extensions import create_multi_node_checkpointer

comm = create_communicator("naive")
victim, moment, delay = int(sys.argv[1]), int(sys.argv[2]), float(sys.argv[3])


class Optimizer(chainer.optimizers.Adam):
    communicator = comm
    is_synchronized = False

    def assume_synchronized(self):
        self.is_synchronized = True

    def update(self, lossfun=None, *args, **kwds):
        if self.is_synchronized:
            self.target.cleargrads()
            lossfun(*args, **kwds).backward()
            comm.multi_node_mean_grad(self.target)
            super().update()
        else:
            lossfun(*args, **kwds)
            comm.bcast_data(self.target)
            self.is_synchronized = True


class MLP(chainer.Chain):
    def __init__(self):
        super().__init__(l1=L.Linear(None, 200), l2=L.Linear(200, 5))

    def forward(self, x):
        return self.l2(F.dropout(F.tanh(self.l1(x))))


np.random.seed(comm.rank)
random = np.random.RandomState(comm.rank)
data = chainer.datasets.TupleDataset(random.rand(50, 20).astype("f4"), random.randint(0, 5, 50).astype("i4"))
optimizer = Optimizer().setup(L.Classifier(MLP()))
updater = chainer.training.StandardUpdater(chainer.iterators.SerialIterator(data, 8), optimizer)
trainer = chainer.training.Trainer(updater, (int(sys.argv[4]), "iteration"), out="result")
checkpointer = create_multi_node_checkpointer("killed.often", comm, cp_interval=2, gc_interval=3)
trainer.extend(checkpointer, trigger=(1, "iteration"))
begin = checkpointer.maybe_load(trainer, optimizer) or 0
if comm.rank == 0:
    print("resumed at", begin, flush=True)


def die():
    os.kill(os.getpid(), signal.SIGKILL)


def arm(trainer):
    if comm.rank == victim and trainer.updater.iteration == begin + moment:
        threading.Timer(delay, die).start()


trainer.extend(arm, name="arm", trigger=(1, "iteration"), priority=1000)
trainer.run()
np.savez(f"final.{comm.rank}.npz", **{name[1:]: p.data for name, p in optimizer.target.namedparams()})
print("done", comm.rank, flush=True)
"""


def run(folder, victim=-1, moment=0, delay=0.0):
    launcher = shutil.which("mpiexec", path=os.path.dirname(sys.executable))
    command = [launcher, "-n", str(RANKS), sys.executable, "-c", SCRIPT, str(victim), str(moment), str(delay)]
    command.append(str(ITERATIONS))
    return subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=60)


def resumed_at(job):
    (iteration,) = re.findall(r"resumed at (\d+)", job.stdout)
    return int(iteration)


@pytest.mark.timeout(60 + 20 * KILLS)
def test_every_restart_goes_on_from_the_newest_complete_generation(tmp_path):
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    for folder in (whole, killed):
        (folder / "result").mkdir(parents=True)
    job = run(whole)
    assert job.returncode == 0, job.stdout + job.stderr

    for seed in SEEDS:
        random = np.random.RandomState(seed)
        newest = max(iterations_of(os.listdir(killed / "result"), "killed.often", "manifest"), default=0)
        # Some iterations later, at any moment within an iteration.
        job = run(killed, random.randint(RANKS), 1 + random.randint(5), random.rand() * 0.02)
        assert resumed_at(job) == newest
        assert "damaged" not in job.stderr
        assert job.returncode != 0

    newest = max(iterations_of(os.listdir(killed / "result"), "killed.often", "manifest"), default=0)
    job = run(killed)
    assert job.returncode == 0, job.stdout + job.stderr
    assert resumed_at(job) == newest
    for rank in range(RANKS):
        with np.load(whole / f"final.{rank}.npz") as expected, np.load(killed / f"final.{rank}.npz") as found:
            for name in expected.files:
                np.testing.assert_array_equal(found[name], expected[name])
    assert os.listdir(killed / "result") == []  # it ended normally
    print(f"{KILLS} kills; the last restart went on from iteration {newest}")
