import os
import subprocess
import sys

import chainer
import chainer.functions as F
import numpy as np
import pytest

from mn_modelpar.functions import pseudo_connect


def variable(*values):
    return chainer.Variable(np.array(values, float))


def test_one_value_is_a_tuple_of_one_as_since_chainermn_6():
    x, y = variable(1, 2), variable(3, 4, 5)
    connected = pseudo_connect(2 * x, y)
    assert isinstance(connected, tuple)
    assert len(connected) == 1
    assert len(connected + (1, 2)) == 3  # noqa: RUF005 - the operator is what is tested
    (value,) = connected
    assert type(value) is type(connected[0]) is chainer.Variable
    np.testing.assert_array_equal(value.array, y.array)
    F.sum(2 * value).backward()
    np.testing.assert_array_equal(y.grad, [2, 2, 2])
    np.testing.assert_array_equal(x.grad, [0, 0])


def test_one_value_can_be_used_as_a_variable_as_with_chainermn_1():
    x, y = variable(1, 2), variable(3, 4, 5)
    connected = pseudo_connect(2 * x, y)
    assert isinstance(connected, chainer.Variable)
    assert connected.shape == (3,)
    total = F.sum(F.tanh(0 * connected) + connected + 2 * connected - connected**1 + connected / 2 + (-connected))
    connected.name = "named"
    assert connected[0].name == "named"
    total.backward()
    np.testing.assert_allclose(y.grad, [1.5, 1.5, 1.5])
    np.testing.assert_array_equal(x.grad, [0, 0])


def test_a_tuple_of_one_can_start_the_backward_pass():
    x, y = chainer.Variable(np.zeros(2)), chainer.Variable(np.array(3.0))
    pseudo_connect(x * 1, 2 * y).backward()
    assert y.grad == 2
    np.testing.assert_array_equal(x.grad, [0, 0])


def test_the_old_software_returns_a_tuple_of_one_too():
    code = (
        "import mn_compat, chainermn, chainer, numpy as np; "
        "c = chainermn.functions.pseudo_connect(chainer.Variable(np.zeros(1)), chainer.Variable(np.ones(2))); "
        "print(chainermn.__version__, isinstance(c, tuple), len(c), type(c[0]).__name__)"
    )
    printed = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", code],
        env={**os.environ, "CHAINERMN_IMPL": "bundled"},
        capture_output=True,
        text=True,
        check=True,
    ).stdout
    assert printed == "7.8.1 True 1 Variable\n"


def test_several_values_are_a_tuple():
    x, y, z = variable(1), variable(2), variable(3, 4)
    connected = pseudo_connect(x, y, z)
    assert isinstance(connected, tuple)
    F.sum(connected[1] * 5).backward()
    np.testing.assert_array_equal(z.grad, [5, 5])
    np.testing.assert_array_equal(y.grad, [0])  # not used, but still reached
    np.testing.assert_array_equal(x.grad, [0])


def test_an_empty_variable_can_start_the_backward_pass():
    x, y = chainer.Variable(np.zeros(0, "f")), chainer.Variable(np.zeros(0, "f"))
    pseudo_connect(x * 1, y * 1).backward()
    assert x.grad.shape == y.grad.shape == (0,)


def test_no_delegate():
    y = variable(1)
    F.sum(pseudo_connect(None, y)).backward()
    np.testing.assert_array_equal(y.grad, [1])


def test_integers_pass_through():
    x, y = variable(1), variable(2)
    whole, floats = pseudo_connect(x, np.arange(3), y)
    np.testing.assert_array_equal(whole.array, [0, 1, 2])
    F.sum(floats).backward()
    np.testing.assert_array_equal(x.grad, [0])


def test_a_second_backward_pass():
    x, y = variable(1), variable(3)
    z = pseudo_connect(x, y)
    F.sum(z**3).backward(enable_double_backprop=True)
    grad = y.grad_var
    y.cleargrad()
    F.sum(grad).backward()
    np.testing.assert_array_equal(y.grad, [18])


def test_no_values():
    with pytest.raises(ValueError, match="expected at least one value besides the delegate"):
        pseudo_connect(variable(1))
