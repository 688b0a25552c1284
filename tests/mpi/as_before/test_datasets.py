import chainer
import chainermn
import numpy as np
import pytest
from chainer import datasets

COMM = chainermn.create_communicator("naive")
RANK, SIZE = COMM.rank, COMM.size

KINDS = [
    list,
    tuple,
    np.array,
    lambda xs: datasets.TupleDataset(xs, xs),
    lambda xs: datasets.TransformDataset(xs, abs),
    lambda xs: datasets.SubDataset([*xs, -1], 0, len(xs)),
]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    "options", [{}, {"shuffle": True}, {"shuffle": True, "seed": 3}, {"force_equal_length": False}]
)
def test_all_parts_together(kind, options):
    for n in (0, 1, SIZE, 3 * SIZE + 1):
        for root in range(SIZE):
            dataset = kind(list(range(n))) if RANK == root else None
            part = chainermn.scatter_dataset(dataset, COMM, root=root, **options)
            parts = COMM.gather_obj(part, root=root)
            assert (parts is None) == (RANK != root)
            if parts is None:
                continue
            lengths = sorted(len(each) for each in parts)
            assert all(type(each) is datasets.SubDataset for each in parts)
            if options.get("force_equal_length", True):
                assert set(lengths) == {-(-n // SIZE)}
            else:
                assert sum(lengths) == n
                assert lengths[-1] - lengths[0] <= 1
            samples = [sample[0] if isinstance(sample, tuple) else sample for each in parts for sample in each[:]]
            assert set(samples) == set(range(n))


@pytest.mark.parametrize("equal", [True, False])
def test_bounds_are_those_of_the_parts(equal):
    for n in range(3 * SIZE):
        for root in range(SIZE):
            begin, end = chainermn.scatter_index(n if RANK == root else None, COMM, root, force_equal_length=equal)
            part = chainermn.scatter_dataset(
                range(n) if RANK == root else None, COMM, root=root, force_equal_length=equal
            )
            assert list(part) == list(range(begin, end))


def test_data_that_travel_in_pieces():
    dataset = np.random.RandomState(0).rand(50, 3) if RANK == 0 else None
    part = chainermn.scatter_dataset(dataset, COMM, max_buf_len=100)
    assert len(part) == -(-50 // SIZE)
    whole = COMM.bcast_obj(dataset)
    np.testing.assert_array_equal(part[0], whole[50 * RANK // SIZE])


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("n", [0, 1, 10])
def test_empty_datasets(kind, n):
    empty = chainermn.datasets.create_empty_dataset(kind(list(range(n))))
    assert len(empty) == n
    assert list(empty) == [()] * n


def test_an_empty_dataset_feeds_a_model_without_inputs():
    seen = []
    part = chainermn.scatter_dataset(list(range(4 * SIZE)) if RANK == 0 else None, COMM)
    iterator = chainer.iterators.SerialIterator(chainermn.datasets.create_empty_dataset(part), 2)
    model = chainer.Sequential(lambda *args: seen.append(args) or chainer.Variable(np.zeros((), "f4")))
    updater = chainer.training.StandardUpdater(iterator, chainer.optimizers.SGD().setup(model))
    updater.update()
    assert seen == [()]
