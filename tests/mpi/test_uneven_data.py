"""Trainings with Chainer's trainer whose ranks have different numbers of samples, with all collective extensions."""

import chainer
import chainer.functions as F
import chainer.links as L
import chainermn
import numpy as np
import pytest
from chainer import training
from chainer.training import extensions

from mn_optim import AfterBackward, Asynchronous, DuringBackward, LocalSGD, MultiNodeOptimizer, OneStepLate

COMM = chainermn.create_communicator("naive")
RANK, SIZE = COMM.rank, COMM.size
pytestmark = pytest.mark.filterwarnings("ignore:A batch with no more than one sample:UserWarning")
SCHEMES = {
    "plain": AfterBackward(),
    "overlap": DuringBackward(),
    "double_buffering": OneStepLate(),
    "local_steps": LocalSGD(2),
    "asynchronous": Asynchronous(),
}


class Net(chainer.Chain):
    def __init__(self, comm=None, lazy=False):
        super().__init__()
        initial = chainer.initializers.LeCunNormal(rng=np.random.RandomState(0))
        with self.init_scope():
            self.first = L.Linear(None if lazy else 4, 6, initialW=initial)
            if comm is None:
                self.norm = L.BatchNormalization(6)
            else:
                self.norm = chainermn.links.MultiNodeBatchNormalization(6, comm)
            self.last = L.Linear(6, 3, initialW=initial)
        self.seen = []

    def forward(self, x, t, index):
        self.seen.extend(index.tolist())
        loss = F.softmax_cross_entropy(self.last(F.tanh(self.norm(self.first(x)))), t)
        chainer.report({"loss": loss, "accuracy": -loss}, self)
        return loss


def samples(n):
    random = np.random.RandomState(1)
    return [(x.astype("f4"), np.int32(i % 3), np.int32(i)) for i, x in enumerate(random.rand(n, 4))]


def parameters(model):
    return {name: param.array.copy() for name, param in model.namedparams() if param.array is not None}


def expect_equal_everywhere(arrays):
    for other in COMM.allgather_obj(arrays):
        for name, array in arrays.items():
            np.testing.assert_array_equal(other[name], array, err_msg=name)


def make_trainer(model, n, out, when=True, epochs=3, batch_size=2, **updater_options):
    train = chainermn.scatter_dataset(samples(n) if RANK == 0 else None, COMM, force_equal_length=False)
    iterator = chainermn.iterators.create_uneven_iterator(
        chainer.iterators.SerialIterator(train, batch_size, shuffle=False), COMM
    )
    comm = chainermn.create_communicator("two_dimensional")
    optimizer = MultiNodeOptimizer(chainer.optimizers.MomentumSGD(0.1), comm, when)
    updater = chainermn.MultiNodeUpdater(iterator, optimizer.setup(model), **updater_options)
    return training.Trainer(updater, (epochs, "epoch"), out=str(out))


