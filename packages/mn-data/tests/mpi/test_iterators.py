import io

import chainer
import numpy as np
import pytest
from chainer import iterators

import mn_data  # noqa: F401 - before Chainer
from mn_comm import create_communicator
from mn_data import (
    create_multi_node_iterator,
    create_synchronized_iterator,
    get_epoch_trigger,
    get_n_iterations_for_one_epoch,
)

COMM = create_communicator("naive")
RANK, SIZE = COMM.rank, COMM.size
X = np.random.RandomState(0).rand(20, 3)

DATASETS = {
    "float32": X.astype("f4"),
    "float16": X.astype("f2"),
    "uint8": (X * 255).astype("u1"),
    "pairs": chainer.datasets.TupleDataset(X.astype("f4"), np.arange(20, dtype="i4")),
    "triples": chainer.datasets.TupleDataset(X.astype("f8"), X.astype("f4") > 0.5, list(range(20))),
    "dictionaries": chainer.datasets.DictDataset(image=X.astype("c8"), name=[f"sample {i}" for i in range(20)]),
    "nested": [({"x": [X[i], (X[i], None)]}, i) for i in range(20)],
    "scalars": list(range(20)),
    "ragged": [X[: i % 3 + 1] for i in range(20)],
}


@pytest.fixture(autouse=True)
def nothing_is_left_over():
    yield
    assert COMM.allreduce(np.ones(1)) == SIZE


def same(a, b):
    np.testing.assert_equal(a, b)
    return [getattr(x, "dtype", type(x)) for x in a] == [getattr(x, "dtype", type(x)) for x in b]


@pytest.mark.parametrize("master", [0, SIZE - 1])
@pytest.mark.parametrize("dataset", DATASETS)
def test_all_ranks_get_the_batches_of_one(dataset, master):
    dataset = DATASETS[dataset]
    expected = iterators.SerialIterator(dataset, 6, repeat=False, shuffle=False)
    actual = iterators.SerialIterator(dataset, 6, repeat=False, shuffle=False) if master == RANK else None
    iterator = create_multi_node_iterator(actual, COMM, master)
    assert (iterator.epoch, iterator.is_new_epoch, iterator.epoch_detail) == (0, False, 0)
    for batch in expected:
        assert same(iterator.next(), batch)
        for name in ("epoch", "is_new_epoch", "current_position", "epoch_detail", "previous_epoch_detail"):
            assert getattr(iterator, name) == getattr(expected, name)
    with pytest.raises(StopIteration):
        iterator.next()
    iterator.reset()
    assert iterator.epoch_detail == 0
    assert len(list(iterator)) == 4
    iterator.finalize()


class DaliLike:
    """An iterator that is independent of Chainer's."""

    def __init__(self):
        self.epoch = self.n = 0

    def __next__(self):
        self.n += 1
        return [np.full(2, self.n, "u1")]

    def finalize(self):
        pass


def thread():
    return iterators.MultithreadIterator(DATASETS["pairs"], 6, n_threads=2)


@pytest.mark.parametrize("make", [DaliLike, thread])
def test_other_iterators(make):
    iterator = create_multi_node_iterator(make() if RANK == 0 else None, COMM)
    for _ in range(5):
        batches = COMM.allgather_obj(iterator.next())
        for batch in batches:
            assert same(batch, batches[0])
    assert len(set(COMM.allgather_obj(iterator.epoch))) == 1
    iterator.finalize()


def save(iterator):
    file = io.BytesIO()
    chainer.serializers.save_npz(file, iterator)
    file.seek(0)
    return file


@pytest.mark.parametrize("whose", ["each its own", "the master's"])
def test_state_is_saved_and_loaded_in_step(whose):
    def make():
        return create_multi_node_iterator(iterators.SerialIterator(X, 6) if RANK == 0 else None, COMM)

    iterator = make()
    for _ in range(5):
        iterator.next()
    file = save(iterator)
    if whose == "the master's":
        file = io.BytesIO(COMM.bcast_obj(file.getvalue()))
    other = make()
    chainer.serializers.load_npz(file, other, strict=whose == "each its own")
    for name in ("epoch", "is_new_epoch", "current_position"):
        assert getattr(other, name) == getattr(iterator, name)
    np.random.seed(3)
    expected = [iterator.next() for _ in range(4)]
    np.random.seed(3)
    for batch in expected:
        assert same(other.next(), batch)
        assert other.epoch_detail == COMM.bcast_obj(other.epoch_detail)


def serial(dataset, shuffle=True):
    return iterators.SerialIterator(dataset, 6, shuffle=shuffle)


