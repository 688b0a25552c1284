"""Iterators that are kept in step although ranks have different numbers of samples."""

import math
from itertools import chain

import chainer
import numpy as np
import pytest
from chainer.iterators import MultiprocessIterator, MultithreadIterator, SerialIterator
from chainer.serializers import DictionarySerializer, NpzDeserializer

from mn_comm import create_communicator
from mn_data import (
    create_multi_node_iterator,
    create_synchronized_iterator,
    create_uneven_iterator,
    scatter_dataset,
)

pytestmark = pytest.mark.sizes(1, 4)

COMM = create_communicator("naive")
RANK, SIZE = COMM.rank, COMM.size
KINDS = {
    "serial": SerialIterator,
    "thread": MultithreadIterator,
    "process": lambda *args, **kwds: MultiprocessIterator(*args, n_processes=1, **kwds),
}


def mine(n):
    return scatter_dataset(list(range(n)) if RANK == 0 else None, COMM, shuffle=True, seed=0, force_equal_length=False)


def epoch(iterator):
    batches = []
    while True:
        batches.append(list(next(iterator)))
        state = iterator.epoch, iterator.is_new_epoch, iterator.epoch_detail, iterator.previous_epoch_detail
        assert COMM.allgather_obj(state) == [state] * SIZE
        if iterator.is_new_epoch:
            return batches


@pytest.mark.parametrize("n", [1, 2, 10, 13, 16])
@pytest.mark.parametrize("kind", KINDS)
def test_no_sample_comes_twice_and_none_is_missed(kind, n):
    iterator = create_uneven_iterator(KINDS[kind](mine(n), 2), COMM)
    orders = []
    for number in range(1, 4):
        batches = epoch(iterator)
        seen = COMM.allgather_obj([sample for batch in batches for sample in batch])
        assert sorted(chain.from_iterable(seen)) == list(range(n))
        assert len(batches) == math.ceil(math.ceil(n / SIZE) / 2)
        assert iterator.epoch == iterator.epoch_detail == number
        orders.append(seen)
    assert n < 10 or orders[0] != orders[1]  # it shuffles
    iterator.finalize()


@pytest.mark.parametrize("kind", KINDS)
def test_an_iterator_that_was_used_before_begins_again(kind):
    actual = KINDS[kind](list(range(6)), 2)
    next(actual)
    iterator = create_uneven_iterator(actual, COMM)
    assert sorted(chain.from_iterable(epoch(iterator))) == list(range(6))
    iterator.finalize()


def test_one_pass_where_it_does_not_repeat():
    iterator = create_uneven_iterator(SerialIterator(mine(2 * SIZE + 1), 1, repeat=False), COMM)
    assert len(list(iterator)) == 3
    iterator.reset()
    assert len(list(iterator)) == 3


@pytest.mark.parametrize("n_before", [0, 1, 2, 3, 4, 5, 6, 7])
@pytest.mark.parametrize("kind", ["serial", "process"])
def test_it_goes_on_where_it_was(kind, n_before):
    def make():
        # Chainer's MultiprocessIterator cannot be saved without an order.
        actual = KINDS[kind](mine(2 * SIZE + SIZE // 2), 1, order_sampler=lambda order, position: order)
        return create_uneven_iterator(actual, COMM)

    iterator, resumed = make(), make()
    for _ in range(n_before):
        next(iterator)
    writer = DictionarySerializer()
    iterator.serialize(writer)
    resumed.serialize(NpzDeserializer(writer.target))
    for _ in range(7):
        assert next(resumed) == next(iterator)
        assert resumed.epoch_detail == iterator.epoch_detail
        assert resumed.previous_epoch_detail == iterator.previous_epoch_detail
    for each in (iterator, resumed):
        each.finalize()


def test_it_ends_the_epoch_with_other_numbers_of_samples():
    """As if it had been saved by ranks with four times as many."""
    before = create_uneven_iterator(SerialIterator(list(range(16 + 8 * RANK)), 2, shuffle=False), COMM)
    for _ in range(before._longest // 4):
        next(before)
    writer = DictionarySerializer()
    before.serialize(writer)
    state = writer.target
    length = 4 + 2 * RANK
    key = "actual_iterator/current_position"
    state = {name.lstrip("/"): value for name, value in state.items()}
    state[key] = np.asarray(int(state[key]) // 4)
    after = create_uneven_iterator(SerialIterator(list(range(length)), 2, shuffle=False), COMM)
    after.serialize(NpzDeserializer(state))
    first = int(state[key])
    rest = [sample for batch in epoch(after) for sample in batch]
    assert rest == list(range(first, length))
    assert [sample for batch in epoch(after) for sample in batch] == list(range(length))


def test_a_synchronized_iterator_is_one():
    samples = list(range(6))
    iterator = create_uneven_iterator(create_synchronized_iterator(SerialIterator(samples, 2), COMM), COMM)
    assert sorted(chain.from_iterable(epoch(iterator))) == samples


def test_other_attributes_are_those_of_the_actual_one():
    actual = SerialIterator(mine(8), 2)
    iterator = create_uneven_iterator(actual, COMM)
    assert iterator.batch_size == 2
    assert iterator.dataset is actual.dataset


def test_what_is_no_such_iterator_is_refused_on_all_ranks():
    with pytest.raises(TypeError, match="expected an iterator with dataset"):
        create_uneven_iterator(iter([1]) if RANK == SIZE - 1 else SerialIterator([1], 1), COMM)


def test_no_samples_anywhere():
    with pytest.raises(ValueError, match="expected at least one sample on some rank"):
        create_uneven_iterator(SerialIterator([], 1), COMM)


def test_an_iterator_that_ends_by_itself_is_begun_again():
    class Once(chainer.dataset.Iterator):
        dataset, batch_size = range(3), 1

        def __init__(self):
            self.reset()

        def reset(self):
            self.left = list(self.dataset)

        def __next__(self):
            if not self.left:
                raise StopIteration
            return [self.left.pop(0)]

    iterator = create_uneven_iterator(Once(), COMM)
    assert [next(iterator) for _ in range(7)] == [[0], [1], [2], [0], [1], [2], [0]]


def test_an_iterator_that_has_not_been_used_keeps_its_order():
    np.random.seed(RANK)
    expected = list(SerialIterator(np.arange(8), 4, repeat=False))
    np.random.seed(RANK)
    iterator = create_uneven_iterator(SerialIterator(np.arange(8), 4, repeat=False), COMM)
    assert list(iterator) == expected


@pytest.mark.parametrize("is_used", [False, True])
def test_an_iterator_of_several_ranks_is_refused_on_all_of_them(is_used):
    iterator = create_multi_node_iterator(SerialIterator(list(range(8)), 4), COMM)
    if is_used:
        next(iterator)
    if SIZE > 1:
        with pytest.raises(TypeError, match="expected an iterator with dataset, batch_size and reset"):
            create_uneven_iterator(iterator, COMM)
    COMM.barrier()
