"""Sums, means and variances over several axes are NumPy's."""

import numpy as np
import pytest

from mn_compat.helpers import statistics

cupy = pytest.importorskip("cupy")

pytestmark = pytest.mark.gpu

AXES = [(0, 2, 3), (3,), (2, 3), (1, 2, 3), (0, 3), (1, 3), (0, 1), (0, 1, 2), (0, 1, 2, 3), (2,)]


@pytest.mark.parametrize("axis", AXES)
@pytest.mark.parametrize(("dtype", "result"), [("f2", "f2"), ("f2", "f4"), ("f4", "f4"), ("f4", "f8"), ("f8", "f8")])
@pytest.mark.parametrize("order", ["c", "transposed"])
def test_statistics_are_those_of_numpy(axis, dtype, result, order):
    values = np.random.RandomState(0).uniform(-1, 3, (4, 3, 5, 7)).astype(dtype)
    x = cupy.asarray(values)
    if order == "transposed":
        x = cupy.ascontiguousarray(x.transpose(2, 0, 3, 1)).transpose(1, 3, 0, 2)
    for name, function in (("sum", "total"), ("mean", "mean"), ("var", "var")):
        found = getattr(statistics, function)(x, axis, np.dtype(result))
        assert found.dtype == result
        expected = getattr(values.astype("f8"), name)(axis=axis)
        np.testing.assert_allclose(found.get(), expected, rtol=2e-3 if result == "f2" else 1e-5, atol=1e-5)


def test_a_small_variance_of_large_values_keeps_its_digits():
    x = cupy.asarray(1000 + np.random.RandomState(0).uniform(-1, 1, (8, 2, 30, 30))).astype("f")
    expected = x.get().astype("f8").var(axis=(0, 2, 3))
    np.testing.assert_allclose(statistics.var(x, (0, 2, 3), np.dtype("f")).get(), expected, rtol=1e-3)


def test_deviations_have_the_precision_of_the_values():
    x = cupy.asarray(1e8 + np.random.RandomState(0).uniform(-1, 1, (8, 2, 30, 30)))
    expected = x.get().var(axis=(0, 2, 3))
    np.testing.assert_allclose(statistics.var(x, (0, 2, 3), np.dtype("f")).get(), expected, rtol=1e-5)


@pytest.mark.parametrize("axis", [(-3, 3), (-1,), (-2, -1)])
def test_other_axes_are_left_to_cupy(axis):
    x = cupy.arange(2 * 3 * 4 * 5, dtype="f").reshape(2, 3, 4, 5)
    for name, function in (("sum", "total"), ("mean", "mean"), ("var", "var")):
        expected = getattr(x, name)(axis=axis, dtype="f").get()
        np.testing.assert_allclose(getattr(statistics, function)(x, axis, np.dtype("f")).get(), expected, rtol=1e-5)
