"""Large gradients, which are averaged where they lie: any layout, shared arrays, and pieces of every number."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from mpi4py import MPI

from mn_comm import create_communicator
from mn_comm.gradients import in_place
from mn_comm.intra import SharedStage, Streamed, memfd, streamed

WORLD = MPI.COMM_WORLD
RANK, SIZE = WORLD.rank, WORLD.size
PIECE_BYTES = 64


class Param:
    def __init__(self, grad):
        self.data = np.zeros((6, 10), "f4")
        self.grad = grad


class Model:
    def __init__(self, *grads):
        self.params = [Param(grad) for grad in grads]

    def namedparams(self):
        return iter([(f"/{i}", param) for i, param in enumerate(self.params)])


@pytest.fixture(autouse=True)
def large(monkeypatch):
    """Let every gradient count as large, and be cut into many pieces, also where there are fewer cores than ranks."""
    monkeypatch.setattr(in_place, "_LEAST_BYTES", 1)
    monkeypatch.setattr(streamed, "_PIECE_BYTES", PIECE_BYTES)
    monkeypatch.setattr(SharedStage, "_cores", lambda stage: stage._mpi_comm.allreduce(1))


@pytest.fixture
def comm():
    comm = create_communicator("hierarchical")
    yield comm
    comm.finalize()


def gradient(seed, rank=RANK, dtype="f4"):
    return np.random.RandomState(seed * 100 + rank).uniform(-1, 1, (6, 10)).astype(dtype)


def mean(seed, dtype="f4"):
    return np.mean([gradient(seed, rank, dtype).astype("f8") for rank in range(SIZE)], axis=0)


def check(param, expected):
    np.testing.assert_allclose(param.grad, expected, rtol=0, atol=2 * np.finfo(param.grad.dtype).eps)
    for other in WORLD.allgather(param.grad.tobytes()):
        assert other == param.grad.tobytes()


@pytest.mark.parametrize("dtype", ["f4", "f8"])
def test_the_array_stays_the_gradient(comm, dtype):
    model = Model(*[gradient(i, dtype=dtype) for i in range(5)])
    arrays = [param.grad for param in model.params]
    comm.multi_node_mean_grad(model)
    for i, (param, array) in enumerate(zip(model.params, arrays, strict=True)):
        assert param.grad is array
        check(param, mean(i, dtype))


def test_again_and_again(comm):
    model = Model(None, None, None)
    for step in range(20):
        for i, param in enumerate(model.params):
            param.grad = gradient(step + i)
        comm.multi_node_mean_grad(model)
        for i, param in enumerate(model.params):
            check(param, mean(step + i))


def test_arrays_that_cannot_be_written_to_in_place(comm):
    read_only = gradient(1)
    read_only.flags.writeable = False
    of_one_number = np.broadcast_to(np.float32(RANK), (6, 10))
    model = Model(np.asfortranarray(gradient(0)), read_only, of_one_number, gradient(3)[::-1])
    comm.multi_node_mean_grad(model)
    check(model.params[0], mean(0))
    check(model.params[1], mean(1))
    check(model.params[2], np.full((6, 10), (SIZE - 1) / 2))
    check(model.params[3], mean(3)[::-1])
    np.testing.assert_array_equal(read_only, gradient(1))


def test_parameters_that_share_an_array_on_one_rank_only(comm):
    first = gradient(0)
    model = Model(first, first if RANK == 0 else gradient(1))
    comm.multi_node_mean_grad(model)
    check(model.params[0], mean(0))
    check(model.params[1], np.mean([gradient(0 if rank == 0 else 1, rank) for rank in range(SIZE)], axis=0))


def test_views_that_overlap(comm):
    def base(rank):
        return np.random.RandomState(rank).uniform(-1, 1, (9, 10)).astype("f4")

    mine = base(RANK)
    model = Model(mine[3:], mine[:6], mine[1:7])
    comm.multi_node_mean_grad(model)
    expected = np.mean([base(rank) for rank in range(SIZE)], axis=0)
    for param, part in zip(model.params, (expected[3:], expected[:6], expected[1:7]), strict=True):
        check(param, part)


def test_missing_gradients_count_as_zeros(comm):
    model = Model(gradient(0) if RANK == 0 else None, None)
    comm.multi_node_mean_grad(model, zero_fill=True)
    check(model.params[0], gradient(0, 0) / SIZE)
    check(model.params[1], np.zeros((6, 10)))


def test_with_small_ones_halves_and_another_dtype_on_the_wire(comm, monkeypatch):
    monkeypatch.setattr(in_place, "_LEAST_BYTES", 6 * 10 * 4)
    small = np.full(3, RANK, "f4")
    model = Model(gradient(0), small, gradient(2).astype("f2"), gradient(3, dtype="f8"))
    comm.multi_node_mean_grad(model)
    check(model.params[0], mean(0))
    check(model.params[1], np.full(3, (SIZE - 1) / 2))
    check(model.params[2], np.mean([gradient(2, rank).astype("f2").astype("f4") for rank in range(SIZE)], axis=0))
    check(model.params[3], mean(3, "f8"))
    comm.set_config("allreduce_grad_dtype", np.float16)
    model = Model(gradient(0))
    array = model.params[0].grad
    comm.multi_node_mean_grad(model)
    np.testing.assert_allclose(model.params[0].grad, mean(0), atol=2e-3)
    assert model.params[0].grad is not array  # packed


@given(st.lists(st.integers(0, 100), max_size=6), st.integers(1, 3))
def test_any_lengths(lengths, repetitions):
    averaged = Streamed(WORLD, lengths, np.dtype("f8"), lambda nbytes: memfd.share(WORLD, nbytes))
    for step in range(repetitions):
        averaged.arrays = [np.arange(n, dtype="f8") * (RANK + 1) + step for n in lengths]
        averaged.average()
        for n, array in zip(lengths, averaged.arrays, strict=True):
            np.testing.assert_allclose(array, np.arange(n) * (SIZE + 1) / 2 + step, rtol=1e-14)


def test_more_ranks_than_cores_pack(comm, monkeypatch):
    monkeypatch.setattr(SharedStage, "_cores", lambda stage: SIZE - 1)
    model = Model(gradient(0))
    array = model.params[0].grad
    comm.multi_node_mean_grad(model)
    check(model.params[0], mean(0))
    assert model.params[0].grad is not array
