import numpy as np
import pytest
from chainer import datasets
from hypothesis import given
from hypothesis import strategies as st

import mn_data  # noqa: F401 - before Chainer
from mn_data import create_empty_dataset
from mn_data.columns import assemble, can_take, columns_of

X = np.arange(20.0).reshape(10, 2)
T = list("abcdefghij")


def take(dataset, indices):
    layout, columns = columns_of(dataset, indices)
    return assemble(layout, [column.rows() for column in columns])


def plain(dataset):
    return [
        tuple(
            np.asarray(v).tolist() for v in (s.values() if isinstance(s, dict) else s if isinstance(s, tuple) else (s,))
        )
        for s in dataset
    ]


IN_MEMORY = [
    X,
    T,
    tuple(T),
    datasets.TupleDataset(X, T),
    datasets.DictDataset(x=X, t=T),
    datasets.SubDataset(datasets.TupleDataset(X, T), 0, 10, np.random.RandomState(0).permutation(10)),
    datasets.SubDataset(datasets.SubDataset(T, 0, 10), 0, 10, list(range(9, -1, -1))),
    # As Python's sequences, a part counts from its end, too.
    datasets.SubDataset(datasets.SubDataset(list(range(20)), 5, 15), 0, 10, list(range(-1, 9))),
]


@pytest.mark.parametrize("dataset", IN_MEMORY)
@given(indices=st.lists(st.integers(0, 9), max_size=12))
def test_the_samples_asked_for_in_that_order(dataset, indices):
    assert can_take(dataset)
    taken = take(dataset, np.array(indices, dtype=np.intp))
    assert len(taken) == len(indices)
    assert plain(taken[i] for i in range(len(taken))) == plain(dataset[i] for i in indices)


def test_a_part_of_a_part():
    sub = datasets.SubDataset(T, 2, 8)
    assert list(take(sub, np.array([0, 5]))) == ["c", "h"]


def test_nothing_is_copied_where_the_samples_follow_one_another():
    assert np.shares_memory(take(X, range(3, 7)), X)
    assert not np.shares_memory(take(X, np.array([3, 5])), X)


class OwnPart(datasets.SubDataset):
    pass


class OwnTuples(datasets.TupleDataset):
    pass


class OwnDictionaries(datasets.DictDataset):
    pass


class OwnList(list):
    pass


class OwnArray(np.ndarray):
    pass


@pytest.mark.parametrize(
    "dataset",
    [
        OwnPart(T, 0, 10),
        OwnTuples(X, T),
        OwnDictionaries(x=X),
        OwnList(T),
        X.view(OwnArray),
        np.ma.array(X),
        datasets.SubDataset(OwnPart(T, 0, 10), 0, 10),
        datasets.TupleDataset(X, OwnPart(T, 0, 10)),
        datasets.TransformDataset(X, lambda x: x),
        datasets.TupleDataset(X, datasets.TransformDataset(T, lambda t: t)),
        range(10),
        {"a": 1},
        None,
    ],
)
def test_samples_made_when_asked_for_are_not_taken(dataset):
    assert not can_take(dataset)


def test_empty_dataset():
    assert list(create_empty_dataset(X)) == [()] * 10
    with pytest.raises(TypeError):
        create_empty_dataset(None)
