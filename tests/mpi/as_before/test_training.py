import shutil
import tempfile

import chainer
import chainer.functions as F
import chainer.links as L
import chainermn
import numpy as np
import pytest
from chainer.training import extensions

COMM = chainermn.create_communicator("naive")
RANK, SIZE = COMM.rank, COMM.size


@pytest.fixture
def folder():
    path = COMM.bcast_obj(tempfile.mkdtemp() if RANK == 0 else None)
    yield path
    COMM.mpi_comm.Barrier()
    if RANK == 0:
        shutil.rmtree(path)


def digits(n, seed):
    """Pictures of ten kinds, with noise."""
    random = np.random.RandomState(seed)
    kinds = np.random.RandomState(0).rand(10, 36)
    labels = random.randint(0, 10, n).astype("i4")
    return chainer.datasets.TupleDataset((kinds[labels] + 0.1 * random.randn(n, 36)).astype("f4"), labels)


class MLP(chainer.Chain):
    def __init__(self):
        super().__init__(l1=L.Linear(None, 30), l2=L.Linear(None, 30), l3=L.Linear(None, 10))

    def forward(self, x):
        return self.l3(F.relu(self.l2(F.relu(self.l1(x)))))


def train(folder, model, train_data, test_data, epochs=4, updater=chainer.training.StandardUpdater):
    """Train like every example; return the evaluator and its last result."""
    optimizer = chainermn.create_multi_node_optimizer(chainer.optimizers.Adam(0.01), COMM).setup(model)
    iterator = chainer.iterators.SerialIterator(train_data, 20)
    trainer = chainer.training.Trainer(updater(iterator, optimizer, device=-1), (epochs, "epoch"), out=folder)
    evaluator = extensions.Evaluator(
        chainer.iterators.SerialIterator(test_data, 20, repeat=False, shuffle=False), model, device=-1
    )
    evaluator = chainermn.create_multi_node_evaluator(evaluator, COMM)
    trainer.extend(evaluator)
    if RANK == 0:
        trainer.extend(extensions.LogReport())
        trainer.extend(extensions.snapshot(filename="final"), trigger=(epochs, "epoch"))
    trainer.run()
    return evaluator()


def scatter(dataset, **options):
    return chainermn.scatter_dataset(dataset if RANK == 0 else None, COMM, **options)


def is_equal_everywhere(model):
    return all(
        np.array_equal(other, param.array)
        for _, param in sorted(model.namedparams())
        for other in COMM.allgather(param.array)
    )


def test_a_perceptron_learns(folder):
    model = L.Classifier(MLP())
    result = train(folder, model, scatter(digits(800, 1), shuffle=True), scatter(digits(200, 2)))
    assert result["validation/main/accuracy"] > 0.95
    assert len(set(COMM.mpi_comm.allgather(float(result["validation/main/accuracy"])))) == 1
    assert is_equal_everywhere(model)


def test_samples_that_are_made_when_asked_for(folder):
    data = chainer.datasets.TransformDataset(scatter(digits(400, 1)), lambda sample: (-sample[0], sample[1]))
    result = train(folder, L.Classifier(MLP()), data, data, epochs=10)
    assert result["validation/main/accuracy"] > 0.9


@pytest.mark.skipif(SIZE < 2, reason="needs two ranks")
def test_a_perceptron_on_two_ranks_learns(folder):
    """The samples are on the first rank; the others take part with empty ones."""
    pair = COMM.split(RANK // 2, RANK)
    if pair.size < 2:
        return

    class First(chainermn.MultiNodeChainList):
        def __init__(self):
            super().__init__(comm=pair)
            self.add_link(chainer.Sequential(L.Linear(36, 30), F.relu), rank_in=None, rank_out=1)
            self.add_link(L.Linear(30, 10), rank_in=1, rank_out=None)

    class Second(chainermn.MultiNodeChainList):
        def __init__(self):
            super().__init__(comm=pair)
            self.add_link(chainer.Sequential(L.Linear(30, 30), F.relu), rank_in=0, rank_out=0)

    data = digits(400, 1)
    if pair.rank == 0:
        model = L.Classifier(First())
    else:
        model, data = Second(), chainermn.datasets.create_empty_dataset(data)
    optimizer = chainer.optimizers.Adam(0.01).setup(model)
    iterator = chainer.iterators.SerialIterator(data, 20, shuffle=False)
    updater = chainer.training.StandardUpdater(iterator, optimizer)
    trainer = chainer.training.Trainer(updater, (6, "epoch"), out=folder)
    evaluator = extensions.Evaluator(chainer.iterators.SerialIterator(data, 20, repeat=False), model)
    if pair.rank == 0:
        evaluator.name = "validation"
    trainer.run()
    result = evaluator()
    if pair.rank == 0:
        assert result["validation/main/accuracy"] > 0.9
