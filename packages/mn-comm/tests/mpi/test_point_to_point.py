import numpy as np
import pytest
from mpi4py import MPI

from mn_comm import create_communicator

COMM = create_communicator("naive")
RANK, SIZE = COMM.rank, COMM.size

pytestmark = pytest.mark.skipif(SIZE < 2, reason="needs two ranks")


def exchange(data, tag=0):
    """Send from rank 0 to the last rank; return the received data."""
    if RANK == 0:
        COMM.send(data, SIZE - 1, tag)
    elif RANK == SIZE - 1:
        return COMM.recv(0, tag)
    return None


@pytest.mark.parametrize(
    "array",
    [np.arange(6.0).reshape(2, 3), np.array(3), np.zeros((0, 2)), np.float16([1, 2]), np.arange(12).reshape(3, 4).T],
)
def test_an_array(array):
    received = exchange(array)
    if received is not None:
        assert received.dtype == array.dtype
        np.testing.assert_array_equal(received, array)
        assert received.shape == array.shape


@pytest.mark.parametrize("kind", [tuple, list])
def test_several_arrays_of_different_shape_and_dtype(kind):
    received = exchange(kind([np.zeros(3), np.ones((2, 2), "i4")]), tag=7)
    if received is not None:
        assert isinstance(received, tuple)
        np.testing.assert_array_equal(received[0], np.zeros(3))
        np.testing.assert_array_equal(received[1], np.ones((2, 2), "i4"))
        assert received[1].dtype == np.int32


def test_no_arrays_at_all():
    received = exchange(())
    assert received in (None, ())


def test_tags_tell_messages_apart():
    if RANK == 0:
        COMM.send(np.array(1), SIZE - 1, tag=1)
        COMM.send(np.array(2), SIZE - 1, tag=2)
    elif RANK == SIZE - 1:
        assert COMM.recv(0, tag=2) == 2
        assert COMM.recv(0, tag=1) == 1


def test_wildcards():
    if RANK == 0:
        COMM.send((np.array(1), np.array(2)), SIZE - 1, tag=9)
    elif RANK == SIZE - 1:
        assert COMM.recv(MPI.ANY_SOURCE, MPI.ANY_TAG) == (1, 2)


def test_wrong_input_of_the_sender_is_an_error_of_the_receiver_as_well():
    if RANK == 0:
        with pytest.raises(TypeError, match=r"send: expected a numpy.ndarray, got float"):
            COMM.send(1.0, SIZE - 1)
    elif RANK == SIZE - 1:
        with pytest.raises(TypeError, match=r"on rank 0: send: expected a numpy.ndarray, got float"):
            COMM.recv(0)


def test_an_object_that_cannot_be_pickled_is_an_error_of_the_receiver_as_well():
    if RANK == 0:
        with pytest.raises(Exception, match=r"lambda|local object"):
            COMM.send_obj(lambda: None, SIZE - 1)
    elif RANK == SIZE - 1:
        with pytest.raises(Exception, match=r"on rank 0: .*(lambda|local object)"):
            COMM.recv_obj(0)


def test_an_object_received_as_an_array_is_an_error_that_says_so():
    if RANK == 0:
        COMM.mpi_comm.send("an object", SIZE - 1)
    elif RANK == SIZE - 1:
        with pytest.raises(RuntimeError, match=r"expected an array sent by send\(\), got another message of .* rank 0"):
            COMM.recv(0)


def test_an_object_sent_by_other_means_is_an_error_that_says_so():
    if RANK == 0:
        COMM.mpi_comm.Send(np.full(24, 24, np.uint8), SIZE - 1)
    elif RANK == SIZE - 1:
        with pytest.raises(RuntimeError, match=r"recv_obj: expected an object, got another message of \d+ bytes"):
            COMM.recv_obj(0)


def test_objects_with_status_and_tag():
    if RANK == 0:
        COMM.send_obj({"a": np.arange(3)}, SIZE - 1, tag=4)
    elif RANK == SIZE - 1:
        status = MPI.Status()
        received = COMM.recv_obj(0, status)
        np.testing.assert_array_equal(received["a"], np.arange(3))
        assert (status.source, status.tag) == (0, 4)


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda: COMM.send(np.zeros(1), SIZE), ValueError, r"expected dest in 0\.\."),
        (lambda: COMM.send(np.zeros(1), RANK), ValueError, "expected a rank other than this one for dest"),
        (lambda: COMM.recv(RANK), ValueError, "expected a rank other than this one for source"),
        (lambda: COMM.recv(-5), ValueError, r"expected source in 0\.\."),
        (lambda: COMM.recv("0"), TypeError, "expected an integer for source, got str: '0'"),
        (lambda: COMM.send(np.zeros(1), (RANK + 1) % SIZE, tag=-3), ValueError, r"expected tag in 0\.\."),
        (lambda: COMM.send_obj(1, SIZE), ValueError, r"expected dest in 0\.\."),
        (lambda: COMM.recv_obj(SIZE), ValueError, r"expected source in 0\.\."),
    ],
)
def test_peers_and_tags_out_of_range(call, error, message):
    with pytest.raises(error, match=message):
        call()
