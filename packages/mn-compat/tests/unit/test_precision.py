"""Scalars with which Chainer sums and scales (root cause: NumPy 2's promotion)."""

import chainer
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from mn_compat.helpers.precision import double, widened

# On a busy machine, one example may take long.
unhurried = settings(deadline=None)

FLOATS = st.sampled_from([np.float16, np.float32, np.float64])


def batches(dtype):
    # Wide enough that the square of a float16 overflows in float16.
    return hnp.arrays(dtype, st.integers(1, 50), elements=st.floats(-1000, 1000, width=np.dtype(dtype).itemsize * 8))


@unhurried
@given(values=FLOATS.flatmap(batches), zero_d=st.booleans())
def test_a_summary_equals_the_exact_statistics(values, zero_d):
    summary = chainer.DictSummary()
    for value in values:
        summary.add({"x": np.array(value) if zero_d else value})
    exact = values.astype(np.float64)
    np.testing.assert_allclose(summary.compute_mean()["x"], exact.mean(), rtol=1e-12, atol=1e-12)
    if np.ptp(exact) > 1:
        std = summary.make_statistics()["x.std"]
        np.testing.assert_allclose(std, exact.std(), rtol=1e-6)


WEIGHTS = st.one_of(
    hnp.arrays(np.float16, 50, elements=st.floats(0.5, 4, width=16)),
    hnp.arrays(np.int8, 50, elements=st.integers(1, 100)),
)


@unhurried
@given(values=FLOATS.flatmap(batches), weights=WEIGHTS)
def test_a_weighted_summary_equals_the_exact_mean(values, weights):
    weights = weights[: len(values)]
    summary = chainer.DictSummary()
    for value, weight in zip(values, weights, strict=True):
        summary.add({"x": (value, weight)})
    exact = np.average(values.astype(np.float64), weights=weights.astype(np.float64))
    np.testing.assert_allclose(summary.compute_mean()["x"], exact, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("dtype", [np.float16, np.float32])
def test_two_thousand_values(dtype):
    values = np.random.RandomState(0).normal(1.2, 0.1, 2000).astype(dtype)
    summary = chainer.Summary()
    for value in values:
        summary.add(value)
    mean, std = summary.make_statistics()
    exact = values.astype(np.float64)
    assert mean == pytest.approx(exact.mean(), rel=1e-13)
    assert std == pytest.approx(exact.std(), rel=1e-10)


def test_a_log_report_is_exact(tmp_path):
    from chainer import training
    from chainer.training import extensions

    values = np.random.RandomState(0).normal(1.2, 0.1, 500).astype(np.float16)

    class Updater:
        epoch = 0
        epoch_detail = 0.0
        is_new_epoch = False

        def __init__(self):
            self.iteration = 0

        def update(self):
            chainer.report({"loss": chainer.Variable(np.array(values[self.iteration]))})
            self.iteration += 1

        def connect_trainer(self, trainer):
            pass

        def get_all_optimizers(self):
            return {}

        def finalize(self):
            pass

    trainer = training.Trainer(Updater(), (500, "iteration"), out=tmp_path)
    trainer.extend(extensions.LogReport(trigger=(500, "iteration")))
    trainer.run()
    (entry,) = trainer.get_extension("LogReport").log
    assert entry["loss"] == pytest.approx(values.astype(np.float64).mean(), rel=1e-13)


def test_python_numbers_and_larger_arrays_are_left_alone():
    summary = chainer.DictSummary()
    summary.add({"int": 3, "float": 0.5, "array": np.ones(2)})
    assert summary.compute_mean() == {"int": 3, "float": 0.5}
    assert double(3) == 3
    array = np.ones(2, np.float16)
    assert double(array) is array
    assert widened(array) is array


@pytest.mark.parametrize("value", [np.complex64(1j), np.longdouble(1), np.str_("x")])
def test_what_float64_cannot_hold_is_left_alone(value):
    assert double(value) is value


def test_device_arrays_are_widened_where_they_are():
    class DeviceArray:
        ndim = 0
        dtype = np.dtype(np.float16)

        def astype(self, dtype):
            return "on the device", dtype

    assert widened(DeviceArray()) == ("on the device", np.float64)
    array = DeviceArray()
    assert double(array) is array


@unhurried
@given(value=st.floats(2**-12, 1, width=16), dtype=FLOATS)
def test_a_hyperparameter_is_the_python_number(value, dtype):
    optimizer = chainer.optimizers.SGD(lr=dtype(value))
    assert type(optimizer.lr) is float
    assert optimizer.lr == value
    optimizer.hyperparam.steps = np.int64(3)
    assert type(optimizer.hyperparam.steps) is int


def test_a_child_still_sees_its_parents_hyperparameters():
    model = chainer.links.Linear(2, 2)
    optimizer = chainer.optimizers.Adam().setup(model)
    optimizer.alpha = np.float32(0.5)
    assert model.W.update_rule.hyperparam.alpha == 0.5
    assert model.W.update_rule.hyperparam.parent is optimizer.hyperparam
