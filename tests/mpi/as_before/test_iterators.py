import chainer
import chainermn
import numpy as np
import pytest
from chainer.iterators import MultithreadIterator, SerialIterator
from chainermn.iterators import create_multi_node_iterator, create_synchronized_iterator

COMM = chainermn.create_communicator("naive")
RANK, SIZE = COMM.rank, COMM.size
N = 10

DATASETS = {
    "floats": np.arange(N, dtype="f4"),
    "integers": np.arange(N, dtype="i4"),
    "rows": np.arange(2 * N, dtype="f4").reshape(N, 2),
    "list": [np.float32(i) for i in range(N)],
    "pairs": [(np.float32(i), np.int32(2 * i)) for i in range(N)],
    "rows and labels": chainer.datasets.TupleDataset(
        np.arange(2 * N, dtype="f4").reshape(N, 2), np.arange(N, dtype="i4")
    ),
}
KINDS = {"serial": SerialIterator, "threads": MultithreadIterator}


def make(dataset="floats", kind="serial", master=0, batch=4, **options):
    iterator = KINDS[kind](DATASETS[dataset], batch, **options) if RANK == master else None
    return create_multi_node_iterator(iterator, COMM, rank_master=master)


def plain(batch):
    """What the samples are, whichever types numbers have."""
    return [tuple(np.asarray(x).tolist() for x in (each if isinstance(each, tuple) else (each,))) for each in batch]


def standing(iterator):
    return (iterator.epoch, bool(iterator.is_new_epoch), iterator.current_position, iterator.epoch_detail)


def is_equal_everywhere(thing):
    return COMM.bcast_obj(thing if RANK == 0 else None) == thing


@pytest.mark.parametrize("master", range(SIZE))
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dataset", DATASETS)
def test_the_same_batches_on_every_rank(dataset, kind, master):
    iterator = make(dataset, kind, master, shuffle=True)
    seen = []
    for _ in range(5):
        batch = plain(iterator.next())
        assert is_equal_everywhere(batch)
        assert is_equal_everywhere(standing(iterator))
        seen += batch
    assert sorted(seen) == sorted(plain(DATASETS[dataset]) * 2)
    assert iterator.epoch == 2
    iterator.finalize()


@pytest.mark.parametrize("master", range(SIZE))
def test_once_through_in_order(master):
    iterator = make("pairs", master=master, repeat=False, shuffle=False)
    reference = SerialIterator(DATASETS["pairs"], 4, repeat=False, shuffle=False)
    for expected in reference:
        assert plain(next(iterator)) == plain(expected)
        assert standing(iterator) == standing(reference)
    for _ in range(2):
        with pytest.raises(StopIteration):
            iterator.next()


def test_two_at_the_same_time():
    iterators = [make("pairs", master=0, shuffle=True), make("rows", master=SIZE - 1, batch=3)]
    for _ in range(7):
        for iterator in iterators:
            assert is_equal_everywhere(plain(iterator.next()))
            assert is_equal_everywhere(standing(iterator))


class Saving(chainer.serializer.Serializer):
    """Keeps the values that it gets."""

    def __init__(self, kept):
        self.kept = kept

    def __getitem__(self, key):
        raise AssertionError("an iterator has no children")

    def __call__(self, key, value):
        self.kept[key] = value
        return value


class Loading(Saving):
    """Returns kept values, in the type of its argument, or fails."""

    def __call__(self, key, value):
        kept = self.kept[key]
        if value is None:
            return kept
        if isinstance(value, np.ndarray):
            np.copyto(value, kept)
            return value
        return type(value)(np.asarray(kept))


def goes_on(saved, loaded, steps):
    """Save one iterator after a number of steps, load it into another, and compare the following batches."""
    for _ in range(steps):
        saved.next()
    kept = {}
    saved.serialize(Saving(kept))
    assert {"epoch", "is_new_epoch", "current_position"} <= set(kept)
    kept = {key: value.copy() if isinstance(value, np.ndarray) else value for key, value in kept.items()}
    loaded.serialize(Loading(kept))
    assert standing(loaded) == standing(saved)
    left = -(-(N - saved.current_position) // 4)
    for _ in range(left):
        # The order of the next epoch is drawn again, so only samples of this epoch are the same.
        same = min(4, N - saved.current_position)
        assert plain(loaded.next())[:same] == plain(saved.next())[:same]
    assert standing(loaded)[:3] == standing(saved)[:3]


PLAIN = {"multi-node": make, "plain": lambda dataset, **options: SerialIterator(DATASETS[dataset], 4, **options)}
PAIRS = [("multi-node", "multi-node"), ("multi-node", "plain"), ("plain", "multi-node")]


# The followers of the old one know only the order of the first epoch.
@pytest.mark.parametrize(("shuffle", "steps"), [(False, 0), (False, 3), (False, 5), (True, 0), (True, 1), (True, 2)])
@pytest.mark.parametrize("dataset", ["floats", "pairs"])
@pytest.mark.parametrize("pair", PAIRS, ids=" to ".join)
def test_saved_and_loaded(shuffle, pair, dataset, steps):
    np.random.seed(4)  # plain iterators draw the same order on every rank
    saved, loaded = (PLAIN[name](dataset, shuffle=shuffle) for name in pair)
    goes_on(saved, loaded, steps)


def synchronized(dataset="floats", kind="serial"):
    return create_synchronized_iterator(KINDS[kind](DATASETS[dataset], 4), COMM)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dataset", DATASETS)
def test_synchronized(dataset, kind):
    np.random.seed(RANK)  # would be a different order
    iterator = synchronized(dataset, kind)
    seen = []
    for _ in range(5):
        batch = plain(iterator.next())
        assert is_equal_everywhere(batch)
        assert is_equal_everywhere(standing(iterator))
        seen += batch
    assert sorted(seen) == sorted(plain(DATASETS[dataset]) * 2)
    iterator.finalize()


def test_two_synchronized_ones_draw_orders_of_their_own():
    first, second = synchronized(), synchronized("pairs")
    for _ in range(12):
        assert is_equal_everywhere(plain(first.next()))
        assert is_equal_everywhere([plain(second.next()), plain(second.next())])


@pytest.mark.parametrize("steps", [0, 1, 3, 5])
@pytest.mark.parametrize("pair", PAIRS, ids=" to ".join)
def test_synchronized_ones_are_saved_and_loaded(pair, steps):
    np.random.seed(4)
    made = {"multi-node": synchronized, "plain": lambda: SerialIterator(DATASETS["floats"], 4, shuffle=True)}
    goes_on(*(made[name]() for name in pair), steps)


def test_what_is_no_iterator_with_an_order():
    with pytest.raises(ValueError):
        create_synchronized_iterator(iter([]), COMM)
