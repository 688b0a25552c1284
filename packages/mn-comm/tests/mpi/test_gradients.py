"""Averages of gradients: every strategy against the plain mean, computed without MPI, and in place."""

import numpy as np
import pytest
from fake_model import Model, Param
from mpi4py import MPI

from mn_comm import create_communicator
from mn_comm.building_blocks import STRATEGIES, check_in_debug_mode
from mn_comm.gradients import layout, targets

pytestmark = pytest.mark.sizes(1, 3)

WORLD = MPI.COMM_WORLD
RANK, SIZE = WORLD.rank, WORLD.size
NAMES = [name for name, kind in STRATEGIES.items() if kind.on_host and kind.communicates]
COMMS = {name: create_communicator(name) for name in NAMES}
COMM = COMMS["naive"]
several = pytest.mark.skipif(SIZE < 2, reason="needs two ranks that differ")


def gradient(seed, shape=(6, 10), dtype="f4", rank=RANK):
    return np.asarray(np.random.RandomState(seed * 100 + rank).uniform(-1, 1, shape), dtype)


def mean(seed, shape=(6, 10), dtype="f4"):
    return np.mean([gradient(seed, shape, dtype, rank).astype("f8") for rank in range(SIZE)], axis=0)


def check(actual, expected, dtype=None):
    dtypes = [actual.dtype, dtype or actual.dtype]
    eps = max(np.finfo(each).eps for each in dtypes)
    np.testing.assert_allclose(actual, expected, rtol=2 * eps, atol=4 * eps)
    for other in WORLD.allgather(actual.tobytes()):  # bit for bit the same on every rank
        assert other == actual.tobytes()


def model_of(*grads):
    return Model(**{f"p{i:02}": Param(np.zeros(() if g is None else g.shape), g) for i, g in enumerate(grads)})


def grads_of(model):
    return [param.grad for param in model.params.values()]


SHAPES = [(6, 10), (3,), (), (0,), (2, 0), (1,), (130,), (4, 5, 2), (7,)]


@pytest.mark.parametrize("dtype", ["f2", "f4", "f8", ">f4"])
@pytest.mark.parametrize("name", NAMES)
def test_the_mean_is_in_the_arrays_that_were_the_gradients(name, dtype, many_blocks):
    model = model_of(*[gradient(i, shape, dtype) for i, shape in enumerate(SHAPES)])
    arrays = grads_of(model)
    for step in range(3):
        for i, array in enumerate(arrays):
            array[...] = gradient(i + step, array.shape, dtype)
        COMMS[name].multi_node_mean_grad(model)
        for i, (param, array) in enumerate(zip(model.params.values(), arrays, strict=True)):
            assert param.grad is array
            check(array, mean(i + step, array.shape, dtype))


@pytest.mark.parametrize("in_turns", [True, False])
@pytest.mark.parametrize("count", [2, 3])
@pytest.mark.parametrize("name", ["hierarchical", "two_dimensional", "non_cuda_aware", "flat"])
def test_several_nodes_of_different_sizes(name, count, in_turns, on_nodes, many_blocks):
    if count > SIZE:
        pytest.skip("fewer ranks than nodes")
    comm = on_nodes(name, count, in_turns=in_turns)
    assert comm.inter_size == count
    for dtype in ("f4", "f8", "f2"):
        model = model_of(*[gradient(i, shape, dtype) for i, shape in enumerate(SHAPES)])
        arrays = grads_of(model)
        comm.multi_node_mean_grad(model)
        for i, (param, array) in enumerate(zip(model.params.values(), arrays, strict=True)):
            assert param.grad is array
            check(array, mean(i, array.shape, dtype))


def test_one_node_only(on_nodes):
    if SIZE < 2:
        pytest.skip("needs two nodes")
    with pytest.raises(ValueError, match="single_node: expected all ranks on one node, got 2 nodes"):
        on_nodes("single_node", 2)


@pytest.mark.parametrize("name", NAMES)
def test_arrays_that_cannot_hold_the_mean_are_replaced(name, many_blocks):
    read_only = gradient(1)
    read_only.flags.writeable = False
    of_one_number = np.broadcast_to(np.float32(RANK), (6, 10))
    fortran, backwards = np.asfortranarray(gradient(0)), gradient(3)[::-1]
    model = model_of(fortran, read_only, of_one_number, backwards)
    COMMS[name].multi_node_mean_grad(model)
    found = grads_of(model)
    assert found[0] is fortran
    assert found[3] is backwards
    check(found[0], mean(0))
    check(found[1], mean(1))
    check(found[2], np.full((6, 10), (SIZE - 1) / 2))
    check(found[3], mean(3)[::-1])
    np.testing.assert_array_equal(read_only, gradient(1))


