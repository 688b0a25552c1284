"""The backward pass that reports final gradients, compared with Chainer's own."""

import chainer
import chainer.functions as F
import chainer.links as L
import numpy as np
import pytest

import mn_optim  # noqa: F401 - before Chainer
from mn_optim.backward import backward


class Net(chainer.Chain):
    """Uses a parameter several times, has branches, a leaf that is not a parameter, and an unused link."""

    def __init__(self):
        super().__init__()
        initial = chainer.initializers.LeCunNormal(rng=np.random.RandomState(0))
        with self.init_scope():
            self.first = L.Linear(4, 6, initialW=initial)
            self.shared = L.Linear(6, 6, initialW=initial)
            self.norm = L.BatchNormalization(6)
            self.branch = L.Linear(6, 3, initialW=initial)
            self.last = L.Linear(6, 3, initialW=initial)
            self.unused = L.Linear(2, 2)

    def forward(self, x):
        h = F.relu(self.first(x))
        h = self.norm(self.shared(F.tanh(self.shared(h))))
        return F.sum(self.last(h) * self.branch(F.dropout(h, 0.0))) / len(x)


def data():
    return np.random.RandomState(1).rand(5, 4).astype("f4")


def gradients(run, prepare=None):
    model = Net()
    model.cleargrads()
    if prepare:
        prepare(model)
    x = chainer.Variable(data())
    run(model, model(x))
    return {name: param.grad for name, param in model.namedparams()} | {"x": x.grad}


def same(actual, expected):
    assert actual.keys() == expected.keys()
    for name in expected:
        if expected[name] is None:
            assert actual[name] is None
        else:
            np.testing.assert_array_equal(actual[name], expected[name], err_msg=name, strict=True)


@pytest.mark.parametrize("loss_scale", [None, 128.0])
def test_gradients_are_equal_bit_for_bit(loss_scale):
    expected = gradients(lambda model, loss: loss.backward(loss_scale=loss_scale))
    same(gradients(lambda model, loss: backward(loss, loss_scale, lambda variable: None)), expected)


def test_what_is_told_of_is_final_and_told_of_once():
    seen = {}

    def run(model, loss):
        names = {id(param): name for name, param in model.namedparams()}

        def tell(variable):
            if id(variable) in names:
                assert names[id(variable)] not in seen
                seen[names[id(variable)]] = variable.grad.copy()

        backward(loss, None, tell)

    final = gradients(run)
    same(seen, {name: grad for name, grad in final.items() if name in seen})
    assert set(final) - set(seen) == {"/unused/W", "/unused/b", "x"}
    order = list(seen)
    assert order.index("/last/W") < order.index("/shared/W") < order.index("/first/W")


def test_gradients_that_are_there_already_are_added_to():
    def prepare(model):
        for param in model.params():
            param.grad = np.ones_like(param.data)

    expected = gradients(lambda model, loss: loss.backward(), prepare)
    same(gradients(lambda model, loss: backward(loss, None, lambda variable: None), prepare), expected)


def test_function_hooks_go_on_working():
    hook = chainer.function_hooks.TimerHook()

    def run(model, loss):
        with hook:
            backward(loss, None, lambda variable: None)

    gradients(run)
    assert hook.call_history


def test_a_graph_within_the_graph():
    # F.forget runs another backward pass within this one.
    class Forgetful(chainer.Chain):
        def __init__(self):
            super().__init__()
            with self.init_scope():
                self.inner = L.Linear(4, 4, initialW=np.eye(4, dtype="f4") * 2)
                self.outer = L.Linear(4, 1, initialW=np.ones((1, 4), "f4"))

        def forward(self, x):
            return F.sum(self.outer(F.forget(self.inner, x)))

    def run(how):
        model = Forgetful()
        model.cleargrads()
        how(model(chainer.Variable(data())))
        return {name: param.grad for name, param in model.namedparams()}

    same(run(lambda loss: backward(loss, None, lambda variable: None)), run(lambda loss: loss.backward()))


def test_a_loss_that_depends_on_nothing():
    backward(chainer.Variable(np.ones((), "f4")), None, lambda variable: None)


def test_chainer_is_as_it_was_afterwards_also_after_an_error():
    from chainer import _backprop_utils

    table = _backprop_utils.GradTable
    with pytest.raises(ZeroDivisionError):
        gradients(lambda model, loss: backward(loss, None, lambda variable: 1 / 0))
    assert _backprop_utils.GradTable is table
    assert not chainer.get_function_hooks()
