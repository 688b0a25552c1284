import chainer
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import mn_extensions  # noqa: F401 - before Chainer
from mn_comm import create_communicator
from mn_extensions import create_multi_node_evaluator
from mn_extensions.evaluator import plain_mean
from mn_extensions.observation_aggregator import mean_of_all


def test_the_mean_under_each_name():
    assert plain_mean([{"a": 1.0, "b": 0.0}, {"a": 2.0, "b": 1.0}]) == {"a": 1.5, "b": 0.5}


def test_a_rank_without_a_value_is_left_out_of_its_mean():
    assert plain_mean([{"a": 1.0}, {}, {"a": 3.0, "b": 5.0}]) == {"a": 2.0, "b": 5.0}
    assert plain_mean([{}, {}]) == {}


@pytest.mark.parametrize("value", [np.float16(1), np.array(1, np.float16), np.array([50_000, 1], np.float16)])
def test_the_mean_of_many_values_in_half_precision(value):
    np.testing.assert_array_equal(mean_of_all([[value] * 1500] * 2), value)
    np.testing.assert_array_equal(plain_mean([{"a": value}] * 3000)["a"], value)


@given(st.lists(st.floats(-1e6, 1e6), min_size=1, max_size=8))
def test_the_mean_is_that_of_numpy(values):
    mean = plain_mean([{"a": value} for value in values])["a"]
    np.testing.assert_allclose(mean, np.mean(values), rtol=1e-12, atol=1e-9)


@pytest.mark.parametrize("wrong", [None, "evaluator", lambda trainer: None])
def test_an_evaluator_that_is_not_one(wrong):
    comm = create_communicator("naive")
    with pytest.raises(TypeError, match=r"expected a chainer.training.extensions.Evaluator for actual_evaluator"):
        create_multi_node_evaluator(wrong, comm)
    comm.finalize()


def test_an_evaluator_that_is_a_multi_node_one_already():
    comm = create_communicator("naive")
    evaluator = chainer.training.extensions.Evaluator(
        chainer.iterators.SerialIterator([1], 1, repeat=False), chainer.Link()
    )
    create_multi_node_evaluator(evaluator, comm)
    with pytest.raises(ValueError, match="expected an evaluator for actual_evaluator that is not a multi-node"):
        create_multi_node_evaluator(evaluator, comm)
    comm.finalize()
