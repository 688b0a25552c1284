"""Results of this package and of the ChainerMN in Chainer's wheel in a script, compared."""

import os
import shutil
import subprocess
import sys

import pytest

RANKS = 2

BEGINNING = """
import os, sys
import numpy as np
import mn_compat

if os.environ.get("CHAINERMN_IMPL") == "bundled":
    from chainermn import create_communicator, create_multi_node_checkpointer, create_multi_node_evaluator
    from chainermn.extensions import multi_node_snapshot
    assert os.path.basename(os.path.dirname(os.path.dirname(sys.modules["chainermn"].__file__))) == "site-packages"
else:
    from mn_comm import create_communicator
    from mn_extensions import create_multi_node_checkpointer, create_multi_node_evaluator, multi_node_snapshot
import chainer
import chainer.links as L
from chainer.training import extensions

comm = create_communicator("naive")
told = open(f"{sys.argv[1]}.{comm.rank}", "w")


def training(stop):
    np.random.seed(0)
    updater = chainer.training.StandardUpdater(
        chainer.iterators.SerialIterator(np.ones((10, 2), "f4") * comm.rank, 3),
        chainer.optimizers.Adam().setup(chainer.Sequential(L.Linear(2, 3), lambda y: chainer.functions.sum(y * y))),
    )
    return chainer.training.Trainer(updater, (stop, "iteration"), out="result")

"""

EVALUATOR = """
class Report(chainer.Link):
    def forward(self, x):
        chainer.report({"value": x.mean()}, self)


values = np.arange(8, dtype="f4") * (comm.rank + 1)
evaluator = extensions.Evaluator(chainer.iterators.SerialIterator(values, 4, repeat=False, shuffle=False), Report())
create_multi_node_evaluator(evaluator, comm)
print(evaluator._mn_communicator is comm, evaluator.evaluate.__self__ is evaluator, file=told)
reporter = chainer.Reporter()
reporter.add_observer("main", evaluator.get_target("main"))
with reporter:
    for each in (evaluator._mn_original_evaluate, evaluator.evaluate, evaluator):
        print({name: float(value) for name, value in each().items()}, file=told)
evaluator._mn_original_evaluate = lambda: {"own": comm.rank}
print(evaluator.evaluate(), file=told)
evaluator._mn_communicator = comm.split(comm.rank, 0)
print(evaluator.evaluate(), file=told)
"""

CHECKPOINTER = """
checkpointer = create_multi_node_checkpointer("run", comm, path=f"{sys.argv[1]}-files")
print(checkpointer.files, checkpointer.stats.timings, checkpointer.stats.begin, file=told)
for iteration in (3, 7):
    checkpointer.save(L.Linear(2, 3), iteration)
print(checkpointer.files, [sorted(each) for each in checkpointer.stats.timings], file=told)
print(checkpointer.get_stats() == checkpointer.stats.report(), file=told)
checkpointer.finalize()
print(checkpointer.files, file=told)
"""

SNAPSHOT = """
for options in ({}, {"trigger": (2, "iteration"), "priority": 7, "name": "own"}):
    snapshot = extensions.snapshot()
    snapshot.trigger, snapshot.priority, snapshot.name = (5, "epoch"), 50, "snapshot"
    extension = multi_node_snapshot(comm, snapshot, [0])
    print(extension.trigger, extension.priority, extension.name, extension.default_name, file=told)
    trainer = training(2)
    trainer.extend(extension, **options)
    ((name, entry),) = trainer._extensions.items()
    print(name, entry.priority, entry.trigger, extension.name, file=told)
    print(extension.is_master, extension.master, extension.replica_set, file=told)
trainer = training(2)
trainer.extend(multi_node_snapshot(comm, extensions.snapshot(filename=sys.argv[1] + "_{.updater.iteration}"), [0]))
trainer.run()
with np.load(f"result/{sys.argv[1]}_2.{comm.rank}", allow_pickle=True) as saved:
    print(sorted(name for name in saved if not name.startswith("chainermn_")), file=told)
"""

RESUMED = """
trainer = training(4)
snapshot = extensions.snapshot(filename="bundled_{.updater.iteration}", autoload=True)
trainer.extend(multi_node_snapshot(comm, snapshot, [0]))
resumed = []
trainer.extend(lambda trainer: resumed.append(trainer.updater.iteration), name="note", trigger=(1, "iteration"))
trainer.run()
print(resumed, trainer.updater.get_optimizer("main").target[0].W.array.tolist(), file=told)
"""


def told(script, implementation, folder):
    """Return what each rank writes, with one implementation."""
    launcher = shutil.which("mpiexec", path=os.path.dirname(sys.executable))
    command = [launcher, "-n", str(RANKS), sys.executable, "-c", BEGINNING + script, implementation]
    environ = {**os.environ, "CHAINERMN_IMPL": implementation}
    job = subprocess.run(command, cwd=folder, env=environ, capture_output=True, text=True, timeout=60)
    assert job.returncode == 0, job.stdout + job.stderr
    return [(folder / f"{implementation}.{rank}").read_text() for rank in range(RANKS)]


@pytest.mark.parametrize("script", [EVALUATOR, CHECKPOINTER, SNAPSHOT], ids=["evaluator", "checkpointer", "snapshot"])
def test_what_a_script_sees(script, tmp_path):
    ours, old = told(script, "ours", tmp_path), told(script, "bundled", tmp_path)
    assert all(len(each.splitlines()) >= 4 for each in old)
    assert ours == old


def test_snapshots_of_the_old_one_are_loaded(tmp_path):
    told(SNAPSHOT, "bundled", tmp_path)
    before = sorted((tmp_path / "result").iterdir())
    ours = told(RESUMED, "ours", tmp_path)
    for path in set((tmp_path / "result").iterdir()) - set(before):
        path.unlink()
    old = told(RESUMED, "bundled", tmp_path)
    assert [each.startswith("[3, 4] ") for each in old] == [True] * RANKS
    assert ours == old
