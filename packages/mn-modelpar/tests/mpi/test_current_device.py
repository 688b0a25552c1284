"""Where arrays from a GPU are put: on the current GPU."""

import types

import chainer
import numpy as np
import pytest

import mn_modelpar.functions as MF
from mn_comm import create_communicator

cupy = pytest.importorskip("cupy")

pytestmark = pytest.mark.gpu

COMM = create_communicator("naive")
RANK, SIZE = COMM.rank, COMM.size

needs_two = pytest.mark.skipif(SIZE < 2, reason="needs two ranks")


@pytest.fixture(autouse=True)
def device(devices):
    """Another current device on each rank, and not the first."""
    before = cupy.cuda.Device()
    chosen = cupy.cuda.Device((1 + RANK) % devices)
    chosen.use()
    yield chosen
    before.use()


def check(received, expected, device):
    assert type(received.array) is cupy.ndarray
    assert received.array.device == device
    np.testing.assert_array_equal(received.array.get(), expected)


@needs_two
@pytest.mark.parametrize("tuples", [False, True])
def test_recv_without_a_delegate(device, tuples):
    with chainer.no_backprop_mode():
        if RANK == 0:
            x = cupy.asarray(np.arange(3.0))
            MF.send((x, x) if tuples else x, COMM, 1)
        elif RANK == 1:
            received = MF.recv(COMM, 0, force_tuple=True)
            assert len(received) == 1 + tuples
            for each in received:
                check(each, np.arange(3.0), device)


@needs_two
def test_recv_with_a_delegate_in_host_memory(device):
    with chainer.no_backprop_mode():
        if RANK == 0:
            MF.send(cupy.asarray(np.arange(3.0)), COMM, 1)
        elif RANK == 1:
            received = MF.recv(COMM, 0, chainer.Variable(np.zeros(0)))
            assert type(received.array) is np.ndarray


def test_bcast_of_nothing(device):
    with chainer.no_backprop_mode():
        received = MF.bcast(COMM, cupy.asarray(np.arange(3.0)) if RANK == 0 else None)
        check(received, np.arange(3.0), device)


def test_scatter_of_nothing(device):
    with chainer.no_backprop_mode():
        parts = [cupy.asarray(np.full(2, float(i))) for i in range(SIZE)] if RANK == 0 else None
        check(MF.scatter(COMM, parts), np.full(2, float(RANK)), device)


@needs_two
def test_the_backward_pass_of_what_came_from_a_gpu(device):
    if RANK == 0:
        x = chainer.Variable(cupy.asarray(np.ones(2)))
        delegate = MF.send(x, COMM, 1)
        delegate.backward()
        check(types.SimpleNamespace(array=x.grad), [5, 5], device)
    elif RANK == 1:
        received = MF.recv(COMM, 0)
        received.grad = cupy.asarray(np.full(2, 5.0))
        received.backward()