@pytest.mark.parametrize("name", NAMES)
def test_parameters_that_share_an_array_on_one_rank_only(name, many_blocks):
    first = gradient(0)
    model = model_of(first, first if RANK == 0 else gradient(1))
    COMMS[name].multi_node_mean_grad(model)
    check(grads_of(model)[0], mean(0))
    check(grads_of(model)[1], np.mean([gradient(0 if rank == 0 else 1, rank=rank) for rank in range(SIZE)], axis=0))


@pytest.mark.parametrize("name", NAMES)
def test_a_small_gradient_that_is_a_view_of_a_large_one_on_one_rank_only(name):
    """As after ``F.concat([b, zeros])`` was added to a large W: they were in different kinds of buckets."""
    large = np.full(300_000, 1.0 + RANK, "f4")
    small = large[:3] if RANK == 0 else np.full(3, 1.0 + RANK, "f4") + 100
    model = model_of(small, large)
    COMMS[name].multi_node_mean_grad(model)
    expected = np.mean([1.0 if rank == 0 else 101.0 + rank for rank in range(SIZE)])
    check(grads_of(model)[0], np.full(3, expected))
    check(grads_of(model)[1], np.full(300_000, 1 + (SIZE - 1) / 2))


@pytest.mark.parametrize("name", NAMES)
def test_views_that_overlap(name, many_blocks):
    def base(rank):
        return np.random.RandomState(rank).uniform(-1, 1, (9, 10)).astype("f4")

    mine = base(RANK)
    model = model_of(mine[3:], mine[:6], mine[1:7])
    COMMS[name].multi_node_mean_grad(model)
    expected = np.mean([base(rank) for rank in range(SIZE)], axis=0)
    for actual, part in zip(grads_of(model), (expected[3:], expected[:6], expected[1:7]), strict=True):
        check(actual, part)


@pytest.mark.parametrize("name", NAMES)
def test_gradients_that_change_places_between_two_averages(name):
    model = model_of(np.full(3, 1.0 + RANK), np.full(3, 10.0 + RANK))
    a, b = model.params.values()
    COMMS[name].multi_node_mean_grad(model)
    a.grad, b.grad = b.grad, a.grad
    COMMS[name].multi_node_mean_grad(model)
    check(a.grad, np.full(3, 10 + (SIZE - 1) / 2))
    check(b.grad, np.full(3, 1 + (SIZE - 1) / 2))


@pytest.mark.parametrize("name", NAMES)
def test_any_number_of_sets_of_gradients(name):
    """More than are kept, in turns, with different gradients missing in each."""
    params = [Param(np.zeros(3, "f4")) for _ in range(10)]
    model = Model(**{f"p{i}": param for i, param in enumerate(params)})
    for step in range(30):
        for i, param in enumerate(params):
            param.grad = None if i == step % 10 else np.full(3, RANK + step + i, "f4")
        COMMS[name].multi_node_mean_grad(model)
        for i, param in enumerate(params):
            if i == step % 10:
                assert param.grad is None
            else:
                check(param.grad, np.full(3, (SIZE - 1) / 2 + step + i))


@pytest.mark.parametrize("name", NAMES)
def test_buckets_are_kept_for_sets_of_gradients_that_take_turns(name, monkeypatch):
    """Like those of a generator and of a discriminator."""
    made = []
    monkeypatch.setattr(layout.Layout, "_make_buckets", _noting(made, layout.Layout._make_buckets))
    params = [Param(np.zeros(3, "f4")) for _ in range(4)]
    model = Model(**{f"p{i}": param for i, param in enumerate(params)})
    comm = create_communicator(name)
    for step in range(20):
        for i, param in enumerate(params):
            param.grad = np.full(3, RANK, "f4") if i % 2 == step % 2 else None
        comm.multi_node_mean_grad(model)
        np.testing.assert_array_equal(params[step % 2].grad, MEAN)
        if step == 1:
            assert len(made) == 2
    assert len(made) <= 4  # twice as many if ranks come to meet less often


