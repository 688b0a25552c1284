"""NCCL through the methods of CuPy's binding."""

import numpy as np
import pytest
from chainermn import nccl
from chainermn.communicators import _communication_utility
from mpi4py import MPI
from on_gpu import SHARING, is_emulated

cupy = pytest.importorskip("cupy")

pytestmark = [pytest.mark.gpu, pytest.mark.sizes(1, 4)]

COMM = MPI.COMM_WORLD
RANK, SIZE = COMM.rank, COMM.size


@pytest.fixture(autouse=True)
def enough(devices):
    """NCCL needs a device for each rank."""
    if devices < SIZE and not SHARING:
        pytest.skip("ranks share a GPU and NCCL_MULTI_RANK_GPU_ENABLE is not set")


@pytest.fixture
def communicator(enough):
    communicator = _communication_utility.init_nccl_comm(COMM)
    yield communicator
    communicator.destroy()


@pytest.fixture
def stream(enough):
    with cupy.cuda.Stream(non_blocking=True) as stream:
        yield stream.ptr


def filled(values, dtype="f4"):
    array = cupy.asarray(np.array(values, dtype))
    return array, array.data.ptr


def test_which_ranks(communicator):
    assert (communicator.size(), communicator.rank_id()) == (SIZE, RANK)


@pytest.mark.parametrize(
    ("op", "expected"),
    [
        (nccl.NCCL_SUM, SIZE * (SIZE + 1) // 2),
        (nccl.NCCL_PROD, np.prod(range(1, SIZE + 1))),
        (nccl.NCCL_MAX, SIZE),
        (nccl.NCCL_MIN, 1),
    ],
)
@pytest.mark.parametrize(
    ("dtype", "number"), [("f2", nccl.NCCL_FLOAT16), ("f8", nccl.NCCL_FLOAT64), ("i4", nccl.NCCL_INT32)]
)
def test_all_reduce(communicator, stream, op, expected, dtype, number):
    _, send = own = filled([RANK + 1] * 3, dtype)
    result, recv = filled([0] * 3, dtype)
    communicator.allReduce(send, recv, 3, number, op, stream)
    np.testing.assert_array_equal(result.get(), np.full(3, expected, dtype))
    np.testing.assert_array_equal(own[0].get(), np.full(3, RANK + 1, dtype))
    communicator.allReduce(send, send, 2, number, op, stream)  # in place, and only a part of it
    np.testing.assert_array_equal(own[0].get(), np.array([expected, expected, RANK + 1], dtype))


def test_reduce_and_broadcast(communicator, stream):
    own, send = filled([RANK, 1])
    result, recv = filled([-1, -1])
    root = SIZE - 1
    communicator.reduce(send, recv if RANK == root else 0, 2, nccl.NCCL_FLOAT32, nccl.NCCL_SUM, root, stream)
    assert result.get().tolist() == ([sum(range(SIZE)), SIZE] if RANK == root else [-1, -1])
    communicator.broadcast(send if RANK == root else 0, recv, 2, nccl.NCCL_FLOAT32, root, stream)
    assert result.get().tolist() == [root, 1]
    communicator.bcast(send, 1, nccl.NCCL_FLOAT32, root, stream)
    assert own.get().tolist() == [root, 1]


def test_shares(communicator, stream):
    _, send = _own = filled(np.arange(2 * SIZE) + RANK)
    share, recv = filled([0, 0])
    communicator.reduceScatter(send, recv, 2, nccl.NCCL_FLOAT32, nccl.NCCL_SUM, stream)
    assert share.get().tolist() == [SIZE * (2 * RANK + i) + sum(range(SIZE)) for i in range(2)]
    everything, everywhere = filled([0] * 2 * SIZE)
    communicator.allGather(recv, everywhere, 2, nccl.NCCL_FLOAT32, stream)
    assert everything.get().tolist() == [SIZE * i + sum(range(SIZE)) for i in range(2 * SIZE)]


@pytest.mark.skipif(SIZE < 2, reason="needs a neighbour")
def test_point_to_point(communicator, stream):
    array, address = filled([RANK] * 4)
    if RANK == 0:
        communicator.send(address, 3, nccl.NCCL_FLOAT32, 1, stream)
    elif RANK == 1:
        communicator.recv(address, 3, nccl.NCCL_FLOAT32, 0, stream)
        assert array.get().tolist() == [0, 0, 0, 1]


def test_errors_are_nccl_errors(communicator, monkeypatch):
    from nccl import core
    from nccl.bindings.nccl import NCCLError

    def refuse(*args, **kwargs):
        raise NCCLError(6)

    communicator.check_async_error()
    monkeypatch.setattr(core.Communicator, "allreduce", refuse)
    _, address = filled([1])
    with pytest.raises(nccl.NcclError, match=r"\(6\)") as caught:
        communicator.allReduce(address, address, 1, nccl.NCCL_FLOAT32, nccl.NCCL_SUM, 0)
    assert caught.value.status == 6
    assert isinstance(caught.value.__cause__, NCCLError)


def test_after_an_abort():
    communicator = _communication_utility.init_nccl_comm(COMM)
    _, address = filled([1])
    communicator.abort()
    with pytest.raises(nccl.NcclError, match="Communicator not initialized"):
        communicator.allReduce(address, address, 1, nccl.NCCL_FLOAT32, nccl.NCCL_SUM, 0)


@pytest.mark.skipif(SIZE < 2, reason="needs a peer")
def test_a_peer_that_aborts_is_an_error():
    if not is_emulated():
        pytest.skip("what a real NCCL reports is up to it")
    communicator = _communication_utility.init_nccl_comm(COMM)
    if RANK == 0:
        communicator.abort()
    COMM.Barrier()
    if RANK:
        with pytest.raises(nccl.NcclError, match="RemoteError: see the faults"):
            communicator.check_async_error()
        communicator.abort()


def test_version():
    assert nccl.get_version() >= 23000
    assert nccl.get_build_version() >= 23000
    assert nccl._available
