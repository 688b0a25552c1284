"""The promise of data parallelism: many processes with small batches compute the same as one with the large batch."""

import chainer
import chainer.functions as F
import chainer.links as L
import chainermn
import numpy as np
import pytest
from chainer.training import extensions

COMM = chainermn.create_communicator("naive")
BATCH = 24


class MLP(chainer.Chain):
    def __init__(self):
        super().__init__()
        initial = chainer.initializers.LeCunNormal(rng=np.random.RandomState(0))
        with self.init_scope():
            self.l1 = L.Linear(64, 50, initialW=initial)
            self.l2 = L.Linear(50, 10, initialW=initial)

    def forward(self, x):
        return self.l2(F.relu(self.l1(x)))


def digits(size):
    """Images whose labels follow from them, so that there is something to learn."""
    x = np.random.RandomState(1).rand(size, 64).astype("f4")
    return x, (x[:, :10] * 3).argmax(axis=1).astype("i4")


def train(dataset, batchsize, optimizer, model, out, evaluator=None, iterations=30):
    iterator = chainer.iterators.SerialIterator(dataset, batchsize, shuffle=False)
    updater = chainer.training.StandardUpdater(iterator, optimizer.setup(model))
    trainer = chainer.training.Trainer(updater, (iterations, "iteration"), out=out)
    test = chainer.iterators.SerialIterator(dataset, batchsize, repeat=False, shuffle=False)
    each = extensions.Evaluator(test, model)
    trainer.extend(each if evaluator is None else evaluator(each), trigger=(iterations, "iteration"))
    trainer.run()
    return trainer.observation["validation/main/loss"], trainer.observation["validation/main/accuracy"]


@pytest.mark.parametrize("make", [lambda: chainer.optimizers.SGD(0.5), chainer.optimizers.Adam])
def test_the_final_loss_is_the_same(make, tmp_path):
    x, t = digits(BATCH * 5)
    # The large batch consists of the small batches of the ranks, one after another.
    small = BATCH // COMM.size
    order = np.concatenate(
        [np.arange(len(x)).reshape(COMM.size, -1, small)[rank, step] for step in range(5) for rank in range(COMM.size)]
    )
    # The first update only distributes the parameters of rank 0: it uses the first batch, but takes no step.
    model, alone = L.Classifier(MLP()), L.Classifier(MLP())
    optimizer = chainermn.create_multi_node_optimizer(make(), COMM)
    part = chainermn.scatter_dataset(chainer.datasets.TupleDataset(x, t) if COMM.rank == 0 else None, COMM)
    loss, accuracy = train(
        part, small, optimizer, model, tmp_path, lambda e: chainermn.create_multi_node_evaluator(e, COMM)
    )

    class SkipFirst(type(make())):
        skipped = False

        def update(self, lossfun=None, *args, **kwds):
            if self.skipped:
                super().update(lossfun, *args, **kwds)
            self.skipped = True

    actual = SkipFirst(0.5) if isinstance(make(), chainer.optimizers.SGD) else SkipFirst()
    whole = chainer.datasets.TupleDataset(x[order], t[order])
    expected_loss, expected_accuracy = train(whole, BATCH, actual, alone, tmp_path)

    assert optimizer.t == actual.t == 29
    np.testing.assert_allclose(loss, expected_loss, rtol=1e-5)
    np.testing.assert_allclose(accuracy, expected_accuracy, rtol=1e-6)
    for (name, param), (_, other) in zip(sorted(model.namedparams()), sorted(alone.namedparams()), strict=True):
        np.testing.assert_allclose(param.data, other.data, rtol=1e-3, atol=1e-5, err_msg=name)
