"""If a backward pass omits something, a warning names it, and no rank waits; intended omissions cause no warning."""

import warnings

import chainer
import chainer.functions as F
import numpy as np
import pytest

import mn_modelpar.functions as MF
from mn_comm import create_communicator

WORLD = create_communicator("naive")
RANK, SIZE = WORLD.rank, WORLD.size

pytestmark = pytest.mark.skipif(SIZE < 2, reason="needs two ranks")


@pytest.fixture
def two():
    """A new communicator of two ranks for each test, or None on the other ranks."""
    # Our split() would return the same MPI communicator again, with its record of warnings.
    comm = create_communicator("naive", WORLD.mpi_comm.Split(0 if RANK < 2 else 1, RANK))
    return comm if RANK < 2 else None


def there_and_back(comm, x, connected=True):
    """Send and receive on rank 0, the reverse on rank 1. Return the start of the backward pass."""
    if comm.rank == 0:
        delegate = MF.send(x, comm, 1)
        return F.sum(MF.recv(comm, 1, delegate if connected else None))
    return MF.send(2 * MF.recv(comm, 0), comm, 0)


SIZES = pytest.mark.parametrize("size", [3, 1_000_000])  # the second is too large to be sent without being received


@SIZES
def test_no_delegate_variable_on_the_second_recv(two, size):
    if two is None:
        return
    x = chainer.Variable(np.ones(size))
    start = there_and_back(two, x, connected=False)
    if RANK == 0:
        with pytest.warns(
            RuntimeWarning, match=r"backward of send\(rank=1, tag=0\) called at .*test_forgotten.py:\d+ never"
        ) as caught:
            start.backward()
        assert caught[0].filename == __file__  # and the line is that of the call
    else:
        start.backward()  # and does not wait
    # Later passes do not wait either, and do not use a gradient of this pass.
    x.cleargrad()
    there_and_back(two, x).backward()
    if RANK == 0:
        np.testing.assert_array_equal(x.grad, np.full(size, 2))


def test_a_call_is_warned_of_once(two):
    if two is None:
        return
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(3):
            there_and_back(two, chainer.Variable(np.ones(3)), connected=False).backward()
    assert [str(warning.message).count("never ran") for warning in caught] == ([1] if RANK == 0 else [])


@SIZES
def test_a_delegate_variable_that_is_not_returned(two, size):
    if two is None:
        return
    if RANK == 0:
        x = chainer.Variable(np.ones(size))
        # The other rank cannot reach the returned value, and reports this: no rank waits.
        with pytest.warns(
            RuntimeWarning, match=r"gradient of send\(rank=1, tag=0\) .* assumed to be zero: .* of rank 1"
        ):
            there_and_back(two, x).backward()
        np.testing.assert_array_equal(x.grad, np.zeros(size))
    else:

        def model():
            z = 2 * MF.recv(two, 0)
            MF.send(z, two, 0)
            w = chainer.Variable(np.ones(1))
            return F.sum(MF.pseudo_connect(MF.send(w, two, 0, tag=1), w)[0])

        # The gradient of z may come back before the second send.
        with pytest.warns(
            RuntimeWarning, match=r"(backward|gradient) of (recv|send)\(rank=0, tag=0\) called at .*test_forgotten.py"
        ):
            model().backward()
    if RANK == 0:
        F.sum(MF.recv(two, 1, tag=1)).backward()


def test_a_mask_that_the_receiver_uses_as_an_array(two):
    # The old software trains in this case: neither side's backward pass reaches the mask.
    if two is None:
        return
    x, w = (chainer.Variable(np.full(3, 2.0)) for _ in range(2))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(3):
            if RANK == 0:
                MF.send(F.relu(w), two, 1, tag=1)
                MF.send(x, two, 1).backward()
            else:
                mask = MF.recv(two, 0, tag=1).array > 1
                F.sum(F.where(mask, MF.recv(two, 0), np.zeros(3))).backward()
    if RANK == 0:
        np.testing.assert_array_equal(x.grad, [3, 3, 3])
        assert w.grad is None
    (warning,) = caught
    call = "send(rank=1, tag=1)" if RANK == 0 else "recv(rank=0, tag=1)"
    assert f"the backward of {call} called at {__file__}" in str(warning.message)


@pytest.mark.parametrize("mask", [np.arange(3), np.ones(3), np.ones(3) > 0], ids=["integers", "floats", "flags"])
def test_arrays_that_need_no_gradient_are_no_mistake(two, mask):
    if two is None:
        return
    for _ in range(2):
        if RANK == 0:
            MF.send(mask, two, 1, tag=1)
            there_and_back(two, chainer.Variable(np.ones(3))).backward()
        else:
            MF.recv(two, 0, tag=1)
            there_and_back(two, None).backward()


def test_a_gradient_that_comes_back_to_nobody(two):
    if two is None:
        return
    if RANK == 0:
        MF.send(chainer.Variable(np.ones(3)), two, 1)
        two.recv_obj(1, tag=1)
        x = chainer.Variable(np.ones(2))
        with pytest.warns(
            RuntimeWarning, match=r"the gradient of send\(rank=1, tag=0\) called at .* came back from rank 1"
        ):
            delegate = MF.send(x, two, 1)
        delegate.backward()
        np.testing.assert_array_equal(x.grad, [1, 1])
    else:
        F.sum(MF.recv(two, 0)).backward()
        two.send_obj("done", 0, tag=1)
        F.sum(MF.recv(two, 0)).backward()


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
