"""Deliberate mistakes of two ranks that use NCCL: both ranks are told. To be run on two ranks."""

import pytest
from mpi4py import MPI

cupy = pytest.importorskip("cupy")
faults = pytest.importorskip("gpu_emulator.faults", reason="needs an environment changed by build.py")
nccl = pytest.importorskip("mn_comm.device.nccl")

WORLD = MPI.COMM_WORLD
pytestmark = [pytest.mark.gpu, pytest.mark.skipif(WORLD.size != 2, reason="needs two ranks")]


def found_by(mistake):
    """Return the faults of two ranks, of which the second one makes a mistake."""
    cupy.cuda.Device(WORLD.rank).use()
    communicator = nccl.NcclCommunicator(2, WORLD.bcast(nccl.get_unique_id()), WORLD.rank)
    mistake(communicator)
    cupy.cuda.Device().synchronize()
    WORLD.Barrier()
    communicator.destroy()
    return faults.take()


def test_swapped_calls():
    def mistake(communicator):
        array = cupy.zeros(10, "f4")
        calls = [lambda: communicator.all_reduce(array), lambda: communicator.broadcast(array, 0)]
        for call in reversed(calls) if WORLD.rank else calls:
            call()

    text = found_by(mistake)
    assert "calls allreduce" in text
    assert "calls broadcast" in text
    assert f"in {'broadcast' if WORLD.rank else 'all_reduce'}" in text  # the line of this rank's call


def test_different_dtypes():
    text = found_by(lambda communicator: communicator.all_reduce(cupy.zeros(10, "f4" if WORLD.rank else "f8")))
    assert "of type 7" in text
    assert "of type 8" in text


def test_different_lengths():
    text = found_by(lambda communicator: communicator.all_reduce(cupy.zeros(10 + WORLD.rank, "f4")))
    assert "allreduce of 10 elements" in text
    assert "allreduce of 11 elements" in text
