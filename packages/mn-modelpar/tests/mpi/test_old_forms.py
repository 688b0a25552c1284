"""Calls in forms that only old scripts use: function objects, and the argument ``device`` of ChainerMN 1."""

import chainer
import chainer.functions as F
import numpy as np
import pytest

import mn_modelpar.functions as MF
from mn_comm import create_communicator
from mn_modelpar.functions import function_objects

COMM = create_communicator("naive")
RANK, SIZE = COMM.rank, COMM.size
LAST = SIZE - 1

needs_two = pytest.mark.skipif(SIZE < 2, reason="needs two ranks")


def mine():
    return chainer.Variable(np.full(2, RANK + 1.0))


def gradient_of(call):
    """Return the outputs of a function of this rank's Variable, and the gradient of their weighted sum."""
    x = mine()
    ys = call(x)
    ys = ys if isinstance(ys, tuple) else (ys,)
    sum(F.sum((i + 2) * y) for i, y in enumerate(ys)).backward()
    return [y.array for y in ys], x.grad


@pytest.mark.parametrize(
    ("made", "function"),
    [
        (lambda x: function_objects.AllGather(COMM)(x), lambda x: MF.allgather(COMM, x)),
        (
            lambda x: function_objects.AllToAll(COMM)(*(x * i for i in range(SIZE))),
            lambda x: MF.alltoall(COMM, [x * i for i in range(SIZE)]),
        ),
        (
            lambda x: function_objects.Bcast(COMM, LAST)(*([x] if RANK == LAST else [])),
            lambda x: MF.bcast(COMM, x, LAST),
        ),
        (lambda x: function_objects.Gather(COMM, LAST)(x), lambda x: MF.gather(COMM, x, LAST)),
        (
            lambda x: function_objects.Scatter(COMM, LAST)(*([x * i for i in range(SIZE)] if RANK == LAST else [])),
            lambda x: MF.scatter(COMM, [x * i for i in range(SIZE)], LAST),
        ),
    ],
    ids=["AllGather", "AllToAll", "Bcast", "Gather", "Scatter"],
)
def test_collective_function_objects(made, function):
    (got, grad), (expected, expected_grad) = gradient_of(made), gradient_of(function)
    for a, b in zip(got, expected, strict=True):
        np.testing.assert_array_equal(a, b)
    assert (grad is None) == (expected_grad is None)
    if grad is not None:
        np.testing.assert_array_equal(grad, expected_grad)


@needs_two
@pytest.mark.parametrize("dummy", [True, False])
def test_send_and_recv_as_objects(dummy):
    empty = [chainer.Variable(np.zeros(0, np.float32))] if dummy else []
    if RANK == 0:
        send = function_objects.Send(COMM, peer_rank=1, peer_tag=3)
        assert send.label == "Send (peer_rank: 1)"
        x, y = chainer.Variable(np.ones(2)), chainer.Variable(np.ones(3))
        send(x, *empty).backward()
        np.testing.assert_array_equal(x.grad, [5, 5])
        function_objects.Send(COMM, 1, 4)(x, y, *empty).backward()
        np.testing.assert_array_equal(y.grad, [7, 7, 7])
    elif RANK == 1:
        F.sum(5 * function_objects.Recv(COMM, peer_rank=0, peer_tag=3)()).backward()
        begin = chainer.Variable(np.zeros(1))
        _, second = function_objects.Recv(COMM, 0, 4)(begin)
        F.sum(7 * second).backward()
        np.testing.assert_array_equal(begin.grad, [0])  # it was reached


@pytest.mark.parametrize("device", [-1, None, "@numpy"])
def test_collective_functions_take_a_device(device):
    many = [mine() * i for i in range(SIZE)]
    for outputs in (
        MF.allgather(COMM, mine(), device=device),
        MF.alltoall(COMM, many, device=device),
        (MF.bcast(COMM, mine(), 0, device),),
        (MF.scatter(COMM, many, 0, device),),
        MF.gather(COMM, mine(), LAST, device) if RANK == LAST else (MF.gather(COMM, mine(), LAST, device),),
    ):
        assert all(type(y.array) is np.ndarray for y in outputs)


def test_the_number_of_a_gpu_is_asked_for_from_chainer(monkeypatch):
    asked = []
    numpy = chainer.get_device("@numpy")
    monkeypatch.setattr(chainer, "get_device", lambda name: asked.append(name) or numpy)
    MF.bcast(COMM, mine(), device=3)
    MF.alltoall(COMM, [mine()] * SIZE, 2)
    if SIZE > 1:
        delegate = MF.send(mine(), COMM, (RANK + 1) % SIZE)
        received = MF.recv(COMM, (RANK - 1) % SIZE, delegate, 0, 1)  # the device was at the position of force_tuple
        assert isinstance(received, chainer.Variable)
        F.sum(received).backward()
        assert asked == ["@cupy:3", "@cupy:2", "@cupy:1"]
    else:
        assert asked == ["@cupy:3", "@cupy:2"]