@pytest.mark.parametrize("n_batches", [0, 2, 5, 7, 10])  # in the first, second and third epoch, and where one ends
@pytest.mark.parametrize("shuffle", [True, False])
def test_chainers_iterators_go_on_from_the_snapshot_of_any_rank(shuffle, n_batches):
    samples = list(range(20))
    iterator = create_multi_node_iterator(serial(samples, shuffle) if RANK == 0 else None, COMM)
    for _ in range(n_batches):
        iterator.next()
    file = save(iterator)
    left_in_epoch = -(-(20 - iterator.current_position) // 6)
    expected = [iterator.next() for _ in range(left_in_epoch)]
    plain = serial(samples, shuffle)
    chainer.serializers.load_npz(file, plain)
    assert plain.epoch == n_batches * 6 // 20
    for i, batch in enumerate(expected):
        left = 20 - plain.current_position  # the last batch begins the next epoch, whose order has not been drawn yet
        assert plain.next()[:left] == batch[:left], i
    assert plain.epoch == iterator.epoch
    assert plain.previous_epoch_detail == iterator.previous_epoch_detail


def test_a_follower_goes_on_from_the_snapshot_of_a_plain_iterator():
    iterator = create_multi_node_iterator(serial(X) if RANK == 0 else None, COMM)
    plain = serial(X)
    for _ in range(5):
        plain.next()
    file = io.BytesIO(COMM.bcast_obj(save(plain).getvalue()))
    chainer.serializers.load_npz(file, iterator)
    state = chainer.serializers.DictionarySerializer()
    iterator.serialize(state)
    np.testing.assert_array_equal(state.target["order"], COMM.bcast_obj(plain._state.order))
    first = COMM.bcast_obj(plain.next()[:2])
    np.testing.assert_array_equal(iterator.next()[:2], first)
    # After the batch, the master's order is sent again, because it was changed in place.
    state = chainer.serializers.DictionarySerializer()
    iterator.serialize(state)
    np.testing.assert_array_equal(state.target["order"], COMM.bcast_obj(state.target["order"]))


def test_the_order_travels_once_an_epoch(monkeypatch):
    iterator = create_multi_node_iterator(serial(list(range(20))) if RANK == 0 else None, COMM)
    sizes = []
    original = COMM.bcast

    def bcast(x, root=0):
        received = original(x, root=root)
        sizes.append(received.nbytes)
        return received

    monkeypatch.setattr(COMM, "bcast", bcast, raising=False)
    for _ in range(7):
        iterator.next()
    assert [size > sizes[0] + 20 * 8 for size in sizes] == [False, False, False, True, False, False, True]


@pytest.mark.skipif(SIZE < 2, reason="needs a follower")
def test_the_size_of_the_dataset():
    iterator = create_multi_node_iterator(serial(X) if RANK == 0 else None, COMM)
    assert RANK == 0 or iterator.dataset_size == 20
    iterator = create_multi_node_iterator(DaliLike() if RANK == 0 else None, COMM)
    assert RANK == 0 or iterator.dataset_size is None


def test_saving_on_one_rank_alone_leaves_no_rank_hanging():
    iterator = create_multi_node_iterator(iterators.SerialIterator(X, 6) if RANK == 0 else None, COMM)
    if RANK == 0:
        save(iterator)
    iterator.next()


def test_an_error_of_the_iterator_raises_on_every_rank():
    class Broken(DaliLike):
        def __next__(self):
            raise ValueError("the file is gone")

    iterator = create_multi_node_iterator(Broken() if RANK == 0 else None, COMM)
    with pytest.raises(ValueError, match="the file is gone"):
        iterator.next()


def test_a_batch_that_cannot_be_pickled_raises_on_every_rank():
    dataset = [lambda: None] * 4
    iterator = create_multi_node_iterator(iterators.SerialIterator(dataset, 2) if RANK == 0 else None, COMM)
    with pytest.raises(Exception, match=r"[Pp]ickle"):
        iterator.next()


def test_an_order_comes_later_if_it_would_have_come_with_a_batch_that_cannot_be_pickled():
    dataset = [*range(8)]
    iterator = create_multi_node_iterator(iterators.SerialIterator(dataset, 4) if RANK == 0 else None, COMM)
    iterator.next()
    dataset[:] = [lambda: None] * 8
    with pytest.raises(Exception, match=r"[Pp]ickle"):  # the last batch of the epoch
        iterator.next()
    dataset[:] = range(8)
    batch = iterator.next()
    assert (np.load(save(iterator))["order"][:4] == batch).all()


def test_an_iterator_that_cannot_be_reset():
    """It raises on every rank; otherwise, the others would take the next batch for the answer."""
    iterator = create_multi_node_iterator(DaliLike() if RANK == 0 else None, COMM)
    with pytest.raises(AttributeError, match="reset"):
        iterator.reset()
    assert same(iterator.next(), [np.full(2, 1, "u1")])


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ((None,), TypeError, "expected an iterator at rank 0, got NoneType"),
        ((iterators.SerialIterator(X, 2), SIZE), ValueError, "expected rank_master in"),
    ],
)
def test_bad_arguments(arguments, error, message):
    with pytest.raises(error, match=message):
        create_multi_node_iterator(arguments[0], COMM, *arguments[1:])


