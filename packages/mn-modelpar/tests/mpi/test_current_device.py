"""Where arrays from a GPU are put, with the stand-in for CuPy: on the current GPU."""

import types

import chainer
import numpy as np
import pytest
from chainer.backends import cuda

import mn_modelpar.functions as MF
from mn_comm import create_communicator

COMM = create_communicator("naive")
RANK, SIZE = COMM.rank, COMM.size

needs_two = pytest.mark.skipif(SIZE < 2, reason="needs two ranks")


@pytest.fixture
def cupy(fake_cupy, monkeypatch):
    """The stand-in, which Chainer takes for CuPy, with another current device on each rank."""
    monkeypatch.setattr(cuda, "available", True)
    monkeypatch.setattr(cuda, "check_cuda_available", lambda: None)
    monkeypatch.setattr(cuda, "cupy", fake_cupy)
    monkeypatch.setattr(cuda, "ndarray", fake_cupy.ndarray)
    monkeypatch.setattr(cuda, "Device", fake_cupy.Device)
    monkeypatch.setattr(cuda, "Stream", types.SimpleNamespace(null=fake_cupy.Stream(null=True)))
    monkeypatch.setattr(chainer, "_array_types", (*chainer.get_array_types(), fake_cupy.ndarray))

    def module_of(*arrays):
        return fake_cupy if any(isinstance(array, fake_cupy.ndarray) for array in arrays) else np

    monkeypatch.setattr(fake_cupy, "get_array_module", module_of, raising=False)
    monkeypatch.setattr(fake_cupy.Device, "__eq__", lambda self, other: self.id == other.id)
    fake_cupy.cuda.Device(1 + RANK % 3).use()
    yield fake_cupy
    fake_cupy.cuda.Device(0).use()


def check(received, expected, cupy):
    assert type(received.array) is cupy.ndarray
    assert received.array.device.id == 1 + RANK % 3
    np.testing.assert_array_equal(received.array.get(), expected)


@needs_two
@pytest.mark.parametrize("tuples", [False, True])
def test_recv_without_a_delegate(cupy, tuples):
    with chainer.no_backprop_mode():
        if RANK == 0:
            x = cupy.asarray(np.arange(3.0))
            MF.send((x, x) if tuples else x, COMM, 1)
        elif RANK == 1:
            received = MF.recv(COMM, 0, force_tuple=True)
            assert len(received) == 1 + tuples
            for each in received:
                check(each, np.arange(3.0), cupy)


@needs_two
def test_recv_with_a_delegate_in_host_memory(cupy):
    with chainer.no_backprop_mode():
        if RANK == 0:
            MF.send(cupy.asarray(np.arange(3.0)), COMM, 1)
        elif RANK == 1:
            received = MF.recv(COMM, 0, chainer.Variable(np.zeros(0)))
            assert type(received.array) is np.ndarray


def test_bcast_of_nothing(cupy):
    with chainer.no_backprop_mode():
        received = MF.bcast(COMM, cupy.asarray(np.arange(3.0)) if RANK == 0 else None)
        check(received, np.arange(3.0), cupy)


def test_scatter_of_nothing(cupy):
    with chainer.no_backprop_mode():
        parts = [cupy.asarray(np.full(2, float(i))) for i in range(SIZE)] if RANK == 0 else None
        check(MF.scatter(COMM, parts), np.full(2, float(RANK)), cupy)


@needs_two
def test_the_backward_pass_of_what_came_from_a_gpu(cupy):
    if RANK == 0:
        x = chainer.Variable(cupy.asarray(np.ones(2)))
        delegate = MF.send(x, COMM, 1)
        delegate.backward()
        check(types.SimpleNamespace(array=x.grad), [5, 5], cupy)
    elif RANK == 1:
        received = MF.recv(COMM, 0)
        received.grad = cupy.asarray(np.full(2, 5.0))
        received.backward()
