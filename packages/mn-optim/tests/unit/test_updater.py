"""Mini-batches in parts: the step is that of the whole mini-batch."""

import chainer
import chainer.functions as F
import chainer.links as L
import numpy as np
import pytest
from chainer import training
from chainer.training.updaters import StandardUpdater

import mn_optim  # noqa: F401 - before Chainer
from mn_comm import create_communicator
from mn_optim import DuringBackward, MultiNodeOptimizer, MultiNodeUpdater, create_multi_node_optimizer

OPTIMIZERS = {
    "sgd": lambda: chainer.optimizers.SGD(0.1),
    "adam": lambda: chainer.optimizers.Adam(0.01),
    "multi-node": lambda: create_multi_node_optimizer(chainer.optimizers.MomentumSGD(0.1), create_communicator("flat")),
    "overlap": lambda: MultiNodeOptimizer(
        chainer.optimizers.MomentumSGD(0.1), create_communicator("flat"), DuringBackward()
    ),
}


class Net(chainer.Chain):
    def __init__(self, dtype=np.float32):
        super().__init__()
        initial = chainer.initializers.LeCunNormal(dtype=dtype, rng=np.random.RandomState(0))
        with self.init_scope():
            self.first = L.Linear(None, 6, initialW=initial, initial_bias=chainer.initializers.Zero(dtype))
            self.last = L.Linear(6, 3, initialW=initial, initial_bias=chainer.initializers.Zero(dtype))
        self.batches = []

    def forward(self, x, t):
        self.batches.append(len(x))
        y = self.last(F.tanh(self.first(x)))
        loss = F.softmax_cross_entropy(y, t)
        chainer.report({"loss": loss, "accuracy": F.accuracy(y, t), "kind": "text"}, self)
        return loss


def samples(n=13, dtype=np.float32):
    random = np.random.RandomState(1)
    return [(x.astype(dtype), np.int32(i % 3)) for i, x in enumerate(random.rand(n, 4))]


def run(kind, optimizer, out, n_iterations=5, dtype=np.float32, batch_size=7, **options):
    """Train; return the model, and the observations of each iteration."""
    model = Net(dtype)
    iterator = chainer.iterators.SerialIterator(samples(dtype=dtype), batch_size, shuffle=False)
    trainer = training.Trainer(
        kind(iterator, optimizer.setup(model), **options), (n_iterations, "iteration"), out=str(out)
    )
    observed = []
    trainer.extend(lambda trainer: observed.append(dict(trainer.observation)), name="note", trigger=(1, "iteration"))
    trainer.run()
    return model, observed


