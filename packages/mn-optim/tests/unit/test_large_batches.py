"""Methods for training with large batches, compared with plain NumPy."""

import math

import chainer
import chainer.links as L
import numpy as np
import pytest
from chainer import training
from chainer.serializers import DictionarySerializer, NpzDeserializer

import mn_optim  # noqa: F401 - before Chainer
from mn_comm import create_communicator
from mn_optim import (
    LAMB,
    SLOW_START,
    LearningRateSchedule,
    RMSpropWarmup,
    RMSpropWarmupSchedule,
    create_multi_node_optimizer,
    gradual_warmup,
    keep_last_statistics,
    linear_scaling,
    piecewise,
    sgd_share,
)


class Net(chainer.Link):
    def __init__(self, dtype=np.float32):
        super().__init__()
        random = np.random.RandomState(0)
        with self.init_scope():
            self.w = chainer.Parameter(random.randn(3, 4).astype(dtype))
            self.b = chainer.Parameter(np.zeros(4, dtype))  # whose norm is 0


def gradients(n=6):
    random = np.random.RandomState(1)
    return [{"w": random.randn(3, 4), "b": random.randn(4) * (i != 2)} for i in range(n)]


def train(optimizer, dtype=np.float32, grads=None):
    model = Net(dtype)
    optimizer.setup(model)
    for each in grads or gradients():
        for name, grad in each.items():
            getattr(model, name).grad = grad.astype(dtype)
        optimizer.update()
    return model


def lamb(values, grads, alpha, beta1, beta2, eps, decay, max_norm):
    """Algorithm 2 of arXiv 1904.00962, in float64."""
    m = {name: np.zeros_like(value) for name, value in values.items()}
    v = {name: np.zeros_like(value) for name, value in values.items()}
    for t, each in enumerate(grads, 1):
        for name, g in each.items():
            m[name] = beta1 * m[name] + (1 - beta1) * g
            v[name] = beta2 * v[name] + (1 - beta2) * g**2
            r = (m[name] / (1 - beta1**t)) / (np.sqrt(v[name] / (1 - beta2**t)) + eps)
            u = r + decay * values[name]
            norm, length = np.linalg.norm(values[name]), np.linalg.norm(u)
            norm = norm if max_norm is None else min(norm, max_norm)
            ratio = norm / length if norm and length else 1
            values[name] = values[name] - alpha * ratio * u
    return values


@pytest.mark.parametrize("max_norm", [None, 1.5])
@pytest.mark.parametrize("decay", [0.0, 0.1])
def test_lamb_is_that_of_the_paper(decay, max_norm):
    model = train(LAMB(0.05, 0.8, 0.95, 1e-6, decay, max_norm))
    start = {name: param.array.astype("f8") for name, param in zip(("b", "w"), Net().params(), strict=True)}
    expected = lamb(start, gradients(), 0.05, 0.8, 0.95, 1e-6, decay, max_norm)
    for name, value in expected.items():
        np.testing.assert_allclose(getattr(model, name).array, value, rtol=1e-5, atol=1e-6)


def test_lamb_takes_steps_in_proportion_to_parameters():
    small, large = Net(), Net()
    large.w.array *= 1000
    for model in (small, large):
        before = model.w.array.copy()
        optimizer = LAMB(0.01, weight_decay_rate=0).setup(model)
        model.w.grad, model.b.grad = (gradients(1)[0][name].astype("f4") for name in ("w", "b"))
        optimizer.update()
        np.testing.assert_allclose(np.linalg.norm(model.w.array - before), 0.01 * np.linalg.norm(before), rtol=1e-4)


def test_lamb_where_all_is_zero():
    model = Net()
    model.w.array[...] = 0
    optimizer = LAMB().setup(model)
    model.cleargrads()
    optimizer.update()
    assert not model.w.array.any()


@pytest.mark.parametrize("make", [lambda: LAMB(0.05), lambda: RMSpropWarmup(0.05, 0.5, 0.5)])
def test_half_precision_with_a_float32_copy(make):
    optimizer = make()
    optimizer.use_fp32_update()
    actual, expected = train(optimizer, np.float16), train(make())
    assert actual.w.dtype == np.float16
    np.testing.assert_allclose(actual.w.array, expected.w.array, rtol=1e-2, atol=1e-2)


