"""Averages of gradients: every strategy against the plain mean, computed without MPI."""

import gc
import weakref

import numpy as np
import pytest
from fake_model import Model, Param
from hypothesis import given
from hypothesis import strategies as st
from mpi4py import MPI

from mn_comm import create_communicator

WORLD = MPI.COMM_WORLD
RANK, SIZE = WORLD.rank, WORLD.size
NAMES = ["naive", "flat", "hierarchical", "two_dimensional", "single_node", "non_cuda_aware"]
COMMS = {name: create_communicator(name) for name in NAMES}
COMM = COMMS["naive"]


def gradient(shape, dtype, rank, seed):
    return np.asarray(np.random.RandomState(seed * 100 + rank).uniform(-1, 1, shape), dtype)


def layout(array, which):
    if which == "fortran":
        return np.asarray(array, order="F")
    if which == "strided" and array.ndim:
        wide = np.zeros((*array.shape[:-1], array.shape[-1] * 2), array.dtype)
        wide[..., ::2] = array
        return wide[..., ::2]
    if which == "reversed" and array.ndim:
        return array[::-1].copy()[::-1]
    return array


parameters = st.lists(
    st.tuples(
        st.lists(st.integers(0, 5), max_size=3).map(tuple),
        st.sampled_from(["f2", "f4", "f8"]),
        st.sampled_from(["c", "fortran", "strided", "reversed"]),
    ),
    max_size=8,
)


@pytest.mark.parametrize("name", NAMES)
@given(parameters)
def test_every_strategy_computes_the_mean(name, parameters):
    grads = {
        f"p{i}": [gradient(shape, dtype, rank, i) for rank in range(SIZE)]
        for i, (shape, dtype, _) in enumerate(parameters)
    }
    model = Model(
        **{
            key: Param(np.zeros_like(each[0]), layout(np.asarray(each[RANK]), parameters[i][2]))
            for i, (key, each) in enumerate(grads.items())
        }
    )
    COMMS[name].multi_node_mean_grad(model)
    for key, each in grads.items():
        actual = model.params[key].grad
        expected = np.mean([np.asarray(g, "f8") for g in each], axis=0)
        assert actual.dtype == each[0].dtype
        assert actual.shape == each[0].shape
        eps = max(np.finfo(actual.dtype).eps, np.finfo("f4").eps if actual.dtype == np.float16 else 0)
        np.testing.assert_allclose(actual, expected, rtol=0, atol=2 * eps)
        # Bit for bit the same on every rank.
        for other in WORLD.allgather(actual.tobytes()):
            assert other == actual.tobytes()


def step(comm, value, zero_fill=False, **grads):
    model = Model(**{key: Param(np.full(3, value, "f4"), grad) for key, grad in grads.items()})
    comm.multi_node_mean_grad(model, zero_fill)
    return model


MEAN = np.full(3, (SIZE - 1) / 2, "f4")


@pytest.mark.parametrize("name", NAMES)
def test_the_same_model_again_and_with_other_gradients(name):
    model = Model(a=Param(np.zeros(3, "f4")), b=Param(np.zeros((2, 2), "f8")))
    for factor in range(3):
        model.params["a"].grad = np.full(3, RANK * factor, "f4")
        model.params["b"].grad = np.full((2, 2), RANK + factor, "f8")
        COMMS[name].multi_node_mean_grad(model)
        np.testing.assert_allclose(model.params["a"].grad, MEAN * factor)
        np.testing.assert_allclose(model.params["b"].grad, np.full((2, 2), MEAN[0] + factor))
    model.params["b"].grad = None
    model.params["a"].grad = np.full(3, RANK, "f4")
    COMMS[name].multi_node_mean_grad(model)
    np.testing.assert_allclose(model.params["a"].grad, MEAN)
    assert model.params["b"].grad is None


def test_a_parameter_object_that_was_replaced():
    model = Model(a=Param(np.zeros(3, "f4"), np.full(3, RANK, "f4")))
    COMM.multi_node_mean_grad(model)
    model.params["a"] = Param(np.zeros(3, "f4"), np.full(3, RANK, "f4"))
    COMM.multi_node_mean_grad(model)
    np.testing.assert_allclose(model.params["a"].grad, MEAN)


@pytest.mark.parametrize("name", NAMES)
def test_missing_gradients_count_as_zeros_if_asked_for(name):
    mine = np.full(3, 4, "f4") if RANK == 0 else None
    model = step(COMMS[name], 1, zero_fill=True, a=mine, b=np.full(3, RANK, "f4"))
    np.testing.assert_allclose(model.params["a"].grad, np.full(3, 4 / SIZE, "f4"))
    np.testing.assert_allclose(model.params["b"].grad, MEAN)


