"""Sharded optimizer state in a whole training: snapshots of one rank alone, of several, checkpoints, and resuming."""

import chainer
import chainer.functions as F
import chainer.links as L
import chainermn
import numpy as np
import pytest
from chainer.training import extensions

from mn_optim import AfterBackward, DuringBackward, MultiNodeOptimizer, Sharded

COMM = chainermn.create_communicator("two_dimensional")
RANK, SIZE = COMM.rank, COMM.size


class Net(chainer.Chain):
    """A net with communication in its forward pass, so that ranks wait for one another before each update as well."""

    def __init__(self):
        super().__init__()
        initial = chainer.initializers.LeCunNormal(rng=np.random.RandomState(0))
        with self.init_scope():
            self.first = L.Linear(4, 30, initialW=initial)
            self.norm = chainermn.links.MultiNodeBatchNormalization(30, COMM)
            self.last = L.Linear(30, 3, initialW=initial)

    def forward(self, x):
        return self.last(F.tanh(self.norm(self.first(x))))


@pytest.fixture
def folder(tmp_path_factory):
    return COMM.bcast_obj(str(tmp_path_factory.mktemp("run")) if RANK == 0 else None)


def make_trainer(folder, n_iterations, when=True):
    random = np.random.RandomState(RANK)
    data = chainer.datasets.TupleDataset(random.rand(24, 4).astype("f4"), random.randint(0, 3, 24).astype("i4"))
    optimizer = MultiNodeOptimizer(chainer.optimizers.Adam(), COMM, when)
    optimizer.setup(L.Classifier(Net()))
    iterator = chainer.iterators.SerialIterator(data, 6, shuffle=False)
    updater = chainer.training.StandardUpdater(iterator, optimizer)
    return chainer.training.Trainer(updater, (n_iterations, "iteration"), folder)


def arrays_of(trainer):
    """Return the arrays of the models and the optimizers; collective."""
    for rank in range(SIZE):
        trainer.updater.get_optimizer("main").consolidate(to=rank)
    return {
        name: np.array(value)
        for name, value in chainer.serializers.npz.serialize(trainer.updater).items()
        if name.startswith(("model:", "optimizer:"))
    }


def same(actual, expected):
    assert actual.keys() == expected.keys()
    for name, value in expected.items():
        np.testing.assert_array_equal(actual[name], value, err_msg=name)


@pytest.mark.parametrize("when", [AfterBackward(), DuringBackward()])
def test_a_snapshot_of_one_rank_alone(folder, when):
    """The others are in the next forward pass, where they wait for this rank, or at the end of the training."""
    trainer = make_trainer(folder, 8, Sharded(when))
    trainer.extend(
        lambda trainer: trainer.updater.get_optimizer("main").consolidate(),
        name="consolidate",
        trigger=(2, "iteration"),
        priority=chainer.training.PRIORITY_WRITER,
    )
    if RANK == 0:
        trainer.extend(extensions.snapshot(filename="at_{.updater.iteration}"), trigger=(2, "iteration"))
        trainer.extend(extensions.LogReport(trigger=(1, "iteration")))
    trainer.run()
    if RANK == 0:  # the others only have to end
        chainer.serializers.save_npz(f"{folder}/afterwards", trainer.updater.get_optimizer("main"))
    COMM.barrier()
    expected = make_trainer(folder, 8, when)
    expected.run()
    same(arrays_of(trainer), arrays_of(expected))
    with np.load(f"{folder}/at_8") as last, np.load(f"{folder}/afterwards") as afterwards:
        for name, value in arrays_of(expected).items():
            np.testing.assert_array_equal(last[f"updater/{name}"], value)
        for name in afterwards:
            np.testing.assert_array_equal(afterwards[name], last[f"updater/optimizer:main/{name}"])
    if isinstance(when, DuringBackward):
        return
    resumed = make_trainer(folder, 8, Sharded())
    chainer.serializers.load_npz(f"{folder}/at_4", resumed.updater, path="updater/")
    resumed.updater.get_optimizer("main").assume_synchronized()
    resumed.run()
    same(arrays_of(resumed), arrays_of(expected))


def test_multi_node_snapshots(folder):
    def extended(trainer):
        snapshot = extensions.snapshot(filename="at_{.updater.iteration}", autoload=True)
        trainer.extend(chainermn.extensions.multi_node_snapshot(COMM, snapshot, [0]), trigger=(3, "iteration"))
        return trainer

    extended(make_trainer(folder, 6, Sharded())).run()
    expected = make_trainer(folder, 9)
    expected.run()
    resumed = extended(make_trainer(folder, 9, Sharded()))
    resumed.run()
    assert resumed.updater.get_optimizer("main").t == 8
    same(arrays_of(resumed), arrays_of(expected))
    COMM.barrier()
    with np.load(f"{folder}/at_9.{min(1, SIZE - 1)}") as saved:  # the other set of ranks has the whole state, too
        for name, value in arrays_of(expected).items():
            np.testing.assert_array_equal(saved[f"updater/{name}"], value)
    COMM.barrier()


def test_checkpoints_hold_the_part_of_each_rank(folder):
    trainer = make_trainer(folder, 6, Sharded())
    checkpointer = chainermn.create_multi_node_checkpointer("run", COMM, path=folder)
    trainer.extend(checkpointer, trigger=(3, "iteration"))
    trainer.extend(lambda trainer: 1 / (6 - trainer.updater.iteration), name="dies", trigger=(1, "iteration"))
    with pytest.raises(ZeroDivisionError):
        trainer.run()
    with np.load(f"{folder}/run.{RANK}.3") as saved:
        held = {name for name in saved if name.endswith("/m")}
    everywhere = COMM.allgather_obj(held)
    assert sum(map(len, everywhere)) == len(set().union(*everywhere)) == 6
    expected = make_trainer(folder, 9)
    expected.run()
    resumed = make_trainer(folder, 9, Sharded())
    assert chainermn.create_multi_node_checkpointer("run", COMM, path=folder).maybe_load(resumed) == 3
    resumed.run()
    same(arrays_of(resumed), arrays_of(expected))
    # Also into one that is already running.
    assert chainermn.create_multi_node_checkpointer("run", COMM, path=folder).maybe_load(trainer) == 3
    again = chainer.training.Trainer(trainer.updater, (9, "iteration"), folder)
    again.run()
    same(arrays_of(again), arrays_of(expected))
    COMM.barrier()
