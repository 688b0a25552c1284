"""Names in private modules of ChainerMN 7 that scripts' own communicators use."""

import sys

import chainermn
import pytest
from chainermn.communicators import _communication_utility, _memory_utility
from mpi4py import MPI

COMM = MPI.COMM_WORLD
RANK, SIZE = COMM.rank, COMM.size


def test_ranks():
    comm = chainermn.create_communicator("naive")
    rank, intra_rank, intra_size, inter_rank, inter_size = _communication_utility.init_ranks(COMM)
    assert (rank, intra_rank, intra_size) == (comm.rank, comm.intra_rank, comm.intra_size)
    assert (inter_rank, inter_size) == (comm.inter_rank, comm.inter_size)
    within = _communication_utility.init_intra_mpi_comm(COMM, intra_rank, inter_rank)
    across = _communication_utility.init_inter_mpi_comm(COMM, intra_rank, inter_rank)
    assert (within.rank, within.size) == (intra_rank, intra_size)
    assert (across.rank, across.size) == (inter_rank, inter_size)
    within.Free()
    across.Free()


@pytest.mark.parametrize("comm", [COMM, None])
def test_an_object_in_pieces(comm):
    comm = comm or chainermn.create_communicator("naive")
    mine = list(range(100)) if RANK == SIZE - 1 else None
    assert _communication_utility.chunked_bcast_obj(mine, comm, 7, SIZE - 1) == list(range(100))
    assert _communication_utility.INT_MAX == 2**31 - 1


def test_numbers_of_types():
    types = {"f2": 6, "f4": 7, "f8": 8}
    assert {dtype: _communication_utility._get_nccl_type_id(dtype) for dtype in types} == types
    with pytest.raises(ValueError, match="expected float16, float32 or float64, got int32"):
        _communication_utility._get_nccl_type_id("i4")


def test_memory_needs_cupy(monkeypatch):
    monkeypatch.setitem(sys.modules, "cupy", None)
    for kind in (_memory_utility.DeviceMemory, _memory_utility.HostPinnedMemory):
        with pytest.raises(RuntimeError, match=f"{kind.__name__} needs CuPy"):
            kind()
