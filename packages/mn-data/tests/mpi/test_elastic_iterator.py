"""An iterator that deals from one order to all ranks, on communicators that are not elastic."""

import multiprocessing
import threading

import chainer
import numpy as np
import pytest
from mpi4py import MPI

from mn_comm import create_communicator
from mn_data import ElasticIterator

pytestmark = pytest.mark.sizes(1)

WORLD = MPI.COMM_WORLD
RANK, SIZE = WORLD.rank, WORLD.size


@pytest.fixture
def comm():
    return create_communicator("naive")


def everybodys(comm, batch):
    return [sample for each in comm.allgather_obj(batch) for sample in each]


@pytest.mark.parametrize("options", [{}, {"seed": 4}, {"shuffle": False}, {"n_processes": 2, "n_prefetch": 2}])
def test_an_epoch_has_every_sample_once(comm, options):
    iterator = ElasticIterator(np.arange(24 * SIZE), 4, comm, **options)
    try:
        for epoch in range(3):
            drawn = [sample for _ in range(6) for sample in everybodys(comm, next(iterator))]
            assert sorted(drawn) == list(range(24 * SIZE))
            assert (iterator.epoch, iterator.is_new_epoch, iterator.epoch_detail) == (epoch + 1, True, epoch + 1)
        assert (drawn == sorted(drawn)) == (options == {"shuffle": False})
        next(iterator)
        assert not iterator.is_new_epoch
        assert iterator.previous_epoch_detail == 3
    finally:
        iterator.finalize()


def test_a_global_batch_keeps_its_size(comm):
    iterator = ElasticIterator(np.arange(10), SIZE + 1, comm, global_batch=True, shuffle=False)
    batch = next(iterator)
    assert len(batch) == 1 + (RANK == SIZE - 1)
    assert everybodys(comm, batch) == list(range(10))[: SIZE + 1]


def test_a_batch_reaches_into_the_next_epoch(comm):
    iterator = ElasticIterator(np.arange(2 * SIZE + 1), 2, comm, seed=0)
    drawn = [sample for _ in range(2 * SIZE + 1) for sample in everybodys(comm, next(iterator))]
    assert sorted(drawn) == sorted(2 * SIZE * list(range(2 * SIZE + 1)))


def test_it_goes_on_where_it_was_saved_with_another_number_of_ranks(comm, tmp_path_factory):
    whole = ElasticIterator(np.arange(12 * SIZE), 3, comm, seed=9)
    alone = ElasticIterator(np.arange(12 * SIZE), 3, create_communicator("naive", MPI.COMM_SELF), seed=1)
    next(whole)
    file = tmp_path_factory.mktemp("state") / "iterator.npz"
    chainer.serializers.save_npz(file, whole)
    rest = [sample for _ in range(3) for sample in everybodys(comm, next(whole))]
    chainer.serializers.load_npz(file, alone)
    assert alone.epoch_detail == 0.25
    assert [sample for _ in range(3 * SIZE) for sample in next(alone)] == rest
    assert alone.is_new_epoch


def test_what_was_dealt_is_not_dealt_again_after_a_restart(comm, tmp_path_factory):
    iterator = ElasticIterator(np.arange(12 * SIZE), 3, comm, seed=9)
    next(iterator)
    file = tmp_path_factory.mktemp("state") / "iterator.npz"
    chainer.serializers.save_npz(file, iterator)
    second = next(iterator)
    chainer.serializers.load_npz(file, iterator)
    assert next(iterator) == second


class Unreadable:
    """A dataset; its samples can be read at the second attempt. A signal handler may raise as well."""

    def __init__(self):
        self.tried = set()

    def __len__(self):
        return 4 * SIZE

    def __getitem__(self, index):
        if index not in self.tried:
            self.tried.add(index)
            raise OSError(f"{index} cannot be read")
        return index


def test_a_mini_batch_that_could_not_be_read_is_the_next_one_again(comm):
    iterator = ElasticIterator(Unreadable(), 1, comm, shuffle=False)
    drawn = []
    for _ in range(4):
        with pytest.raises(OSError, match=f"{len(drawn) + RANK} cannot be read"):
            next(iterator)
        before = iterator.epoch_detail
        drawn += everybodys(comm, next(iterator))
        assert (iterator.previous_epoch_detail, iterator.epoch_detail) == (before, before + 0.25)
    assert drawn == list(range(4 * SIZE))


class Slow:
    """A dataset; reading any sample but the first one takes until it is allowed to end."""

    def __init__(self):
        self.has_begun, self.may_end = multiprocessing.Event(), multiprocessing.Event()

    def __len__(self):
        return 4

    def __getitem__(self, index):
        if index:
            self.has_begun.set()
            self.may_end.wait()
        return index


def test_one_that_is_dropped_does_not_wait_for_samples():
    data = Slow()
    alone = create_communicator("naive", MPI.COMM_SELF)
    iterators = [ElasticIterator(data, 1, alone, shuffle=False, n_processes=1)]
    assert next(iterators[0]) == [0]
    data.has_begun.wait()
    dropping = threading.Thread(target=iterators.clear)
    dropping.start()
    dropping.join(10)
    has_waited = dropping.is_alive()
    data.may_end.set()
    assert not has_waited
    for reader in multiprocessing.active_children():
        reader.join()


MISTAKES = [
    ({"dataset": []}, ValueError, "an empty one"),
    ({"batch_size": 0}, ValueError, "at least 1"),
    ({"batch_size": 1.5}, TypeError, "float"),
    ({"n_processes": 1, "n_prefetch": 0}, ValueError, "n_prefetch of at least 1, got 0"),
    ({"seed": RANK}, ValueError, "expected the same length, batch_size"),
]


@pytest.mark.parametrize(("mistake", "kind", "message"), MISTAKES[: 5 if SIZE > 1 else 4])
def test_mistakes(comm, mistake, kind, message):
    arguments = {"dataset": np.arange(4), "batch_size": 2, **mistake}
    with pytest.raises(kind, match=message):
        ElasticIterator(comm=comm, **arguments)


def test_another_dataset_is_refused(comm, tmp_path_factory):
    file = tmp_path_factory.mktemp("state") / "iterator.npz"
    chainer.serializers.save_npz(file, ElasticIterator(np.arange(5), 1, comm))
    with pytest.raises(ValueError, match="a state over 6 samples, got one over 5"):
        chainer.serializers.load_npz(file, ElasticIterator(np.arange(6), 1, comm))
