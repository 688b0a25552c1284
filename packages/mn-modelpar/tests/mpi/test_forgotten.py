"""What a backward pass leaves out is an error that names it; what is left out on purpose is none."""

import chainer
import chainer.functions as F
import numpy as np
import pytest

import mn_modelpar.functions as MF
from mn_comm import create_communicator
from mn_modelpar.traffic import gradient_tag

WORLD = create_communicator("naive")
RANK, SIZE = WORLD.rank, WORLD.size

pytestmark = pytest.mark.skipif(SIZE < 2, reason="needs two ranks")


@pytest.fixture
def two():
    """A communicator of its own for each test, of two ranks, or None on the others."""
    comm = WORLD.split(0 if RANK < 2 else 1, RANK)
    yield comm if RANK < 2 else None
    comm.finalize()


def there_and_back(comm, x, connected=True):
    """On rank 0 send and receive; on rank 1 the reverse. Return what the backward pass starts from."""
    if comm.rank == 0:
        delegate = MF.send(x, comm, 1)
        return F.sum(MF.recv(comm, 1, delegate if connected else None))
    return MF.send(2 * MF.recv(comm, 0), comm, 0)


def take_what_nobody_wants(comm):
    """On rank 0 take the gradient that came back: no communicator may be freed while messages are on their way."""
    comm.recv(1, gradient_tag(0))


def test_no_delegate_variable_on_the_second_recv(two):
    if two is None:
        return
    x = chainer.Variable(np.ones(3))
    start = there_and_back(two, x, connected=False)
    if RANK == 0:
        with pytest.raises(
            RuntimeError, match=r"backward of send\(rank=1, tag=0\) called at .*test_forgotten.py:\d+ never"
        ):
            start.backward()
        take_what_nobody_wants(two)
    else:
        start.backward()


def test_a_delegate_variable_that_is_not_returned(two):
    if two is None:
        return
    if RANK == 0:
        start = there_and_back(two, chainer.Variable(np.ones(3)))
        # The other rank raises at once, and the gradient of what it sent never goes back.
        assert start.array == 6
        take_what_nobody_wants(two)
    else:

        def model():
            z = 2 * MF.recv(two, 0)
            MF.send(z, two, 0)
            return F.sum(z)

        with pytest.raises(RuntimeError, match=r"backward of send\(rank=0, tag=0\) called at .*test_forgotten.py"):
            model().backward()


def test_a_gradient_that_comes_back_to_nobody(two):
    if two is None:
        return
    if RANK == 0:
        MF.send(chainer.Variable(np.ones(3)), two, 1)
        two.recv_obj(1, tag=1)
        with pytest.raises(
            RuntimeError, match=r"the gradient of send\(rank=1, tag=0\) called at .* came back from rank 1"
        ):
            MF.send(chainer.Variable(np.ones(3)), two, 1)
    else:
        F.sum(MF.recv(two, 0)).backward()
        two.send_obj("done", 0, tag=1)


@pytest.mark.parametrize("how", ["no_backprop", "test", "dropped"])
def test_forward_passes_without_a_backward(two, how):
    if two is None:
        return
    x = chainer.Variable(np.ones(3))
    for _ in range(3):
        if how == "no_backprop":
            with chainer.no_backprop_mode():
                there_and_back(two, x)
        elif how == "test":
            with chainer.using_config("train", False):
                there_and_back(two, x)
        else:
            there_and_back(two, x)
    there_and_back(two, x).backward()
    if RANK == 0:
        np.testing.assert_array_equal(x.grad, [2, 2, 2])


def test_several_backward_passes_one_after_the_other(two):
    if two is None:
        return
    for _ in range(2):
        if RANK == 0:
            xs = [chainer.Variable(np.ones(2)) for _ in range(2)]
            delegates = [MF.send(xs[0], two, 1), MF.send(xs[1], two, 1, tag=1)]
            for delegate in delegates:
                delegate.backward()
            np.testing.assert_array_equal(xs[1].grad, [3, 3])
        else:
            first, second = MF.recv(two, 0), MF.recv(two, 0, tag=1)
            F.sum(first).backward()
            F.sum(3 * second).backward()


def test_memory_of_calls_that_are_never_back_propagated_is_bounded(two):
    if two is None:
        return
    from mn_modelpar.traffic import traffic_of

    for _ in range(20):
        there_and_back(two, np.ones(1))
    assert len(traffic_of(two).pending()) <= 4
