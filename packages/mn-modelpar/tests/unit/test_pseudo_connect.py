import chainer
import chainer.functions as F
import numpy as np
import pytest

from mn_modelpar.functions import pseudo_connect


def variable(*values):
    return chainer.Variable(np.array(values, float))


def test_one_value_is_a_variable_and_can_be_unpacked():
    x, y = variable(1, 2), variable(3, 4, 5)
    connected = pseudo_connect(2 * x, y)
    assert isinstance(connected, chainer.Variable)
    np.testing.assert_array_equal(connected.array, y.array)
    (value,) = connected
    assert type(value) is type(connected[0]) is chainer.Variable
    np.testing.assert_array_equal(value.array, y.array)
    np.testing.assert_array_equal(connected[1:].array, [4, 5])
    F.sum(connected + 2 * value).backward()
    np.testing.assert_array_equal(y.grad, [3, 3, 3])
    np.testing.assert_array_equal(x.grad, [0, 0])


def test_several_values_are_a_tuple():
    x, y, z = variable(1), variable(2), variable(3, 4)
    connected = pseudo_connect(x, y, z)
    assert isinstance(connected, tuple)
    F.sum(connected[1] * 5).backward()
    np.testing.assert_array_equal(z.grad, [5, 5])
    np.testing.assert_array_equal(y.grad, [0])  # not used, and reached all the same
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
