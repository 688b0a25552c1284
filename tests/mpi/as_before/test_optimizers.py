from unittest import mock

import chainer
import chainer.links as L
import chainermn
import numpy as np
import pytest

COMM = chainermn.create_communicator("naive")
RANK, SIZE = COMM.rank, COMM.size
MEAN = (SIZE - 1) / 2


def gradients(model):
    for i, (_, param) in enumerate(sorted(model.namedparams())):
        param.grad = np.full(param.shape, RANK + i, "f4")


def make(links, rule=mock.MagicMock):
    """An optimizer whose update rules only record that they were asked to update."""
    model = chainer.Chain(**{name: L.Linear(2 + i, 3) for i, name in enumerate(links)})
    for i, param in enumerate(model.params()):
        param.array[...] = RANK + i
    actual = chainer.GradientMethod()
    actual.create_update_rule = rule
    optimizer = chainermn.create_multi_node_optimizer(actual, COMM)
    assert optimizer.setup(model) is optimizer
    return optimizer, model


def was_shared_out(optimizer, model, steps=0):
    gradients(model)
    arrays = COMM.bcast_obj([param.array for param in model.params()] if RANK == 0 else None)
    optimizer.update()
    assert optimizer.t == optimizer.actual_optimizer.t == steps
    for param, expected in zip(model.params(), arrays, strict=True):
        np.testing.assert_array_equal(param.array, expected)


def took_a_step(optimizer, model, steps):
    gradients(model)
    optimizer.update()
    assert optimizer.t == steps
    for i, (_, param) in enumerate(sorted(model.namedparams())):
        np.testing.assert_allclose(param.grad, np.full(param.shape, MEAN + i))


def test_rules_that_are_mocks():
    optimizer, model = make("abc", rule=mock.MagicMock())
    was_shared_out(optimizer, model)
    rule = model.a.W.update_rule
    assert rule is optimizer.create_update_rule.return_value
    assert not rule.update.called
    took_a_step(optimizer, model, 1)
    assert rule.update.call_args_list == [mock.call(param) for param in model.params()]


def test_a_rule_for_each_parameter():
    optimizer, model = make("ab")
    was_shared_out(optimizer, model)
    took_a_step(optimizer, model, 1)
    for param in model.params():
        param.update_rule.update.assert_called_once_with(param)


def test_links_that_come_and_go():
    optimizer, model = make("ab")
    was_shared_out(optimizer, model)
    took_a_step(optimizer, model, 1)
    with model.init_scope():
        model.c = L.Linear(4, 5)
    was_shared_out(optimizer, model, steps=1)
    for other in COMM.allgather(model.c.W.array):
        np.testing.assert_array_equal(other, model.c.W.array)
    took_a_step(optimizer, model, 2)
    optimizer.setup(model)
    took_a_step(optimizer, model, 1)  # setup restarts counting, and the parameters are known
    model.c.W.update_rule.update.assert_called_once_with(model.c.W)
    del model.a
    was_shared_out(optimizer, model, steps=1)
    took_a_step(optimizer, model, 2)


def test_a_link_that_the_first_data_initialise():
    optimizer, model = make("ab")
    with model.init_scope():
        model.c = L.Linear(None, 5)
    gradients(chainer.Chain(**{name: model[name] for name in "ab"}))
    optimizer.update()
    optimizer.update()
    assert optimizer.t == 1
    model.c(np.zeros((1, 4), "f4"))
    was_shared_out(optimizer, model, steps=1)
    took_a_step(optimizer, model, 2)


@pytest.mark.parametrize("zero_fill", [True, False])
def test_gradients_that_are_missing(zero_fill):
    _, model = make("ab")
    actual = mock.MagicMock(spec=chainer.GradientMethod, target=model, t=0, _loss_scale=None)
    optimizer = chainermn.create_multi_node_optimizer(actual, COMM, zero_fill=zero_fill)
    optimizer.update()
    assert not actual.update.called
    gradients(model.b)
    model.a.cleargrads()
    optimizer.update()
    assert actual.update.call_count == 1
    assert (model.a.W.grad is None) == (not zero_fill)
    assert not zero_fill or not model.a.W.grad.any()


def test_what_update_is_given_goes_on_to_the_actual_optimizer():
    _, model = make("a")
    actual = mock.MagicMock(spec=chainer.GradientMethod, target=model, t=0, _loss_scale=None, _use_cleargrads=True)
    optimizer = chainermn.create_multi_node_optimizer(actual, COMM)

    def loss(x, scale):
        return scale * chainer.functions.sum(model.a(x))

    x = np.ones((1, 2), "f4")
    for _ in range(2):
        optimizer.update(loss, x, scale=2)
    actual.update.assert_called_once_with(None, x, scale=2)


def test_it_stands_for_the_actual_optimizer():
    optimizer, model = make("a")
    assert optimizer.target is model
    optimizer.note = 1
    assert optimizer.actual_optimizer.note == 1
    optimizer.actual_optimizer.note = 2
    assert optimizer.note == 2
    hook = mock.MagicMock(timing="pre", call_for_each_param=False)
    optimizer.add_hook(hook, "own")
    was_shared_out(optimizer, model)
    assert not hook.called
    took_a_step(optimizer, model, 1)
    hook.assert_called_once_with(optimizer.actual_optimizer)


def test_it_may_be_created_on_some_ranks_only():
    if RANK == 0:
        chainermn.create_multi_node_optimizer(chainer.optimizers.SGD(), COMM)
    assert COMM.allreduce_obj(1) == SIZE
