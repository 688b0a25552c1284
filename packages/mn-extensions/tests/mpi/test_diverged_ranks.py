"""Evaluators and snapshots synchronise ranks whose parameters differ before they begin."""

import chainer
import numpy as np
import pytest
from chainer.training import extensions

import mn_extensions  # noqa: F401 - before Chainer
from mn_comm import create_communicator
from mn_comm.building_blocks import register_synchronizer
from mn_extensions import (
    GenericMultiNodeEvaluator,
    create_multi_node_checkpointer,
    create_multi_node_evaluator,
    multi_node_snapshot,
)

COMM = create_communicator("naive")
RANK, SIZE = COMM.rank, COMM.size


class Model(chainer.Link):
    """Reports its parameter, which is the rank."""

    def __init__(self):
        super().__init__()
        with self.init_scope():
            self.p = chainer.Parameter(np.full(1, RANK, "f4"))

    def forward(self, x):
        chainer.report({"value": self.p.array[0]}, self)
        return float(self.p.array[0])


class Optimizer(chainer.optimizers.SGD):
    """An optimizer that replaces all parameters by their mean over all ranks."""

    meetings = 0

    def synchronize(self):
        for param in self.target.params():
            param.array[...] = COMM.allreduce(param.array) / SIZE
        self.meetings += 1


@pytest.fixture
def optimizer():
    made = Optimizer().setup(Model())
    register_synchronizer(made, made.target.params())
    return made


def trainer_of(optimizer, out):
    iterator = chainer.iterators.SerialIterator(np.zeros((4, 1), "f4"), 2)
    return chainer.training.Trainer(chainer.training.StandardUpdater(iterator, optimizer), (1, "epoch"), out)


def iterator():
    return chainer.iterators.SerialIterator(np.zeros((4, 1), "f4"), 2, repeat=False, shuffle=False)


@pytest.mark.parametrize("weighted", [False, True])
def test_evaluators(optimizer, weighted):
    evaluator = create_multi_node_evaluator(extensions.Evaluator(iterator(), optimizer.target), COMM, weighted=weighted)
    everywhere = []
    evaluate = evaluator._mn_original_evaluate
    evaluator._mn_original_evaluate = lambda: everywhere.append(float(optimizer.target.p.array[0])) or evaluate()
    with chainer.Reporter():
        assert evaluator()["main/value"] == (SIZE - 1) / 2
    assert optimizer.meetings == 1
    np.testing.assert_array_equal(optimizer.target.p.array, (SIZE - 1) / 2)
    assert everywhere in ([], [(SIZE - 1) / 2])


def test_evaluators_of_other_results(optimizer):
    results = GenericMultiNodeEvaluator(COMM, iterator(), optimizer.target)(None)
    assert results == ([(SIZE - 1) / 2] * 2 * SIZE if RANK == 0 else None)


@pytest.fixture
def folder(tmp_path_factory):
    return COMM.bcast_obj(str(tmp_path_factory.mktemp("run")) if RANK == 0 else None)


def test_the_checkpointer(optimizer, folder):
    checkpointer = create_multi_node_checkpointer("run", COMM, path=folder)
    checkpointer.save(trainer_of(optimizer, folder).updater, 3)
    checkpointer.save(optimizer.target, 4)
    checkpointer.save(optimizer, 5)
    assert optimizer.meetings == 3
    np.testing.assert_array_equal(optimizer.target.p.array, (SIZE - 1) / 2)


def test_snapshots(optimizer, folder):
    trainer = trainer_of(optimizer, folder)
    trainer._start_at = 0.0
    snapshot = multi_node_snapshot(COMM, extensions.snapshot(filename="saved"), [])
    snapshot(trainer)
    assert optimizer.meetings == 1
    COMM.allgather_obj(None)
    with np.load(f"{folder}/saved.0") as saved:
        np.testing.assert_array_equal(saved["updater/model:main/p"], (SIZE - 1) / 2)


def test_snapshots_of_the_model_alone(optimizer, folder):
    snapshot = multi_node_snapshot(COMM, extensions.snapshot_object(optimizer.target, "model"), [])
    snapshot(trainer_of(optimizer, folder))
    assert optimizer.meetings == 1


def test_models_that_nobody_owns():
    model = Model()
    evaluator = create_multi_node_evaluator(extensions.Evaluator(iterator(), model), COMM)
    with chainer.Reporter():
        assert evaluator()["main/value"] == (SIZE - 1) / 2
    np.testing.assert_array_equal(model.p.array, RANK)
