"""Memory shared within a node, and what happens if it is not available."""

import os
import pathlib
import resource
import sys
import warnings

import numpy as np
import pytest
from mpi4py import MPI

from mn_comm import create_communicator
from mn_comm.ranks.intracomm import Ranks
from mn_comm.ranks.shared_memory import share

WORLD = MPI.COMM_WORLD
RANK, SIZE = WORLD.rank, WORLD.size
RANKS = Ranks(WORLD)


class Param:
    def __init__(self, grad):
        self.data = grad
        self.grad = grad


class Model:
    def __init__(self, *grads):
        self.params = [(f"/{i}", Param(grad)) for i, grad in enumerate(grads)]

    def namedparams(self):
        return iter(self.params)


def test_every_rank_sees_what_the_others_write():
    segments = share(RANKS, 8 * SIZE)
    assert [each.nbytes for each in segments] == [8 * SIZE] * SIZE
    for segment in segments:
        segment.view("i8")[RANK] = RANK + 1
    WORLD.Barrier()
    for segment in segments:
        np.testing.assert_array_equal(segment.view("i8"), np.arange(SIZE) + 1)


def test_no_file_is_left_open():
    before = len(os.listdir("/proc/self/fd"))
    segments = share(RANKS, 4096)
    # Before Python 3.13, a mapping keeps its own file descriptor open; there is one for all ranks.
    assert len(os.listdir("/proc/self/fd")) - before == (0 if sys.version_info >= (3, 13) else 1)
    del segments
    assert len(os.listdir("/proc/self/fd")) == before


def test_nothing_has_a_name():
    segments = share(RANKS, 4096)
    maps = pathlib.Path("/proc/self/maps").read_text().splitlines()
    mapped = [line for line in maps if "mn_comm" in line]
    assert mapped
    # The kernel's name for an anonymous file; a file in /dev/shm would appear with its path.
    assert all(line.endswith("/memfd:mn_comm (deleted)") for line in mapped)
    del segments


def test_an_error_on_one_rank_is_one_on_all(monkeypatch):
    def fail(name, flags):
        raise OSError("no more memory")

    if RANK == 0:
        monkeypatch.setattr(os, "memfd_create", fail)
    with pytest.raises(OSError, match="no more memory"):
        share(RANKS, 4096)


def test_a_neighbour_that_cannot_be_seen(monkeypatch):
    monkeypatch.setattr(os, "getpid", lambda: 2**22 + 1)  # above the maximum
    with pytest.raises(OSError, match="No such file"):
        share(RANKS, 4096)


def test_another_process_of_the_same_number(monkeypatch):
    real = os.pread
    monkeypatch.setattr(os, "pread", lambda fd, n, offset: real(fd, n, offset)[::-1])
    with pytest.raises(OSError, match="is not the expected neighbor"):
        share(RANKS, 4096)


def refuse_to_open(path, *args, real=os.open, **kwargs):
    if str(path).startswith("/proc/"):
        raise PermissionError(13, "Permission denied", str(path))
    return real(path, *args, **kwargs)


@pytest.mark.parametrize("name", ["hierarchical", "two_dimensional", "single_node"])
def test_one_rank_that_may_not_see_its_neighbors_memory_means_one_warning_and_messages_for_all(name, monkeypatch):
    """It runs as another user, or in a separate container, or /proc is hardened."""
    comm = create_communicator(name, WORLD.Dup())
    if RANK == SIZE - 1:
        monkeypatch.setattr(os, "open", refuse_to_open)
    model = Model(np.full(1000, RANK, "f4"), np.full(7, RANK, "f8"))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(2):
            comm.multi_node_mean_grad(model)
    messages = [str(each.message) for each in caught if "by messages, not in shared memory" in str(each.message)]
    assert len(messages) == (RANK == 0 and SIZE > 1)
    assert all("Permission denied" in message for message in messages)
    for _, param in model.params:
        np.testing.assert_array_equal(param.grad, np.full_like(param.grad, (SIZE - 1) / 2))


@pytest.mark.skipif(SIZE < 2, reason="memory is not shared")
def test_where_warnings_are_errors_all_ranks_raise(monkeypatch):
    comm = create_communicator("hierarchical", WORLD.Dup())
    monkeypatch.setattr(os, "open", refuse_to_open)
    with pytest.raises((UserWarning, RuntimeError), match="by messages, not in shared memory"):
        comm.multi_node_mean_grad(Model(np.zeros(7, "f4")))


@pytest.mark.parametrize("name", ["hierarchical", "two_dimensional", "single_node"])
def test_too_little_memory_means_one_warning_and_messages(name):
    comm = create_communicator(name, WORLD.Dup())
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, hard))  # memory files count
    try:
        model = Model(np.full(1 << 20, RANK, "f4"), np.full(7, RANK, "f8"))
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            comm.multi_node_mean_grad(model)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    messages = [str(each.message) for each in caught if "by messages, not in shared memory" in str(each.message)]
    assert len(messages) == (RANK == 0 and SIZE > 1)
    for _, param in model.params:
        np.testing.assert_array_equal(param.grad, np.full_like(param.grad, (SIZE - 1) / 2))
    comm.finalize()


@pytest.mark.parametrize("wire", ["float16", "float32", "float64", "bfloat16"])
@pytest.mark.parametrize("name", ["naive", "flat", "hierarchical", "two_dimensional", "single_node"])
def test_gradients_travel_in_another_dtype_and_keep_theirs(name, wire):
    if wire == "bfloat16":
        pytest.importorskip("ml_dtypes")
    comm = create_communicator(name, allreduce_grad_dtype=wire)
    assert comm.split(0, RANK).get_config("allreduce_grad_dtype") == comm.get_config("allreduce_grad_dtype")
    grads = [np.random.RandomState(rank).uniform(-1, 1, 1000) for rank in range(SIZE)]
    expected = np.mean(grads, axis=0)
    model = Model(grads[RANK].astype("f4"), grads[RANK].astype("f2"), grads[RANK])
    comm.multi_node_mean_grad(model)
    eps = {"float16": 1e-3, "bfloat16": 8e-3}.get(wire, 1e-6)
    for (_, param), dtype in zip(model.params, ["f4", "f2", "f8"], strict=True):
        assert param.grad.dtype == dtype
        np.testing.assert_allclose(param.grad, expected, atol=max(eps, 1e-3 if dtype == "f2" else 0) * 2)
        for other in WORLD.allgather(param.grad.tobytes()):
            assert other == param.grad.tobytes()
    comm.finalize()


@pytest.mark.parametrize("name", ["naive", "flat", "hierarchical", "two_dimensional"])
def test_a_mean_of_halves_fits_where_their_sum_does_not(name):
    comm = create_communicator(name)
    model = Model(np.full(5, 60000, "f2"))
    comm.multi_node_mean_grad(model)
    np.testing.assert_array_equal(model.params[0][1].grad, np.full(5, 60000, "f2"))
    comm.finalize()


def test_gradients_of_integers_raise_on_every_rank():
    comm = create_communicator("flat")
    with pytest.raises(TypeError, match="expected gradients of floats, got dtype int64 for /0"):
        comm.multi_node_mean_grad(Model(np.arange(3)))
    comm.finalize()
