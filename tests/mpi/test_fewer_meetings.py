"""Local and asynchronous steps in a whole training: its evaluators, checkpoints, log and end."""

import warnings

import chainer
import chainer.functions as F
import chainer.links as L
import chainermn
import numpy as np
import pytest
from chainer.training import extensions

from mn_optim import Asynchronous, DiLoCo, LocalSGD, MultiNodeOptimizer, StreamingDiLoCo, SynchronousFirst

COMM = chainermn.create_communicator("two_dimensional")
RANK, SIZE = COMM.rank, COMM.size

WHEN = [
    LocalSGD(3),
    SynchronousFirst(2, LocalSGD(4, average_state=True)),
    DiLoCo(4),
    StreamingDiLoCo(4, fragments=2, delay=2),
    SynchronousFirst(2, Asynchronous(interval=0.001)),
]
REPEATABLE = WHEN[:4]


class Net(chainer.Chain):
    def __init__(self):
        super().__init__()
        initial = chainer.initializers.LeCunNormal(rng=np.random.RandomState(RANK))
        with self.init_scope():
            self.first = L.Linear(4, 8, initialW=initial)
            self.last = L.Linear(8, 3, initialW=initial)

    def forward(self, x):
        return self.last(F.tanh(self.first(x)))


def samples(n, seed):
    random = np.random.RandomState(seed)
    x = random.randn(n, 4).astype("f4")
    return chainer.datasets.TupleDataset(x, x[:, :3].argmax(axis=1).astype("i4"))


@pytest.fixture
def folder(tmp_path_factory):
    return COMM.bcast_obj(str(tmp_path_factory.mktemp("run")) if RANK == 0 else None)


def make_trainer(when, folder, stop=(3, "epoch"), n_samples=40):
    model = L.Classifier(Net())
    optimizer = MultiNodeOptimizer(chainer.optimizers.MomentumSGD(0.05), COMM, when)
    optimizer.setup(model)
    iterator = chainer.iterators.SerialIterator(samples(n_samples, RANK), 8)
    updater = chainer.training.StandardUpdater(iterator, optimizer)
    return chainer.training.Trainer(updater, stop, f"{folder}/{RANK}"), model, optimizer


def parameters(model):
    return {name: param.array.copy() for name, param in model.namedparams()}


def equal_everywhere(model):
    mine = parameters(model)
    for other in COMM.allgather_obj(mine):
        for name, array in mine.items():
            np.testing.assert_array_equal(other[name], array, err_msg=name)


class EqualEverywhere(extensions.Evaluator):
    """Checks whether all ranks evaluate the same parameters."""

    def evaluate(self):
        self.seen = parameters(self.get_target("main"))
        return super().evaluate()


@pytest.mark.parametrize("when", WHEN)
def test_evaluators_see_and_the_end_leaves_equal_parameters(when, folder):
    trainer, model, optimizer = make_trainer(when, folder)
    test = chainer.iterators.SerialIterator(samples(20, 99), 8, repeat=False, shuffle=False)
    evaluator = EqualEverywhere(test, model)
    trainer.extend(chainermn.create_multi_node_evaluator(evaluator, COMM))
    log = extensions.LogReport(trigger=(1, "iteration"))
    trainer.extend(log)
    trainer.run()
    for other in COMM.allgather_obj(evaluator.seen):
        for name, array in evaluator.seen.items():
            np.testing.assert_array_equal(other[name], array, err_msg=name)
    equal_everywhere(model)
    assert optimizer.t == trainer.updater.iteration - 1
    meetings = [entry.get("meeting") for entry in log.log]
    assert meetings[0] is None  # the distribution of parameters
    assert set(meetings[1:]) <= {0.0, 1.0}
    if when == WHEN[0]:
        # Steps 2 to 4, then 5, after which they are evaluated; then from the beginning.
        assert meetings[1:] == [0, 0, 1, 0, 0, 0, 1, 0, 0, 0, 0, 1, 0, 0][: len(meetings) - 1]


@pytest.mark.parametrize("when", WHEN)
def test_ranks_with_fewer_iterations(when, folder):
    trainer, model, optimizer = make_trainer(when, folder, stop=(5 + 4 * RANK, "iteration"))
    checkpointer = chainermn.create_multi_node_checkpointer("run", COMM, path=folder)
    trainer.extend(checkpointer, trigger=chainer.training.triggers.ManualScheduleTrigger(5, "iteration"))
    checkpointer.maybe_load(trainer)  # at its end it waits for the other ranks
    trainer.run()
    equal_everywhere(model)
    assert optimizer.t == 4 * RANK + 4