@pytest.mark.parametrize("make", [lambda: LAMB(0.05), lambda: RMSpropWarmup(0.05, 0.5, 0.5)])
def test_state_is_saved(make):
    whole = train(make())
    optimizer = make()
    model = train(optimizer, grads=gradients()[:3])
    writers = DictionarySerializer(), DictionarySerializer()
    writers[0].save(optimizer)
    writers[1].save(model)
    resumed = make()
    loaded = Net()
    resumed.setup(loaded)
    NpzDeserializer(writers[0].target).load(resumed)
    NpzDeserializer(writers[1].target).load(loaded)
    for each in gradients()[3:]:
        for name, grad in each.items():
            getattr(loaded, name).grad = grad.astype("f4")
        resumed.update()
    np.testing.assert_array_equal(loaded.w.array, whole.w.array)


@pytest.mark.parametrize("make", [lambda: LAMB(0.05), lambda: RMSpropWarmup(0.05, 0.5, 0.5)])
def test_within_a_multi_node_optimizer(make):
    multi = create_multi_node_optimizer(make(), create_communicator("flat"))
    model = train(multi, grads=[gradients(1)[0], *gradients()])  # the first distributes parameters
    np.testing.assert_array_equal(model.w.array, train(make()).w.array)


@pytest.mark.parametrize(("sgd", "rmsprop"), [(1.0, 0.0), (0.3, 0.02), (0.0, 0.01)])
def test_rmsprop_warmup_is_that_of_the_paper(sgd, rmsprop):
    model = train(RMSpropWarmup(0.1, sgd, rmsprop, 0.8, 0.9, 1e-8))
    expected = {name: param.array.astype("f8") for name, param in zip(("b", "w"), Net().params(), strict=True)}
    for name, value in expected.items():
        m, delta = np.zeros_like(value), np.zeros_like(value)
        for each in gradients():
            g = each[name]
            m = 0.9 * m + 0.1 * g**2
            delta = 0.8 * delta - (sgd + rmsprop / (np.sqrt(m) + 1e-8)) * g
            value += 0.1 * delta
        np.testing.assert_allclose(getattr(model, name).array, value, rtol=1e-4, atol=1e-5)


def test_rmsprop_warmup_ends_as_momentum_sgd():
    expected = train(chainer.optimizers.MomentumSGD(0.1, 0.9))
    np.testing.assert_allclose(train(RMSpropWarmup(0.1)).w.array, expected.w.array, rtol=1e-5)


def test_the_share_of_sgd():
    assert sgd_share(0) == pytest.approx(0.5 * math.exp(-4))
    assert sgd_share(9.999999) == pytest.approx(sgd_share(10)) == pytest.approx(0.5)
    assert sgd_share(11.25) == pytest.approx(0.75)
    assert sgd_share(12.5) == sgd_share(90) == 1
    assert sgd_share(1, center=2, period=1) == pytest.approx(0.5 * math.exp(-2))


def test_linear_scaling():
    assert linear_scaling(0.1, 32768) == 12.8
    assert linear_scaling(0.1, 64, 128) == 0.05
    with pytest.raises(ValueError, match="expected batches of at least 1"):
        linear_scaling(0.1, 0)


def test_gradual_warmup():
    constant = gradual_warmup(1.0, 0.2, 4)
    assert [constant(epoch) for epoch in (0, 2, 4, 9)] == pytest.approx([0.2, 0.6, 1, 1])
    stepped = gradual_warmup(piecewise(1.0, [(0, 1), (6, 0.1)]), 0, 4)
    assert [stepped(epoch) for epoch in (0, 2, 4, 6)] == pytest.approx([0, 0.5, 1, 0.1])
    assert gradual_warmup(1.0, 0.5, 0)(0) == 1
    with pytest.raises(ValueError, match="expected epochs of at least 0"):
        gradual_warmup(1, 0, -1)


def test_piecewise():
    schedule = piecewise(12.8, SLOW_START)
    assert [schedule(epoch) for epoch in (0, 39.9, 40, 70, 85, 90)] == pytest.approx(
        [6.4, 6.4, 0.96, 0.128, 0.0128, 0.0128]
    )
    for wrong in ([], [(1, 1)], [(0, 1), (5, 1), (5, 2)]):
        with pytest.raises(ValueError, match="expected epochs that ascend from 0"):
            piecewise(1, wrong)