def _noting(calls, function):
    def call(*args):
        calls.append(args)
        return function(*args)

    return call


@several
@pytest.mark.parametrize("name", NAMES)
def test_a_setting_that_differs_between_ranks_raises_on_all(name):
    comm = create_communicator(name)
    if RANK == SIZE - 1:
        comm.set_config("allreduce_grad_dtype", "float16")
    model = model_of(gradient(0))
    message = f"the same allreduce_grad_dtype on every rank, got None on rank 0 and float16 on rank {SIZE - 1}"
    for _ in range(2):
        with pytest.raises(ValueError, match=message):
            comm.multi_node_mean_grad(model)
    comm.set_config("allreduce_grad_dtype", "float16")
    comm.multi_node_mean_grad(model)
    check(grads_of(model)[0], mean(0), "f2")


@several
def test_a_gradient_that_cannot_be_asked_for_on_one_rank_raises_on_all():
    class Failing(Param):
        grad = property(lambda self: 1 / 0, lambda self, value: None)

    kind = Failing if RANK == SIZE - 1 else Param
    model = Model(a=kind(np.zeros(3), np.ones(3)))
    expected = ZeroDivisionError
    with pytest.raises(expected, match="division by zero"):
        COMM.multi_node_mean_grad(model)
    COMM.multi_node_mean_grad(model_of(gradient(0)))


def test_values_that_are_not_finite_raise_in_debug_mode(monkeypatch):
    monkeypatch.setattr(targets, "_is_debug", bool)
    model = model_of(np.ones(3), np.array([1.0, np.nan if RANK == SIZE - 1 else 2.0]))
    COMM.multi_node_mean_grad(model)
    check_in_debug_mode(lambda: True)
    with pytest.raises(ValueError, match="expected finite gradients in debug mode, got NaN or infinity for /p01"):
        COMM.multi_node_mean_grad(model)
    model = model_of(np.ones(3), np.array([1.0, np.nan if RANK == SIZE - 1 else 2.0]))
    with pytest.raises(ValueError, match=r".* diverged .*"):  # the tests of ChainerMN 7 expect this word
        COMM.multi_node_mean_grad(model)


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


@several
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
    # The same model, which is now the same on every rank.
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


def test_a_parameter_that_must_not_be_written_to_on_one_rank_raises_on_all():
    data = np.full(3, RANK, "f4")
    data.flags.writeable = RANK != SIZE - 1
    with pytest.raises(ValueError, match="expected arrays that can be written to, got a read-only one for /b"):
        COMM.bcast_data(Model(a=Param(np.zeros(2)), b=Param(data)))
    np.testing.assert_array_equal(data, np.full(3, RANK, "f4"))


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


@pytest.mark.parametrize("name", NAMES)
def test_one_rank_goes_on_with_another_model_of_the_same_kind(name):
    """So it has to create buckets that the other ranks have created before."""
    comm = create_communicator(name)
    models = [model_of(gradient(0), gradient(1)) for _ in range(2)]
    for step in range(6):
        model = models[step % 2 if RANK == SIZE - 1 else 0]
        for i, param in enumerate(model.params.values()):
            param.grad = gradient(step + i)
        comm.multi_node_mean_grad(model)
        for i, param in enumerate(model.params.values()):
            check(param.grad, mean(step + i), "f4")


@pytest.mark.parametrize("base", [type("Unhashable", (Model,), {"__hash__": None}), None])
def test_models_that_cannot_be_keys(base):
    class Slots:
        __slots__ = ("params",)
        namedparams = Model.namedparams

    for step in range(2):
        model = (base or Slots)()
        model.params = model_of(gradient(step)).params
        COMM.multi_node_mean_grad(model)
        check(model.params["p00"].grad, mean(step), "f4")


@pytest.mark.parametrize("name", NAMES)
def test_numpy_that_raises_at_overflows_leaves_no_rank_waiting(name):
    comm = create_communicator(name, allreduce_grad_dtype="float16")
    grad = np.array([1e30 if RANK == 0 else 1, RANK], "f4")
    model = model_of(grad)
    with np.errstate(all="raise"):
        comm.multi_node_mean_grad(model)
    np.testing.assert_array_equal(grad, [np.inf, (SIZE - 1) / 2])
