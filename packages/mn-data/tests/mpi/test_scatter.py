import chainer
import numpy as np
import pytest
from mpi4py import MPI

import mn_data  # noqa: F401 - before Chainer
from mn_comm import create_communicator
from mn_data import scatter_dataset, scatter_index
from mn_data.plan import part

COMM = create_communicator("naive")
RANK, SIZE = COMM.rank, COMM.size

X = np.arange(46, dtype="f4").reshape(23, 2)
T = np.arange(23, dtype="i4")


class Made(chainer.dataset.DatasetMixin):
    """Samples that are created when they are requested."""

    def __len__(self):
        return 23

    def get_example(self, i):
        return np.float32(i)


DATASETS = [X, T.tolist(), chainer.datasets.TupleDataset(X, T), chainer.datasets.DictDataset(x=X, t=T), Made()]


@pytest.fixture(autouse=True)
def nothing_is_left_over():
    yield
    assert COMM.allreduce(np.ones(1)) == SIZE


@pytest.mark.parametrize("equal", [True, False])
@pytest.mark.parametrize("root", [0, SIZE - 1])
@pytest.mark.parametrize("dataset", DATASETS)
def test_each_rank_gets_its_part(dataset, root, equal):
    mine = scatter_dataset(dataset if root == RANK else None, COMM, root=root, force_equal_length=equal)
    assert isinstance(mine, chainer.datasets.SubDataset)
    begin, end = part(23, SIZE, RANK, equal)
    assert len(mine) == end - begin
    for i in range(len(mine)):
        np.testing.assert_equal(mine[i], dataset[begin + i])


@pytest.mark.parametrize("dataset", DATASETS)
def test_a_seed_gives_each_rank_the_same_samples_again(dataset):
    order = np.random.RandomState(7).permutation(23)
    for _ in range(2):
        mine = scatter_dataset(dataset if RANK == 0 else None, COMM, shuffle=True, seed=7)
        begin, end = part(23, SIZE, RANK, True)
        for i, position in enumerate(order[begin:end]):
            np.testing.assert_equal(mine[i], dataset[position])


def test_no_seed_still_shares_everything_out():
    mine = scatter_dataset(T if RANK == 0 else None, COMM, shuffle=True, force_equal_length=False)
    everything = sorted(int(t) for each in COMM.allgather_obj([mine[i] for i in range(len(mine))]) for t in each)
    assert everything == T.tolist()


def test_only_the_part_travels():
    mine = scatter_dataset(np.zeros((1000, 10)) if RANK == 0 else None, COMM)
    assert mine._dataset.nbytes <= 1000 * 10 * 8 / SIZE + 10 * 8


@pytest.mark.parametrize("size", [0, 1, SIZE, SIZE + 1])
def test_as_many_samples_as_ranks_or_fewer(size):
    mine = scatter_dataset(list(range(size)) if RANK == 0 else None, COMM)
    assert len(mine) == -(-size // SIZE)


def test_an_mpi4py_communicator_will_do():
    mine = scatter_dataset(T if RANK == 0 else None, MPI.COMM_WORLD)
    assert [int(t) for t in mine] == list(range(*part(23, SIZE, RANK, True)))
    assert scatter_index(23, MPI.COMM_WORLD) == part(23, SIZE, RANK, True)


@pytest.mark.parametrize("equal", [True, False])
@pytest.mark.parametrize("root", [0, SIZE - 1])
def test_scatter_index(root, equal):
    n = 23 if root == RANK else None
    assert scatter_index(n, COMM, root, force_equal_length=equal) == part(23, SIZE, RANK, equal)


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda: scatter_dataset(T, COMM, root=SIZE), ValueError, rf"expected root in 0\.\.{SIZE - 1}, got {SIZE}"),
        (lambda: scatter_dataset(T, COMM, root=-1), ValueError, "expected root in .* got -1"),
        (lambda: scatter_dataset(3, COMM), TypeError, "expected a dataset with a length, got int: 3"),
        (lambda: scatter_dataset(iter([]), COMM), TypeError, "expected a dataset with a length, got list_iterator"),
        (lambda: scatter_dataset(None, COMM), TypeError, "expected a dataset with a length, got NoneType"),
        (lambda: scatter_dataset(T, COMM, max_buf_len=0), ValueError, r"expected max_buf_len in 1\.\."),
        (lambda: scatter_dataset(T, COMM, max_buf_len=2**31), ValueError, r"expected max_buf_len in 1\.\."),
        (lambda: scatter_dataset(T, COMM, shuffle=True, seed=-1), ValueError, "seed|Seed"),
        (lambda: scatter_index(-1, COMM), ValueError, "expected n_total_samples of at least 0, got -1"),
        (lambda: scatter_index(1.5, COMM), TypeError, "expected an integer for n_total_samples, got float"),
        (lambda: scatter_index(3, COMM, SIZE), ValueError, r"expected root in 0\.\."),
    ],
)
def test_wrong_input_raises_on_every_rank(call, error, message):
    with pytest.raises(error, match=message):
        call()


@pytest.mark.skipif(SIZE < 2, reason="needs another rank than the root")
def test_wrong_input_at_the_root_alone_raises_on_every_rank():
    with pytest.raises(TypeError, match="expected a dataset with a length, got object"):
        scatter_dataset(object() if RANK == 0 else T, COMM)
    with pytest.raises(ValueError, match="expected root in"):
        scatter_dataset(T, COMM, root=0 if RANK == 0 else SIZE)


@pytest.mark.skipif(SIZE < 2, reason="needs another rank than the root")
@pytest.mark.parametrize("option", [{"max_buf_len": 1 << 20}, {"force_equal_length": False}])
def test_arguments_that_differ_raise_on_every_rank(option):
    """Otherwise ranks would cut the dataset differently, and some would keep memory that nobody has written to."""
    with pytest.raises(ValueError, match="expected the same root, force_equal_length and max_buf_len on every rank"):
        scatter_dataset(np.zeros((3000, 100)), COMM, **(option if RANK == 0 else {}))