def run(optimizer, extensions, tmp_path, n_epochs=4):
    """Train; return the optimizer's values in each update."""
    seen = []
    model = Net()

    def loss(x):
        seen.append(dict(optimizer.hyperparam.get_dict()))
        return chainer.functions.sum(model.w) * 0

    iterator = chainer.iterators.SerialIterator(np.zeros((4, 1), "f4"), 2)
    updater = training.StandardUpdater(iterator, optimizer.setup(model), loss_func=loss)
    trainer = training.Trainer(updater, (n_epochs, "epoch"), out=str(tmp_path))
    for extension in extensions:
        trainer.extend(extension)
    trainer.run()
    return seen


def test_learning_rates_are_set_before_each_update(tmp_path):
    seen = run(chainer.optimizers.SGD(9), [LearningRateSchedule(gradual_warmup(1.0, 0, 2))], tmp_path)
    assert [each["lr"] for each in seen] == pytest.approx([0, 0.25, 0.5, 0.75, 1, 1, 1, 1])
    seen = run(chainer.optimizers.Adam(), [LearningRateSchedule(lambda epoch: 1 + epoch)], tmp_path, 1)
    assert [each["alpha"] for each in seen] == pytest.approx([1, 1.5])


def test_rmsprop_passes_to_sgd_while_a_trainer_runs(tmp_path):
    extensions = [RMSpropWarmupSchedule(0.02, center=2, period=2), LearningRateSchedule(lambda epoch: 1 + epoch)]
    seen = run(RMSpropWarmup(7.0), extensions, tmp_path)
    for i, each in enumerate(seen):
        share = sgd_share(i / 2, 2, 2)
        assert each["alpha_sgd"] == pytest.approx(share)
        assert each["alpha_rmsprop"] == pytest.approx((1 - share) * 0.02 / (1 + i / 2))


def test_rmsprop_warmup_from_a_learning_rate_of_0(tmp_path):
    extensions = [RMSpropWarmupSchedule(0.02, center=2, period=2), LearningRateSchedule(gradual_warmup(1.0, 0, 2))]
    seen = run(RMSpropWarmup(), extensions, tmp_path)
    assert (seen[0]["lr"], seen[0]["alpha_rmsprop"]) == (0, 0)
    assert seen[1]["alpha_rmsprop"] == pytest.approx((1 - sgd_share(0.5, 2, 2)) * 0.02 / 0.25)


@pytest.mark.parametrize(
    ("make", "extension", "attr"),
    [
        (chainer.optimizers.AdaDelta, LearningRateSchedule(lambda epoch: 1), "alpha"),
        (chainer.optimizers.SGD, LearningRateSchedule(lambda epoch: 1, attr="Lr"), "Lr"),
        (chainer.optimizers.SGD, RMSpropWarmupSchedule(), "alpha_rmsprop"),
    ],
)
def test_a_schedule_of_what_the_optimizer_has_not(make, extension, attr, tmp_path):
    for optimizer in (make(), create_multi_node_optimizer(make(), create_communicator("flat"))):
        with pytest.raises(AttributeError, match=f"expected an optimizer that has {attr}, got {make.__name__}"):
            run(optimizer, [extension], tmp_path)


@pytest.mark.parametrize("optimizer", [RMSpropWarmup(eps=1e-8), LAMB(eps=1e-8, weight_decay_rate=0)])
def test_an_eps_that_half_precision_cannot_hold(optimizer):
    """Otherwise, parameters whose gradients are zeros would become NaN."""
    model = chainer.Chain()
    with model.init_scope():
        model.w = chainer.Parameter(np.ones(2, np.float16))
    optimizer.setup(model)
    model.w.grad = np.zeros(2, np.float16)
    with pytest.raises(ValueError, match="expected an eps that float16 can represent, got 1e-08"):
        optimizer.update()
    optimizer.eps = 1e-6
    optimizer.update()
    np.testing.assert_array_equal(model.w.array, 1)


def test_last_statistics_are_kept():
    model = chainer.Sequential(L.Linear(2, 3), L.BatchNormalization(3), L.BatchNormalization(3))
    assert keep_last_statistics(model) == 2
    x = np.random.RandomState(0).rand(8, 2).astype("f4")
    for scale in (1, 5):
        h = model[0](x * np.float32(scale))
        model[1](h)
    np.testing.assert_allclose(model[1].avg_mean, h.array.mean(0), rtol=1e-5)
    np.testing.assert_allclose(model[1].avg_var, h.array.var(0, ddof=1), rtol=1e-4)