@pytest.mark.parametrize("name", NAMES)
def test_gradients_missing_everywhere_are_left_out(name):
    model = step(COMMS[name], 1, zero_fill=False, a=None, b=np.full(3, RANK, "f4"))
    assert model.params["a"].grad is None
    np.testing.assert_allclose(model.params["b"].grad, MEAN)


def test_parameters_that_are_not_initialised_are_left_out():
    model = Model(a=Param(None), b=Param(np.zeros(3, "f4"), np.full(3, RANK, "f4")))
    COMM.multi_node_mean_grad(model, zero_fill=True)
    assert model.params["a"].grad is None
    np.testing.assert_allclose(model.params["b"].grad, MEAN)


def test_a_model_without_parameters():
    COMM.multi_node_mean_grad(Model())
    COMM.bcast_data(Model())


@pytest.mark.skipif(SIZE < 2, reason="needs two ranks that differ")
@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize(
    ("first", "other", "message"),
    [
        (np.ones(3), None, "first at /a: shape \\(3,\\) and dtype float64 on rank 0, missing on rank 1"),
        (None, np.ones(3), "first at /a: missing on rank 0, shape \\(3,\\) and dtype float64 on rank 1"),
        (np.ones(3), np.ones(4), "first at /a: shape \\(3,\\) .* on rank 0, shape \\(4,\\) .* on rank 1"),
        (np.ones(3), np.ones(3, "f4"), "first at /a: .* dtype float64 on rank 0, .* dtype float32 on rank 1"),
    ],
)
def test_ranks_that_differ_all_raise_and_can_go_on(name, first, other, message):
    comm = COMMS[name]
    model = Model(a=Param(np.zeros(3), first if RANK == 0 else other), b=Param(np.zeros(3), np.ones(3)))
    with pytest.raises(ValueError, match=message):
        comm.multi_node_mean_grad(model)
    # The same model, now the same on every rank.
    model.params["a"].grad = np.full(3, float(RANK))
    comm.multi_node_mean_grad(model)
    np.testing.assert_allclose(model.params["a"].grad, MEAN)


@pytest.mark.parametrize("order", ["C", "F"])
@pytest.mark.parametrize("name", NAMES)
def test_bcast_data(name, order):
    model = Model(
        a=Param(np.array(np.full((2, 3), RANK, "f4"), order=order)),
        h=Param(np.full(3, RANK, "f2")),
        n=Param(np.array(RANK)),
        u=Param(None),
    )
    arrays = {key: param.data for key, param in model.params.items()}
    COMMS[name].bcast_data(model)
    for key in "ahn":
        np.testing.assert_array_equal(model.params[key].data, np.zeros_like(arrays[key]))
        assert model.params[key].data is arrays[key]  # overwritten, not replaced
    assert model.params["u"].data is None
    COMMS[name].broadcast_data(model)


@pytest.mark.skipif(SIZE < 2, reason="needs two ranks that differ")
@pytest.mark.parametrize(
    ("other", "message"),
    [
        ({"b": Param(np.zeros(2))}, "bcast_data: .* first at /a: shape \\(2,\\) .* on rank 0, missing on rank 1"),
        ({"a": Param(np.zeros(3))}, "first at /a: shape \\(2,\\) .* on rank 0, shape \\(3,\\) .* on rank 1"),
        ({"a": Param(None)}, "first at /a: shape \\(2,\\) .* on rank 0, not initialised on rank 1"),
    ],
)
def test_models_that_differ_all_raise(other, message):
    model = Model(a=Param(np.zeros(2))) if RANK == 0 else Model(**other)
    with pytest.raises(ValueError, match=message):
        COMM.bcast_data(model)


def test_allreduce_grad_is_the_deprecated_name():
    model = Model(a=Param(np.zeros(3, "f4"), np.full(3, RANK, "f4")))
    with pytest.warns(DeprecationWarning, match="multi_node_mean_grad"):
        COMM.allreduce_grad(model)
    np.testing.assert_allclose(model.params["a"].grad, MEAN)


def test_dummy_leaves_the_gradients_as_they_are():
    comm = create_communicator("dummy")
    model = step(comm, 0, a=np.full(3, RANK, "f4"))
    np.testing.assert_array_equal(model.params["a"].grad, np.full(3, RANK, "f4"))
    comm.finalize()


def test_buffers_live_as_long_as_their_model():
    model = Model(a=Param(np.zeros(3), np.ones(3)))
    COMM.multi_node_mean_grad(model)
    buffer = weakref.ref(model.params["a"].grad.base)
    assert buffer() is not None
    del model
    gc.collect()
    assert buffer() is None
