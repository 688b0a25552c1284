"""A script as users of the old software wrote it, step by step, without a line that is specific to this project."""

import pytest

STEP_1 = """
import chainer
import chainer.functions as F
import chainer.links as L
from chainer import training
import numpy as np
import chainermn

class MLP(chainer.Chain):
    def __init__(self, n_units, n_out):
        super(MLP, self).__init__(l1=L.Linear(None, n_units), l2=L.Linear(None, n_out))
    def __call__(self, x):
        return self.l2(F.relu(self.l1(x)))

comm = chainermn.create_communicator()
model = L.Classifier(MLP(20, 3))
optimizer = chainermn.create_multi_node_optimizer(chainer.optimizers.Adam(), comm)
optimizer.setup(model)
x = np.random.RandomState(comm.rank).rand(60, 4).astype(np.float32)
train = chainer.datasets.TupleDataset(x, (x[:, :3]).argmax(axis=1).astype(np.int32))
train_iter = chainer.iterators.SerialIterator(train, 10)
trainer = training.Trainer(training.StandardUpdater(train_iter, optimizer), (3, 'epoch'), out='result')
trainer.run()
print('done %d %d %d' % (comm.rank, comm.size, optimizer.t))
"""

STEP_2 = """
import chainer
import chainer.functions as F
import chainer.links as L
from chainer import training
from chainer.training import extensions
import numpy as np
import chainermn

comm = chainermn.create_communicator()
model = L.Classifier(L.Linear(None, 3))
optimizer = chainermn.create_multi_node_optimizer(chainer.optimizers.Adam(alpha=0.1), comm)
optimizer.setup(model)
optimizer.add_hook(chainer.optimizer.WeightDecay(1e-4))
if comm.rank == 0:
    x = np.random.RandomState(0).rand(120, 4).astype(np.float32)
    data = chainer.datasets.TupleDataset(x, (x[:, :3]).argmax(axis=1).astype(np.int32))
    train, test = chainer.datasets.split_dataset(data, 90)
else:
    train, test = None, None
train = chainermn.scatter_dataset(train, comm)
test = chainermn.scatter_dataset(test, comm)
train_iter = chainer.iterators.SerialIterator(train, 10)
test_iter = chainer.iterators.SerialIterator(test, 10, repeat=False, shuffle=False)
trainer = training.Trainer(training.StandardUpdater(train_iter, optimizer), (20, 'epoch'), out='result')
evaluator = extensions.Evaluator(test_iter, model)
evaluator = chainermn.create_multi_node_evaluator(evaluator, comm)
trainer.extend(evaluator)
if comm.rank == 0:
    trainer.extend(extensions.dump_graph('main/loss'))
    trainer.extend(extensions.LogReport())
    trainer.extend(extensions.PrintReport(
        ['epoch', 'main/loss', 'validation/main/loss', 'main/accuracy', 'validation/main/accuracy', 'elapsed_time']))
    trainer.extend(extensions.ProgressBar())
trainer.run()
print('done %d %d %s' % (comm.rank, comm.size, float(trainer.observation['validation/main/accuracy']) > 0.8))
"""


@pytest.mark.parametrize("ranks", [1, 2])
def test_step_1(mpiexec, ranks):
    printed = mpiexec(ranks, "-c", STEP_1)
    for rank in range(ranks):
        assert f"done {rank} {ranks} 17" in printed  # 18 iterations, of which the first takes no step


@pytest.mark.parametrize("ranks", [1, 2])
def test_step_2(mpiexec, ranks, tmp_path):
    printed = mpiexec(ranks, "-c", STEP_2)
    for rank in range(ranks):
        assert f"done {rank} {ranks} True" in printed
    assert (tmp_path / "result" / "log").exists()
    assert (tmp_path / "result" / "cg.dot").exists()


def test_a_script_that_imports_chainer_first_and_chainermn_never(mpiexec):
    printed = mpiexec(
        1, "-c", "import chainer, numpy as np; print(chainer.functions.relu(np.ones(2, 'f')).array.sum())"
    )
    assert printed.strip() == "2.0"