def test_in_a_trainer(tmp_path):
    model = chainer.links.Classifier(chainer.links.Linear(3, 20))
    optimizer = chainer.optimizers.SGD().setup(model)
    iterator = create_multi_node_iterator(iterators.SerialIterator(DATASETS["pairs"], 6) if RANK == 0 else None, COMM)
    updater = chainer.training.StandardUpdater(iterator, optimizer)
    trainer = chainer.training.Trainer(updater, (2, "epoch"), out=tmp_path)
    trainer.extend(chainer.training.extensions.snapshot(), trigger=(1, "epoch"))
    trainer.run()
    assert updater.iteration == 7
    assert updater.epoch == 2


@pytest.mark.parametrize("make", [lambda: iterators.SerialIterator(X, 6), thread])
def test_synchronized_iterators_shuffle_alike(make):
    iterator = create_synchronized_iterator(make(), COMM)
    batches = [iterator.next() for _ in range(9)]
    for other in COMM.allgather_obj(batches):
        np.testing.assert_equal(other, batches)
    assert iterator.epoch == 2
    iterator.finalize()


def test_every_epoch_has_another_order_with_every_sample():
    iterator = create_synchronized_iterator(iterators.SerialIterator(list(range(20)), 20), COMM)
    orders = [iterator.next() for _ in range(5)]
    assert all(sorted(order) == list(range(20)) for order in orders)
    assert len({tuple(order) for order in orders}) == 5


def test_an_iterator_that_does_not_shuffle_stays_so():
    iterator = create_synchronized_iterator(iterators.SerialIterator(list(range(20)), 4, shuffle=False), COMM)
    assert [iterator.next() for _ in range(2)] == [[0, 1, 2, 3], [4, 5, 6, 7]]


def test_a_synchronized_iterator_goes_on_in_the_same_order():
    iterator = create_synchronized_iterator(iterators.SerialIterator(list(range(20)), 6), COMM)
    for _ in range(5):
        iterator.next()
    file = save(iterator)
    expected = [iterator.next() for _ in range(9)]
    other = create_synchronized_iterator(iterators.SerialIterator(list(range(20)), 6), COMM)
    chainer.serializers.load_npz(file, other)
    assert [other.next() for _ in range(9)] == expected


def test_attributes_are_those_of_the_actual_iterator():
    actual = iterators.SerialIterator(list(range(20)), 6)
    iterator = create_synchronized_iterator(actual, COMM)
    iterator.extra = 1
    assert actual.extra == 1
    assert iterator.dataset is actual.dataset
    assert iterator.batch_size == 6


def test_what_is_dropped_leaves_the_actual_iterator_to_the_script():
    actual = iterators.MultiprocessIterator(list(range(4)), 2, n_processes=1)
    for _ in range(2):  # as in a notebook, where a cell runs again
        iterator = create_synchronized_iterator(actual, COMM)
        assert sorted(iterator.next() + iterator.next()) == [0, 1, 2, 3]
    iterator.finalize()


def test_an_iterator_without_an_order():
    with pytest.raises(ValueError, match="expected an iterator with an order_sampler, got DaliLike"):
        create_synchronized_iterator(DaliLike(), COMM)


@pytest.mark.skipif(SIZE < 2, reason="needs two ranks that differ")
def test_lengths_that_differ():
    with pytest.raises(ValueError, match="expected the same number of samples on every rank, got 10 on rank 0"):
        create_synchronized_iterator(iterators.SerialIterator(list(range(10 + RANK)), 2), COMM)


@pytest.mark.skipif(SIZE < 2, reason="needs two ranks that differ")
def test_only_some_ranks_shuffle():
    """Their batches would differ without a word."""
    only_here = iterators.SerialIterator(list(range(10)), 2, shuffle=RANK == 0)
    with pytest.raises(ValueError, match=r"expected the same batch_size and shuffling on every rank, got \(2, True\)"):
        create_synchronized_iterator(only_here, COMM)


def test_epochs_in_iterations():
    part = list(range(10 + RANK))
    for comm in (COMM, COMM.mpi_comm):
        with pytest.warns(DeprecationWarning):
            assert get_n_iterations_for_one_epoch(part, 4, comm) == 3
        with pytest.warns(DeprecationWarning):
            assert get_epoch_trigger(5, part, 4, comm) == (15, "iteration")
