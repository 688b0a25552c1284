"""What a signal handler of the script raises during a message leaves those that follow intact."""

import chainer
import chainer.functions as F
import numpy as np
import pytest
from mpi4py import MPI

import mn_modelpar.functions as MF
from mn_comm import create_communicator
from mn_comm.ranks.watch import Activity
from mn_modelpar import replies

WORLD = create_communicator("naive")
RANK, SIZE = WORLD.rank, WORLD.size
LARGE = 1_000_000  # too large to be sent without being received

pytestmark = pytest.mark.skipif(SIZE % 2, reason="needs pairs of ranks")


class Interrupted(Exception):
    """What the handler raises."""


@pytest.fixture
def comm():
    """A new communicator of each pair of ranks, for each test."""
    return create_communicator("naive", WORLD.mpi_comm.Split(RANK // 2, RANK))


@pytest.fixture
def interrupt(monkeypatch):
    """Let a handler raise when the next wait in an MPI operation of some name ends, where Python would call it."""
    wait_for = Activity.wait_for

    def start(operation):
        def wait_and_raise(self, call, what, *others):
            result = wait_for(self, call, what, *others)
            if what == operation:
                monkeypatch.undo()
                raise Interrupted
            return result

        monkeypatch.setattr(Activity, "wait_for", wait_and_raise)

    return start


def send_and_receive(comm, factor, size=3):
    """Train one step on rank 0, with a loss on rank 1 that is multiplied by a factor; check the gradient."""
    if comm.rank == 0:
        x = chainer.Variable(np.ones(size))
        MF.send(x, comm, 1).backward()
        np.testing.assert_array_equal(x.grad, np.full(size, factor))
    else:
        F.sum(factor * MF.recv(comm, 0)).backward()


def test_a_sender_that_has_sent_a_value(comm, interrupt):
    # The receiver knows nothing of it, and sends a gradient, which is not that of the next value.
    if comm.rank == 0:
        interrupt("Waitall")
        with pytest.raises(Interrupted):
            MF.send(chainer.Variable(np.ones(3)), comm, 1)
    elif comm.rank == 1:
        F.sum(5 * MF.recv(comm, 0)).backward()
    for factor in (2, 3):
        send_and_receive(comm, factor)


@pytest.mark.filterwarnings("ignore:the backward pass has ended:RuntimeWarning")
def test_a_receiver_that_has_received_a_value(comm, interrupt):
    if comm.rank == 0:
        MF.send(chainer.Variable(np.ones(3)), comm, 1)
    else:
        interrupt("Waitall")
        with pytest.raises(Interrupted):
            MF.recv(comm, 0)
    for factor in (2, 3):
        send_and_receive(comm, factor)


@pytest.mark.parametrize("operation", ["recv", "Recv"])
@pytest.mark.filterwarnings("ignore:the gradient of send.* came back:RuntimeWarning")
def test_a_sender_that_has_received_a_gradient(comm, interrupt, operation):
    if comm.rank == 0:
        delegate = MF.send(chainer.Variable(np.ones(3)), comm, 1)
        interrupt(operation)
        with pytest.raises(Interrupted):
            delegate.backward()
    elif comm.rank == 1:
        F.sum(5 * MF.recv(comm, 0)).backward()
    for factor in (2, 3):
        send_and_receive(comm, factor)


def test_a_backward_pass_can_be_repeated(comm, interrupt):
    if comm.rank == 0:
        x = chainer.Variable(np.ones(3))
        delegate = MF.send(x, comm, 1)
        interrupt("recv")
        with pytest.raises(Interrupted):
            delegate.backward()
        delegate.backward()
        np.testing.assert_array_equal(x.grad, [5, 5, 5])
    else:
        F.sum(5 * MF.recv(comm, 0)).backward()


def test_a_gradient_that_is_under_way_keeps_its_memory(comm, monkeypatch):
    if comm.rank == 0:
        x = chainer.Variable(np.ones(LARGE))
        delegate = MF.send(x, comm, 1)
        comm.recv_obj(1, tag=1)
        delegate.backward()
        np.testing.assert_array_equal(x.grad, np.full(LARGE, 5))
    else:
        y = MF.recv(comm, 0)
        monkeypatch.setattr(replies, "MPI", InterruptedMPI())
        monkeypatch.setattr(replies, "_under_way", [([], [])])
        with pytest.raises(Interrupted):
            F.sum(5 * y).backward()
        others = [np.full(LARGE, 7.0) for _ in range(5)]
        comm.send_obj("received", 0, tag=1)
        comm.barrier()
        del others
    if comm.rank == 0:
        comm.barrier()


class InterruptedMPI:
    """mpi4py, but a handler raises when the program asks for the end of messages, of which one has been sent."""

    def __init__(self):
        self.Request = self.Intracomm = self
        self.sent = []

    def __getattr__(self, name):
        return getattr(MPI, name)

    def Isend(self, *args, **options):
        self.sent.append(True)
        return MPI.Intracomm.Isend(*args, **options)

    def Testall(self, requests):
        if self.sent:
            raise Interrupted
        return MPI.Request.Testall(requests)
