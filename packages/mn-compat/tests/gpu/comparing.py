"""Compares what a function computes on the device with what it computes on the host."""

import zlib
from dataclasses import dataclass

import chainer
import numpy as np
from chainer import Variable

TOLERANCES = {"float16": 3e-2, "float32": 2e-4, "float64": 1e-7}


@dataclass(frozen=True)
class Case:
    """A function and its inputs.

    Attributes:
        function: Takes the arrays; returns a variable, or several.
        inputs: Functions of a random state and a dtype, which return an array, or any other object.
        order: How often to differentiate.
        dtypes: In which precisions to compare.
    """

    function: object
    inputs: tuple
    order: int = 2
    dtypes: tuple = ("float32",)


def case(function, *inputs, order=2, dtypes=("float32",)):
    """Return a case."""
    return Case(function, inputs, order, dtypes)


def signed(*shape):
    """Values in [-2, 2], none of which is close to zero or to another one."""
    return lambda state, dtype: (_distinct(state, shape) * np.where(state.random_sample(shape) < 0.5, -2, 2)).astype(
        dtype
    )


def positive(*shape, low=0.3, high=2.0):
    """Distinct values between two numbers."""
    return lambda state, dtype: (low + (high - low) * _distinct(state, shape)).astype(dtype)


def within(*shape):
    """Distinct values between -0.9 and 0.9."""
    return positive(*shape, low=-0.9, high=0.9)


def matrices(*shape):
    """Symmetric, positive definite matrices, with distinct eigenvalues."""

    def make(state, dtype):
        size = shape[-1]
        factor = state.randn(*shape)
        return (factor @ factor.swapaxes(-1, -2) + np.diag(np.arange(1, size + 1))).astype(dtype)

    return make


def labels(*shape, high=3):
    """Integers from zero."""
    return lambda state, dtype: state.randint(0, high, shape).astype(np.int32)


def flags(*shape):
    """Booleans."""
    return lambda state, dtype: state.random_sample(shape) < 0.5


def ones(*shape):
    """Ones, as integers of 0 and 1 are not floating."""
    return lambda state, dtype: np.ones(shape, dtype)


def values(numbers, dtype=None):
    """The numbers as an array; in the dtype of the case unless another is given."""
    return lambda state, given: np.array(numbers, dtype or given)


def _distinct(state, shape):
    count = int(np.prod(shape))
    return ((state.permutation(count) + 0.5) / count).reshape(shape)


def on(device, name, case, dtype):
    """Run a case on a device; return its outputs, its gradients and their gradients, as arrays on the host."""
    state = np.random.RandomState(zlib.crc32(name.encode()))
    arrays = [make(state, dtype) if callable(make) else make for make in case.inputs]
    arrays = [device.send(array) if isinstance(array, np.ndarray) else array for array in arrays]
    variables = [Variable(array) if _is_float(array) else array for array in arrays]
    leaves = [variable for variable in variables if isinstance(variable, Variable)]
    with chainer.using_device(device):
        levels = [_outputs(case.function(*variables))]
        on_device = isinstance(levels[0][0].array, np.ndarray) == (device.xp is np)
        assert on_device, f"the result of {name} is {type(levels[0][0].array)}"
        while len(levels) <= case.order:
            levels.append(_gradients(levels[-1], leaves, device, further=len(levels) < case.order))
    host = chainer.get_device("@numpy")
    return [[None if one is None else host.send(one.array) for one in level] for level in levels]


def _outputs(result):
    results = result if isinstance(result, (tuple, list)) else [result]
    flat = [one for some in results for one in (some if isinstance(some, (tuple, list)) else [some])]
    return [one for one in flat if isinstance(one, Variable)]


def _gradients(outputs, leaves, device, *, further):
    outputs = [one for one in outputs if one is not None and _is_float(one.array) and one.requires_grad]
    if not outputs or not leaves:
        return [None]
    state = np.random.RandomState(len(outputs))
    seeds = [Variable(device.send((0.5 + state.random_sample(one.shape)).astype(one.dtype))) for one in outputs]
    return chainer.grad(outputs, leaves, seeds, enable_double_backprop=further)


def _is_float(array):
    return hasattr(array, "dtype") and array.dtype.kind == "f"


def compare(name, case, dtype):
    """Raise an error if device and host differ."""
    expected = on(chainer.get_device("@numpy"), name, case, dtype)
    actual = on(chainer.get_device("@cupy:0"), name, case, dtype)
    tolerance = TOLERANCES[dtype]
    for level, (wanted, found) in enumerate(zip(expected, actual, strict=True)):
        assert len(wanted) == len(found), f"level {level}: expected {len(wanted)} arrays, got {len(found)}"
        for index, (want, get) in enumerate(zip(wanted, found, strict=True)):
            where = f"{('output', 'gradient', 'second gradient')[level]} {index} of {name}"
            assert (want is None) == (get is None), where
            if want is None:
                continue
            assert np.isfinite(want.astype("f8")).all(), f"{where} is not finite on the host"
            assert (want.dtype, want.shape) == (get.dtype, get.shape), where
            scale = max(1.0, float(np.abs(want).max())) if want.size and want.dtype.kind == "f" else 1.0
            np.testing.assert_allclose(
                get.astype("f8"), want.astype("f8"), rtol=tolerance, atol=tolerance * scale, err_msg=where
            )
