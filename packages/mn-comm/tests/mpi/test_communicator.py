import copy
import ctypes
import os
import pickle

import numpy as np
import pytest
from mpi4py import MPI

from mn_comm import CommunicatorBase, create_communicator
from mn_comm.device import awareness
from mn_comm.device.awareness import is_cuda_aware
from mn_comm.ranks.intracomm import Ranks


def test_ranks_are_those_of_mpi(world, name):
    comm = create_communicator(name)
    assert isinstance(comm, CommunicatorBase)
    assert (comm.rank, comm.size) == (world.rank, world.size)
    assert (comm.intra_rank, comm.intra_size) == (world.rank, world.size)
    assert (comm.inter_rank, comm.inter_size) == (0, 1)
    comm.finalize()


def test_the_default_works_without_a_device(world):
    comm = create_communicator()
    np.testing.assert_array_equal(comm.allreduce(np.ones(3)), np.full(3, world.size))
    comm.finalize()


def test_mpi_comm_is_the_one_that_was_given(world):
    own = world.Dup()
    comm = create_communicator("naive", own)
    assert comm.mpi_comm is own
    comm.finalize()
    own.Barrier()  # still valid: it belongs to the caller
    own.Free()


def test_finalize_twice(world):
    comm = create_communicator("two_dimensional")
    comm.finalize()
    comm.finalize()


def test_split(world, name):
    comm = create_communicator(name)
    part = comm.split(world.rank % 2, -world.rank)
    members = [rank for rank in range(world.size) if rank % 2 == world.rank % 2]
    assert type(part) is type(comm)
    assert part.size == len(members)
    assert part.rank == members[::-1].index(world.rank)
    np.testing.assert_array_equal(part.allreduce(np.array([world.rank])), [sum(members)])
    part.finalize()
    comm.finalize()


def test_settings_are_kept_by_split_and_are_each_communicators_own(world):
    one, other = create_communicator("flat"), create_communicator("flat", batched_copy=True)
    one.set_config("batched_copy", False)
    assert one.get_config("batched_copy") is False
    assert one.get_config() == {"allreduce_grad_dtype": None, "batched_copy": False}
    assert other.get_config("batched_copy") is True
    part = one.split(0, world.rank)
    assert part.get_config("batched_copy") is False
    part.set_config("batched_copy", True)
    assert one.get_config("batched_copy") is False


@pytest.mark.parametrize("key", [np.int64(3), True])
def test_numpy_integers_are_integers(comm, key):
    part = comm.split(np.int32(1), key)
    assert part.size == comm.size
    part.finalize()


def test_a_split_that_was_freed_is_made_again_and_keys_of_equal_order_give_the_same(world):
    comm = create_communicator("naive", world.Dup())
    one = comm.split(0, comm.rank)
    assert comm.split(7, 10 * comm.rank).mpi_comm == one.mpi_comm
    one.mpi_comm.Free()
    again = comm.split(0, comm.rank)
    assert again.allreduce(np.ones(1))[0] == comm.size


def test_a_split_after_one_group_alone_has_freed_its_communicator(world):
    comm = create_communicator("naive", world.Dup())
    half = comm.split(world.rank % 2, world.rank)
    if world.rank % 2 == 0:
        half.mpi_comm.Free()
    half = comm.split(world.rank % 2, world.rank)
    np.testing.assert_array_equal(half.allreduce(np.ones(1)), [half.size])
    np.testing.assert_array_equal(comm.allreduce(np.ones(1)), [comm.size])


def test_a_part_that_another_one_still_uses_is_not_freed(world):
    comm = create_communicator("naive", world.Dup())
    one, other = comm.split(0, 0), comm.split(0, 0)
    one.finalize()
    one.finalize()  # does nothing
    assert other.allreduce(np.ones(1))[0] == comm.size
    other.finalize()
    assert other.mpi_comm == MPI.COMM_NULL
    assert comm.split(0, 0).allreduce(np.ones(1))[0] == comm.size


def test_an_elastic_one_is_in_another_package(world, monkeypatch):
    monkeypatch.setattr("importlib.metadata.entry_points", lambda **which: [])
    with pytest.raises(RuntimeError, match="elastic=True: expected the package mn-elastic, got none: pip install"):
        create_communicator("naive", elastic=True)


def test_the_mpi_of_the_tests_is_not_cuda_aware(world):
    assert "MN_COMM_CUDA_AWARE_MPI" in os.environ or not is_cuda_aware(Ranks(world))


def test_the_mpi_of_the_tests_is_asked_whether_it_is_cuda_aware():
    assert hasattr(ctypes.CDLL(MPI.__file__), awareness._QUERY)


def test_a_wrong_word_about_cuda_on_one_rank_raises_on_all(world, monkeypatch):
    monkeypatch.setenv("MN_COMM_CUDA_AWARE_MPI", "yes" if world.rank == 0 else "0")
    with pytest.raises(ValueError, match="expected 0 or 1 in MN_COMM_CUDA_AWARE_MPI, got 'yes'"):
        is_cuda_aware(Ranks(world))


@pytest.mark.parametrize("copy_", [pickle.dumps, copy.deepcopy])
def test_it_is_not_pickled_or_copied_deeply(world, name, copy_):
    comm = create_communicator(name)
    with pytest.raises(TypeError, match="expected no communicator in an object that is pickled or deep-copied"):
        copy_({"trainer": comm})
    assert copy.copy(comm).size == comm.size
    comm.finalize()