@pytest.mark.parametrize("k", [1, 2, 3, 7, 20])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_parts_are_the_whole(name, k, tmp_path):
    expected, seen_then = run(StandardUpdater, OPTIMIZERS[name](), tmp_path)
    model, seen = run(MultiNodeUpdater, OPTIMIZERS[name](), tmp_path, micro_batches=k)
    for (key, param), (_, other) in zip(sorted(model.namedparams()), sorted(expected.namedparams()), strict=True):
        np.testing.assert_allclose(param.array, other.array, rtol=1e-4, atol=1e-6, err_msg=key)
    assert max(model.batches) == -(-7 // k)
    assert sum(model.batches) == 5 * 7
    for one, other in zip(seen, seen_then, strict=True):
        assert one.keys() == other.keys()
        assert one["main/kind"] == "text"
        for key in ("main/loss", "main/accuracy"):
            value, whole = (x.array if isinstance(x, chainer.Variable) else x for x in (one[key], other[key]))
            np.testing.assert_allclose(value, whole, rtol=1e-5)


@pytest.mark.parametrize("name", ["sgd", "multi-node"])
def test_loss_scaling(name, tmp_path):
    expected, _ = run(StandardUpdater, OPTIMIZERS[name](), tmp_path, loss_scale=128.0)
    model, _ = run(MultiNodeUpdater, OPTIMIZERS[name](), tmp_path, loss_scale=128.0, micro_batches=3)
    for param, other in zip(model.params(), expected.params(), strict=True):
        np.testing.assert_allclose(param.array, other.array, rtol=1e-4, atol=1e-6)


def test_half_precision_with_a_float32_copy_and_dynamic_scaling(tmp_path):
    models = []
    for kind, options in ((StandardUpdater, {}), (MultiNodeUpdater, {"micro_batches": 3})):
        optimizer = chainer.optimizers.SGD(0.1)
        optimizer.use_fp32_update()
        optimizer.loss_scaling(interval=2, scale=256.0)
        models.append(run(kind, optimizer, tmp_path, dtype=np.float16, **options)[0])
    for param, other in zip(models[0].params(), models[1].params(), strict=True):
        np.testing.assert_allclose(param.array, other.array, rtol=1e-2, atol=1e-3)


def test_arguments_are_those_of_the_standard_updater():
    import inspect

    ours = inspect.signature(MultiNodeUpdater).parameters
    theirs = [name for name in inspect.signature(StandardUpdater).parameters if name != "kwargs"]
    assert list(ours)[: len(theirs)] == theirs
    for name in theirs:
        assert ours[name].default == inspect.signature(StandardUpdater).parameters[name].default
    assert list(ours)[len(theirs) :] == ["input_device", "micro_batches", "over"]


def test_converters_may_return_dictionaries_and_single_arguments(tmp_path):
    for converter in (
        lambda batch, device: dict(zip(("x", "t"), chainer.dataset.concat_examples(batch), strict=True)),
        lambda batch, device: chainer.dataset.concat_examples(batch)[0],
    ):
        model = Net()
        iterator = chainer.iterators.SerialIterator(samples(), 7)
        optimizer = chainer.optimizers.SGD().setup(model)
        updater = MultiNodeUpdater(
            iterator,
            optimizer,
            converter,
            loss_func=lambda x, t=None, model=model: F.sum(model.first(x)) / len(x),
            micro_batches=2,
        )
        updater.update()
        assert optimizer.t == 1


@pytest.mark.parametrize(("value", "error"), [(0, ValueError), (-1, ValueError), (1.5, TypeError), (True, TypeError)])
def test_the_number_of_parts_is_checked(value, error):
    iterator = chainer.iterators.SerialIterator(samples(), 7)
    with pytest.raises(error, match="micro_batches"):
        MultiNodeUpdater(iterator, chainer.optimizers.SGD().setup(Net()), micro_batches=value)


@pytest.mark.parametrize("n_next", [4, 1])
@pytest.mark.parametrize("fails_at", [0, 1])
@pytest.mark.parametrize("name", ["sgd", "multi-node"])
def test_parts_of_a_batch_that_has_failed_are_no_part_of_the_next(name, fails_at, n_next):
    model = L.Linear(2, 1, nobias=True, initialW=0)
    optimizer = OPTIMIZERS[name]().setup(model)
    calls = []

    def loss(x):
        calls.append(len(x))
        if len(calls) == 3 + fails_at:
            raise KeyboardInterrupt
        return F.mean(model(x))

    iterator = chainer.iterators.SerialIterator(np.ones((4, 2), np.float32), 4)
    updater = MultiNodeUpdater(iterator, optimizer, loss_func=loss, micro_batches=2)
    updater.update()
    before = model.W.array.copy()
    with pytest.raises(KeyboardInterrupt):
        updater.update()
    iterator.batch_size = n_next
    updater.update()
    np.testing.assert_allclose(model.W.array - before, -0.1, rtol=1e-6)


def test_whole_batches_need_no_length():
    class Iterator(chainer.dataset.Iterator):
        epoch, epoch_detail, is_new_epoch = 0, 0.0, False

        def __next__(self):
            return object()

    model = L.Linear(2, 1)
    optimizer = chainer.optimizers.SGD().setup(model)
    updater = MultiNodeUpdater(
        Iterator(), optimizer, lambda batch, device: np.ones((1, 2), np.float32), loss_func=lambda x: F.sum(model(x))
    )
    updater.update()
    assert optimizer.t == 1