@pytest.mark.parametrize("n", [1, 3 * SIZE + 1, 4 * SIZE + SIZE // 2])
@pytest.mark.parametrize("scheme", SCHEMES)
def test_all_that_is_collective_stays_in_step(scheme, n, tmp_path):
    folder = COMM.bcast_obj(str(tmp_path))
    model = Net(lazy=True)
    trainer = make_trainer(model, n, folder, SCHEMES[scheme])
    val = chainermn.scatter_dataset(samples(5) if RANK == 0 else None, COMM, force_equal_length=False)
    val_iterator = chainer.iterators.SerialIterator(val, 2, repeat=False, shuffle=False)
    evaluator = extensions.Evaluator(val_iterator, model)
    trainer.extend(chainermn.create_multi_node_evaluator(evaluator, COMM, weighted=True), trigger=(1, "epoch"))
    trainer.extend(chainermn.extensions.AllreducePersistent(model, COMM), trigger=(1, "epoch"))
    trainer.extend(chainermn.extensions.ObservationAggregator(COMM, "main/loss", "loss/all"))
    snapshot = extensions.snapshot(filename="at_{.updater.iteration}")
    trainer.extend(chainermn.extensions.multi_node_snapshot(COMM, snapshot, [0]), trigger=(1, "epoch"))
    checkpointer = chainermn.create_multi_node_checkpointer("uneven", COMM, path=folder)
    trainer.extend(checkpointer, trigger=(1, "iteration"))
    losses = []

    @training.make_extension(trigger=(1, "iteration"))
    def note(trainer):
        losses.append(float(trainer.observation["loss/all"]))

    trainer.extend(note)
    trainer.run()
    assert np.isfinite(losses).all()
    expect_equal_everywhere({**parameters(model), "losses": np.array(losses), "mean": model.norm.avg_mean})
    assert np.isfinite(model.norm.avg_mean).all()
    assert COMM.allgather_obj(trainer.updater.iteration) == [trainer.updater.iteration] * SIZE


def test_no_sample_comes_twice_and_none_is_missed(tmp_path):
    model = Net()
    make_trainer(model, 4 * SIZE + SIZE // 2, tmp_path, epochs=1).run()
    seen = sum(COMM.allgather_obj(model.seen), [])  # noqa: RUF017
    assert sorted(seen) == list(range(4 * SIZE + SIZE // 2))


def test_multi_node_batch_normalization_is_that_of_the_samples_there_are(tmp_path):
    """Statistics, and with them gradients, are those of one process that has the batches of all ranks at once."""
    n = 4 * SIZE + 1
    model = Net(COMM)
    make_trainer(model, n, tmp_path, epochs=2).run()
    single = Net()
    optimizer = chainer.optimizers.MomentumSGD(0.1).setup(single)
    parts = [samples(n)[begin:end] for begin, end in COMM.allgather_obj(_bounds(n))]
    is_first = True
    for _ in range(2):
        for i in range(0, max(map(len, parts)), 2):
            batches = [part[i : i + 2] for part in parts if part[i : i + 2]]
            x, t, _ = chainer.dataset.concat_examples([sample for batch in batches for sample in batch])
            single.cleargrads()
            logits = single.last(F.tanh(single.norm(single.first(x))))
            begin, loss = 0, 0
            for batch in batches:  # every rank has the same weight, whatever its batch contains
                part = slice(begin, begin + len(batch))
                loss += F.softmax_cross_entropy(logits[part], t[part]) / len(batches)
                begin += len(batch)
            loss.backward()
            if not is_first:
                optimizer.update()
            is_first = False
    for name, array in parameters(single).items():
        np.testing.assert_allclose(parameters(model)[name], array, rtol=1e-4, atol=1e-5, err_msg=name)
    np.testing.assert_allclose(model.norm.avg_mean, single.norm.avg_mean, rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(model.norm.avg_var, single.norm.avg_var, rtol=1e-4, atol=1e-5)


def _bounds(n):
    length, longer = divmod(n, SIZE)
    begin = RANK * length + min(RANK, longer)
    return begin, begin + length + (RANK < longer)


@pytest.mark.parametrize("counts", [[7, 5, 3, 0], [0, 0, 1, 2], [0, 3, 3, 1]], ids=str)
@pytest.mark.parametrize("scheme", ["plain", "overlap", "double_buffering"])
def test_a_model_that_communicates_joins(scheme, counts):
    """Also with batch normalisation of whole mini-batches, and on ranks that never see one."""
    comm = chainermn.create_communicator("two_dimensional")
    model = Net(COMM, lazy=True)
    with model.init_scope():
        model.alone = L.BatchNormalization(3)
    model.alone.avg_mean[:] = 2
    optimizer = MultiNodeOptimizer(chainer.optimizers.SGD(0.1), comm, SCHEMES[scheme])
    optimizer.setup(model)

    def loss(x, t, index):
        return model(x, t, index) + F.sum(model.alone(x[:, :3])) * 0

    data = samples(4 * 8 * 3)
    for _ in range(2):
        with optimizer.join():
            for i in range(counts[RANK]):
                batch = data[24 * RANK + 3 * i : 24 * RANK + 3 * i + 3]
                optimizer.update(loss, *chainer.dataset.concat_examples(batch))
        expect_equal_everywhere({**parameters(model), "mean": model.norm.avg_mean, "var": model.norm.avg_var})
    assert np.isfinite(model.alone.avg_mean).all()


def test_resumed_it_is_the_training_it_would_have_been(tmp_path):
    folder = COMM.bcast_obj(str(tmp_path))
    n = 3 * SIZE + 1

    def make(epochs):
        model = Net()
        trainer = make_trainer(model, n, folder, epochs=epochs, batch_size=1)
        return model, trainer

    expected, trainer = make(3)
    trainer.run()
    _, trainer = make(3)
    checkpointer = chainermn.create_multi_node_checkpointer("resumed", COMM, path=folder)
    trainer.extend(checkpointer, trigger=(6, "iteration"))

    @training.make_extension(trigger=(7, "iteration"), priority=-1000)
    def stop(trainer):
        raise KeyboardInterrupt

    trainer.extend(stop)
    with pytest.raises(KeyboardInterrupt):
        trainer.run()
    model, trainer = make(3)
    checkpointer = chainermn.create_multi_node_checkpointer("resumed", COMM, path=folder)
    trainer.extend(checkpointer, trigger=(6, "iteration"))
    assert checkpointer.maybe_load(trainer) == 6
    trainer.run()
    for name, array in parameters(expected).items():
        np.testing.assert_array_equal(parameters(model)[name], array, err_msg=name)


def test_micro_batches_of_uneven_data(tmp_path):
    model, whole = Net(), Net()
    for each, k in ((model, 3), (whole, 1)):
        each.norm = _Identity()  # statistics would be those of parts
        make_trainer(each, 5 * SIZE + 1, tmp_path, batch_size=5, micro_batches=k).run()
    for name, array in parameters(whole).items():
        np.testing.assert_allclose(parameters(model)[name], array, rtol=1e-4, atol=1e-6, err_msg=name)


@pytest.mark.parametrize("way", ["updater", "join"])
def test_parts_of_a_model_that_communicates_are_refused_on_all_ranks(way, tmp_path):
    """Also on a rank whose mini-batch has a single sample, and on one without data."""
    comm = chainermn.create_communicator("two_dimensional")
    optimizer = chainermn.create_multi_node_optimizer(chainer.optimizers.SGD(), comm).setup(Net(COMM))
    data = samples([4, 1, 0, 3][RANK])
    iterator = chainer.iterators.SerialIterator(data, 4)
    if way == "updater":
        iterator = chainermn.iterators.create_uneven_iterator(iterator, COMM)
        updater = chainermn.MultiNodeUpdater(iterator, optimizer, micro_batches=2)
        with pytest.raises(RuntimeError, match="expected whole mini-batches within join"):
            updater.update()
        return
    batch = chainer.dataset.concat_examples(samples(2))
    with pytest.raises(RuntimeError, match="expected whole mini-batches within join"):
        with optimizer.join():
            if RANK == 0:
                with optimizer.no_sync():
                    optimizer.update(optimizer.target, *batch)
            if data:
                optimizer.update(optimizer.target, *batch)


class _Identity(chainer.Link):
    def forward(self, x):
        return x


def test_a_plain_optimizer_is_refused():
    iterator = chainermn.iterators.create_uneven_iterator(chainer.iterators.SerialIterator([1, 2], 1), COMM)
    optimizer = chainer.optimizers.SGD().setup(L.Linear(1, 1))
    with pytest.raises(TypeError, match="expected an optimizer made by create_multi_node_optimizer"):
        chainermn.MultiNodeUpdater(iterator, optimizer)