def test_the_end_by_an_exception_synchronises_nothing(folder):
    trainer, model, optimizer = make_trainer(WHEN[0], folder)

    def fail(trainer):
        raise ArithmeticError("by an extension")

    trainer.extend(fail, trigger=(3, "iteration"))
    with pytest.raises(ArithmeticError, match="by an extension"):
        trainer.run(show_loop_exception_msg=False)
    assert optimizer._stepper.scheme.has_diverged
    optimizer.synchronize()
    equal_everywhere(model)


@pytest.mark.parametrize("at", [7, 8, 9])
@pytest.mark.parametrize("when", REPEATABLE)
def test_a_killed_training_goes_on_bit_identically(when, at, folder):
    def train(stop, folder):
        np.random.seed(RANK)
        trainer, model, _ = make_trainer(when, folder, stop=(stop, "iteration"))
        checkpointer = chainermn.create_multi_node_checkpointer("run", COMM, path=folder)
        trainer.extend(checkpointer, trigger=(at, "iteration"))
        loaded = checkpointer.maybe_load(trainer)
        if stop == at:  # as if it had been killed: its files stay
            checkpointer.on_error(trainer, None, None)
        with warnings.catch_warnings():
            warnings.simplefilter("error")  # no snapshot of diverged ranks
            trainer.run()
        return loaded, parameters(model)

    _, lasting = train(20, folder + "/lasting")
    train(at, folder + "/killed")
    loaded, resumed = train(20, folder + "/killed")
    assert loaded == at
    for name, array in lasting.items():
        np.testing.assert_array_equal(resumed[name], array, err_msg=name)


@pytest.mark.parametrize("when", WHEN)
def test_snapshots_for_any_number_of_ranks(when, folder):
    def train(stop):
        trainer, model, optimizer = make_trainer(when, folder, stop=(stop, "iteration"))
        trainer.out = folder
        snapshot = extensions.snapshot(filename="at_{.updater.iteration}", autoload=True)
        trainer.extend(chainermn.extensions.multi_node_snapshot(COMM, snapshot, []), trigger=(6, "iteration"))
        with warnings.catch_warnings():
            warnings.simplefilter("error", RuntimeWarning)
            trainer.run()
        return optimizer, model

    train(6)
    COMM.allgather_obj(None)
    optimizer, model = train(12)
    assert optimizer.t == 11  # no update was lost
    equal_everywhere(model)


@pytest.mark.parametrize("kind", ["batch normalisation", "chain list", "recurrent"])
def test_models_that_communicate_take_no_asynchronous_steps(kind):
    if kind == "batch normalisation":
        model = chainer.Sequential(L.Linear(4, 4), chainermn.links.MultiNodeBatchNormalization(4, COMM))
        name = "MultiNodeBatchNormalization"
    elif kind == "chain list":
        model = chainermn.MultiNodeChainList(COMM)
        model.add_link(L.Linear(4, 4))
        name = "MultiNodeChainList"
    else:
        link = L.NStepLSTM(1, 3, 3, 0.0)
        model = chainermn.links.create_multi_node_n_step_rnn(link, COMM, rank_in=None, rank_out=None)
        name = type(model).__name__
    optimizer = MultiNodeOptimizer(chainer.optimizers.SGD(), COMM, Asynchronous()).setup(model)
    for param in model.params():
        param.grad = np.zeros_like(param.data)
    with pytest.raises(ValueError, match=f"expected a model that does not communicate, got a {name}"):
        optimizer.update()


def test_batch_normalisation_over_all_ranks_takes_local_steps():
    model = L.Classifier(
        chainer.Sequential(L.Linear(4, 4), chainermn.links.MultiNodeBatchNormalization(4, COMM), L.Linear(4, 3))
    )
    optimizer = MultiNodeOptimizer(chainer.optimizers.SGD(), COMM, LocalSGD(2)).setup(model)
    for step in range(6):
        x, t = chainer.dataset.concat_examples(samples(8, 10 * step + RANK))
        optimizer.update(model, x, t)
    optimizer.synchronize()
    equal_everywhere(model)
