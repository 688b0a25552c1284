"""A signal handler may raise while messages are under way: MPI goes on using their memory, which must not be freed."""

import gc
import time
import weakref

import numpy as np
import pytest
from mpi4py import MPI

from mn_comm.collectives import Transport, pieces
from mn_comm.collectives.transport import TAG
from mn_comm.ranks.intracomm import Ranks

pytestmark = pytest.mark.sizes(1)

LONG = 1_000_000  # too long to be sent before somebody receives it


@pytest.fixture
def ranks():
    ranks = Ranks(MPI.COMM_SELF.Dup())
    yield ranks
    ranks.Free()


def interrupted(*_):
    raise TimeoutError  # by a signal handler


def swap(ranks, outgoing, incoming):
    Transport(ranks).swap(outgoing, incoming, "swap")


def stop_before_the_last_message(ranks, outgoing, incoming):
    for request in pieces.start(ranks, {**outgoing, 1: [None]}, incoming, TAG):
        ranks.wait(request, "never")


@pytest.fixture(params=[swap, stop_before_the_last_message])
def stop(request, monkeypatch, ranks):
    def stop(outgoing, incoming):
        with monkeypatch.context() as changed, pytest.raises((TimeoutError, AttributeError)):
            changed.setattr(time, "sleep", interrupted)
            request.param(ranks, outgoing, incoming)
        gc.collect()

    return stop


def test_memory_for_a_message_that_arrives_later(ranks, stop):
    room = np.zeros(LONG)
    found = weakref.ref(room)
    stop({}, {0: [room]})
    del room
    assert found() is not None
    ranks.Send(np.ones(LONG), 0, TAG)
    np.testing.assert_array_equal(found(), np.ones(LONG))


def test_memory_for_a_message_that_is_received_later(ranks, stop):
    message = np.ones(LONG)
    found = weakref.ref(message)
    stop({0: [message]}, {})
    del message
    assert found() is not None
    room = np.zeros(LONG)
    ranks.Recv(room, 0, TAG)
    np.testing.assert_array_equal(room, np.ones(LONG))


def test_memory_of_a_reduction(ranks):
    numbers = np.zeros(3)
    found = weakref.ref(numbers)
    request = ranks.Iallreduce(MPI.IN_PLACE, numbers, op=MPI.MAX)
    del numbers
    assert found() is not None
    del request
    assert found() is not None


def test_memory_of_messages_that_are_done_is_freed(ranks):
    message, room = np.ones(LONG), np.zeros(LONG)
    requests = pieces.start(ranks, {0: [message]}, {0: [room]}, TAG)
    ranks.wait_all(requests)
    found = [weakref.ref(array) for array in (message, room)]
    del message, room, requests
    assert [each() for each in found] == [None, None]
