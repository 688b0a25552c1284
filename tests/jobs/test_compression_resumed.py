"""Trainings with compressed gradients that are killed, and continue as if they had not been."""

import os
import re
import shutil
import subprocess
import sys

import pytest

pytestmark = pytest.mark.rest

KINDS = {
    "Int8(rounding='stochastic')": "AfterBackward()",
    "OneBit(block=64, start_iter=4)": "DuringBackward(bucket_bytes=2000)",
    "TopK(0.1, momentum=0.5, warm_up=5)": "AfterBackward()",
    "PowerSGD(2, start_iter=3, min_compression_rate=1.2)": "DuringBackward(bucket_bytes=2000)",
    "Int8()": "DiLoCo(2)",
    "TopK(0.2)": "StreamingDiLoCo(4, fragments=2, delay=1)",
}
SCRIPT = """
import dataclasses, hashlib, json, os, signal, sys
import numpy as np
import chainer
import chainer.functions as F
import chainer.links as L
import chainermn
from chainer.training import extensions
from chainermn.optimizers import AfterBackward, DiLoCo, DuringBackward, MultiNodeOptimizer, StreamingDiLoCo
from mn_compress import *
from mn_extensions import CompressionReporter

comm = chainermn.create_communicator("flat")
kind, when, death = sys.argv[1:]


class MLP(chainer.Chain):
    def __init__(self):
        super().__init__(l1=L.Linear(20, 60), l2=L.Linear(60, 60), l3=L.Linear(60, 5))

    def forward(self, x):
        return self.l3(F.tanh(self.l2(F.dropout(F.tanh(self.l1(x))))))


np.random.seed(comm.rank)
random = np.random.RandomState(comm.rank)
data = chainer.datasets.TupleDataset(random.rand(50, 20).astype("f4"), random.randint(0, 5, 50).astype("i4"))
when = dataclasses.replace(eval(when), send=eval(kind))
optimizer = MultiNodeOptimizer(chainer.optimizers.MomentumSGD(0.1), comm, when)
optimizer.setup(L.Classifier(MLP()))
updater = chainer.training.StandardUpdater(chainer.iterators.SerialIterator(data, 8), optimizer)
trainer = chainer.training.Trainer(updater, (20, "iteration"), out="result")
checkpointer = chainermn.create_multi_node_checkpointer("compressed", comm, cp_interval=2, gc_interval=2)
trainer.extend(checkpointer, trigger=(3, "iteration"))
trainer.extend(CompressionReporter())
if comm.rank == 0:
    trainer.extend(extensions.LogReport(trigger=(1, "iteration")))
begin = checkpointer.maybe_load(trainer) or 0


@chainer.training.make_extension(trigger=(1, "iteration"), priority=-1000)
def die(trainer):
    if comm.rank == 1 and updater.iteration == int(death):
        os.kill(os.getpid(), signal.SIGKILL)


trainer.extend(die)
trainer.run()
digest = hashlib.sha256()
for name, param in sorted(optimizer.target.namedparams()):
    digest.update(param.data.tobytes())
digests = comm.allgather_obj(digest.hexdigest())
if comm.rank == 0:
    assert len(set(digests)) == 1
    log = json.load(open("result/log"))
    assert sum(each["compression/bytes"] for each in log) > 0
    assert 0 < log[-1]["compression/ratio"] < 1
    assert log[-1]["compression/error_norm"] > 0
    assert log[-1]["compression/gradient_norm"] > 0
    print(f"began at {begin}, digest {digests[0]}")
"""


def train(folder, kind, death):
    mpiexec = shutil.which("mpiexec", path=os.path.dirname(sys.executable))
    return subprocess.run(
        [mpiexec, "-n", "2", sys.executable, "-c", SCRIPT, kind, KINDS[kind], str(death)],
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=220,
    )


@pytest.mark.parametrize("kind", KINDS)
def test_a_training_that_was_killed_ends_with_the_same_bits(kind, tmp_path):
    for name in ("whole", "killed"):
        (tmp_path / name).mkdir()
    whole = train(tmp_path / "whole", kind, -1)
    assert not whole.returncode, whole.stderr
    assert train(tmp_path / "killed", kind, 14).returncode
    again = train(tmp_path / "killed", kind, -1)
    assert not again.returncode, again.stderr
    assert "error feedback starts again" not in again.stderr
    found = [re.search(r"began at (\d+), digest (\w+)", job.stdout) for job in (whole, again)]
    assert [each[1] for each in found] == ["0", "12"]
    assert found[0][2] == found[1][2]
