"""NCCL through the methods of CuPy's binding, with stand-ins for CuPy and nccl4py."""

import sys
import types

import numpy as np
import pytest
from chainermn import nccl
from chainermn.communicators import _communication_utility
from mpi4py import MPI

COMM = MPI.COMM_WORLD
RANK, SIZE = COMM.rank, COMM.size


@pytest.fixture
def cupy(fake_cupy):
    return fake_cupy


@pytest.fixture
def communicator(cupy):
    communicator = _communication_utility.init_nccl_comm(COMM)
    yield communicator
    communicator.destroy()


@pytest.fixture
def stream(cupy):
    with cupy.cuda.Stream(non_blocking=True) as stream:
        yield stream.ptr


def filled(cupy, values, dtype="f4"):
    array = cupy.asarray(np.array(values, dtype))
    return array, array.data.ptr


def test_numbers_are_those_of_nccl():
    assert (nccl.NCCL_SUM, nccl.NCCL_PROD, nccl.NCCL_MAX, nccl.NCCL_MIN) == (0, 1, 2, 3)
    assert (nccl.NCCL_FLOAT16, nccl.NCCL_FLOAT32, nccl.NCCL_FLOAT64) == (6, 7, 8)
    assert (nccl.NCCL_HALF, nccl.NCCL_FLOAT, nccl.NCCL_DOUBLE) == (6, 7, 8)
    assert (nccl.NCCL_CHAR, nccl.NCCL_INT) == (nccl.NCCL_INT8, nccl.NCCL_INT32) == (0, 2)
    assert (nccl.NCCL_UINT8, nccl.NCCL_UINT32, nccl.NCCL_INT64, nccl.NCCL_UINT64) == (1, 3, 4, 5)


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
def test_all_reduce(cupy, communicator, stream, op, expected, dtype, number):
    _, send = own = filled(cupy, [RANK + 1] * 3, dtype)
    result, recv = filled(cupy, [0] * 3, dtype)
    communicator.allReduce(send, recv, 3, number, op, stream)
    np.testing.assert_array_equal(result.get(), np.full(3, expected, dtype))
    np.testing.assert_array_equal(own[0].get(), np.full(3, RANK + 1, dtype))
    communicator.allReduce(send, send, 2, number, op, stream)  # in place, and only a part of it
    np.testing.assert_array_equal(own[0].get(), np.array([expected, expected, RANK + 1], dtype))


def test_reduce_and_broadcast(cupy, communicator, stream):
    own, send = filled(cupy, [RANK, 1])
    result, recv = filled(cupy, [-1, -1])
    root = SIZE - 1
    communicator.reduce(send, recv if RANK == root else 0, 2, nccl.NCCL_FLOAT32, nccl.NCCL_SUM, root, stream)
    assert result.get().tolist() == ([sum(range(SIZE)), SIZE] if RANK == root else [-1, -1])
    communicator.broadcast(send if RANK == root else 0, recv, 2, nccl.NCCL_FLOAT32, root, stream)
    assert result.get().tolist() == [root, 1]
    communicator.bcast(send, 1, nccl.NCCL_FLOAT32, root, stream)
    assert own.get().tolist() == [root, 1]


def test_shares(cupy, communicator, stream):
    _, send = _own = filled(cupy, np.arange(2 * SIZE) + RANK)
    share, recv = filled(cupy, [0, 0])
    communicator.reduceScatter(send, recv, 2, nccl.NCCL_FLOAT32, nccl.NCCL_SUM, stream)
    assert share.get().tolist() == [SIZE * (2 * RANK + i) + sum(range(SIZE)) for i in range(2)]
    everything, everywhere = filled(cupy, [0] * 2 * SIZE)
    communicator.allGather(recv, everywhere, 2, nccl.NCCL_FLOAT32, stream)
    assert everything.get().tolist() == [SIZE * i + sum(range(SIZE)) for i in range(2 * SIZE)]


@pytest.mark.skipif(SIZE < 2, reason="needs a neighbour")
def test_point_to_point(cupy, communicator, stream):
    array, address = filled(cupy, [RANK] * 4)
    if RANK == 0:
        communicator.send(address, 3, nccl.NCCL_FLOAT32, 1, stream)
    elif RANK == 1:
        communicator.recv(address, 3, nccl.NCCL_FLOAT32, 0, stream)
        assert array.get().tolist() == [0, 0, 0, 1]


def test_errors_are_nccl_errors(cupy, communicator, monkeypatch):
    core = sys.modules["nccl"].core

    def refuse(*args, **kwargs):
        raise core.NCCLError(6)

    monkeypatch.setattr(core.Communicator, "allreduce", refuse)
    _, address = filled(cupy, [1])
    with pytest.raises(nccl.NcclError, match=r"^NCCL_ERROR \(6\)$") as caught:
        communicator.allReduce(address, address, 1, nccl.NCCL_FLOAT32, nccl.NCCL_SUM, 0)
    assert caught.value.status == 6
    assert isinstance(caught.value.__cause__, core.NCCLError)
    communicator.check_async_error()
    monkeypatch.setattr(core.Communicator, "state", core.Result.RemoteError)
    with pytest.raises(nccl.NcclError, match="RemoteError: connection closed by the peer"):
        communicator.check_async_error()


def test_abort(cupy):
    communicator = _communication_utility.init_nccl_comm(COMM)
    communicator.abort()
    assert sys.modules["nccl"].core.calls[-1] == "abort"


def test_without_cupy(monkeypatch):
    monkeypatch.setitem(sys.modules, "cupy", None)
    with pytest.raises(RuntimeError, match="expected CuPy and nccl4py"):
        nccl.NcclCommunicator(1, b"", 0)


def test_version(cupy):
    assert nccl.get_version() == nccl.get_build_version() == 23203
    assert isinstance(nccl._available, bool)
    assert isinstance(sys.modules["nccl"], types.SimpleNamespace)
