"""A rank raises in a training with PerformanceReporter: the job ends, and the others do not wait for its report."""

import os
import shutil
import subprocess
import sys

SCRIPT = """
import mn_extensions
from mn_extensions import global_except_hook
global_except_hook.add_hook()
import chainer, numpy as np
from mn_comm import create_communicator
from mn_optim import DuringBackward, MultiNodeOptimizer

comm = create_communicator("naive" if len(__import__("sys").argv) == 1 else "flat")
when = True if comm.strategy == "naive" else DuringBackward()
optimizer = MultiNodeOptimizer(chainer.optimizers.SGD(0), comm, when)

class Model(chainer.Chain):
    def __init__(self):
        super().__init__(l=chainer.links.Linear(2, 1))
    def forward(self, x):
        if comm.rank == 1 and updater.iteration == 6:
            raise ValueError("boom " + "!")
        return chainer.functions.sum(self.l(x))

optimizer.setup(Model())
updater = chainer.training.StandardUpdater(chainer.iterators.SerialIterator(np.ones((8, 2), "f4"), 2), optimizer)
trainer = chainer.training.Trainer(updater, (12, "iteration"))
trainer.extend(mn_extensions.PerformanceReporter(comm, report_trigger=(4, "iteration")))
trainer.run()
"""


def start(*arguments):
    launcher = shutil.which("mpiexec", path=os.path.dirname(sys.executable))
    return subprocess.run(
        [launcher, "-n", "2", sys.executable, "-c", SCRIPT, *arguments],
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=220,
    )


def test_a_rank_raises():
    for arguments in ((), ("overlap",)):
        job = start(*arguments)
        assert job.returncode != 0
        assert "ValueError: boom !" in job.stderr
        assert "has waited" not in job.stderr
