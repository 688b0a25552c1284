"""Arrays of one rank are sent to all others, and a failure on one rank is reported on all."""

import numpy as np
import pytest
from fake_model import Model, Param
from hypothesis import given
from hypothesis import strategies as st
from mpi4py import MPI

from mn_comm import CommunicatorBase, create_communicator
from mn_comm.gradients import owned
from mn_comm.ranks.intracomm import Ranks

pytestmark = pytest.mark.sizes(1, 3)

WORLD = MPI.COMM_WORLD
RANK, SIZE = WORLD.rank, WORLD.size
NAMES = ["naive", "flat", "hierarchical", "two_dimensional", "single_node", "non_cuda_aware", "dummy"]
SHAPES = [(), (0, 3), (5,), (300, 400), (7, 3), (90_001,), (2, 3, 4), (11,)]
DTYPES = ["f4", "f4", "f2", "f4", "f8", "f8", "i1", ">i4"]

several = pytest.mark.skipif(SIZE < 2, reason="needs two ranks that differ")


@pytest.fixture(scope="module")
def comms():
    made = {name: create_communicator(name) for name in NAMES}
    yield made
    for comm in made.values():
        comm.finalize()


@pytest.fixture
def small_chunks(monkeypatch):
    """Use several buckets even for little data."""
    monkeypatch.setattr(owned, "_BUCKET_BYTES", 64 * 1024 * SIZE)


def arrays(seed, owners, layout=lambda array: array):
    """Return arrays that the ranks own, with their contents on each rank before, and on all ranks afterwards."""
    random = np.random.RandomState(seed)
    expected = [np.asarray(random.uniform(-99, 99, s)).astype(d) for s, d in zip(SHAPES, DTYPES, strict=True)]
    pairs = zip(expected, owners, strict=True)
    mine = [layout(each.copy() if owner == RANK else np.ones_like(each)) for each, owner in pairs]
    return [(f"a{i}", array) for i, array in enumerate(mine)], expected


def check(comm, owners, seed=0, layout=lambda array: array):
    named, expected = arrays(seed, owners, layout)
    comm.all_gather_owned(named, owners)
    for (name, array), each in zip(named, expected, strict=True):
        assert array.dtype == each.dtype
        np.testing.assert_array_equal(array, each, err_msg=name)


@pytest.mark.parametrize("name", NAMES)
def test_every_communicator(comms, name):
    for seed in range(4):
        check(comms[name], [(i + seed) % SIZE for i in range(len(SHAPES))], seed)
    check(comms[name], [SIZE - 1] * len(SHAPES))
    comms[name].all_gather_owned([], [])


@several
def test_many_arrays_are_sent_together_by_every_communicator(comms, monkeypatch):
    calls = []
    gather = Ranks.Allgatherv
    monkeypatch.setattr(Ranks, "Allgatherv", lambda *args: (calls.append(0), gather(*args)))
    owners = [i % SIZE for i in range(300)]
    for comm in comms.values():
        named = [(str(i), np.full(5, RANK, "f4")) for i in range(300)]
        comm.all_gather_owned(named, owners)
        assert [int(array[0]) for _, array in named] == owners
    assert len(calls) <= len(comms)


@several
def test_another_operation_on_one_rank(comms):
    for comm in comms.values():
        with pytest.raises(ValueError, match="expected all ranks in the same operation, got all_gather_owned on rank"):
            if RANK == 0:
                comm.all_gather_owned([("a", np.zeros(3))], [0])
            else:
                comm.bcast_data(Model(a=Param(np.zeros(3, "f4"), None)))


@pytest.mark.parametrize("name", ["naive", "two_dimensional"])
def test_several_rounds(small_chunks, name):
    comm = create_communicator(name)
    for seed in range(3):
        check(comm, [(i + seed) % SIZE for i in range(len(SHAPES))], seed)
    comm.finalize()


@pytest.mark.parametrize("count", [2, 3])
@pytest.mark.parametrize("name", ["hierarchical", "two_dimensional", "flat"])
def test_several_nodes(small_chunks, on_nodes, name, count):
    if count > SIZE:
        pytest.skip("fewer ranks than nodes")
    comm = on_nodes(name, count)
    assert comm.inter_size == count
    for seed in range(3):
        check(comm, [(i + seed) % SIZE for i in range(len(SHAPES))], seed)
        failed(comm)
        differ(comm)


def strided(array):
    wide = np.zeros((*array.shape, 2), array.dtype)
    wide[..., 0] = array
    return wide[..., 0]


@pytest.mark.parametrize("layout", [np.asfortranarray, strided, lambda array: array[::-1] if array.ndim else array])
def test_arrays_of_any_layout_are_written_in_place(comms, layout):
    named, expected = arrays(0, [0] * len(SHAPES), np.array)
    views = [(name, layout(array)) for name, array in named]
    if RANK == 0:
        expected = [np.array(layout(array)) for array in expected]
    expected = WORLD.bcast(expected)
    comms["two_dimensional"].all_gather_owned(views, [0] * len(views))
    for (name, view), each in zip(views, expected, strict=True):
        np.testing.assert_array_equal(view, each, err_msg=name)


@given(st.lists(st.tuples(st.integers(0, 70_000), st.integers(0, 7)), max_size=12))
def test_any_sizes_and_owners(comms, chosen):
    owners = [owner % SIZE for _, owner in chosen]
    named = [(str(i), np.full(n, i if owners[i] == RANK else -1)) for i, (n, _) in enumerate(chosen)]
    comms["two_dimensional"].all_gather_owned(named, owners)
    for i, (_, array) in enumerate(named):
        assert (array == i).all()


def failed(comm):
    """Check that all ranks raise the exception of one rank, and still have the arrays."""
    array = np.full(3, RANK)
    failure = ZeroDivisionError("that was zero") if RANK == SIZE - 1 else None
    with pytest.raises(ZeroDivisionError, match="that was zero"):
        comm.all_gather_owned([("a", array)], [SIZE - 1], failure)
    assert (array == SIZE - 1).all()


def differ(comm):
    """Check that all ranks raise if they have different arrays, and can continue."""
    if SIZE == 1:
        return
    with pytest.raises(
        ValueError, match=r"first at a: shape \(3,\) and dtype float64 \(owned by rank 0\) on rank 0, shape"
    ):
        comm.all_gather_owned([("a", np.zeros(3 + (RANK == SIZE - 1) * 50_000))], [0])
    with pytest.raises(ValueError, match=r"\(owned by rank 0\) on rank 0, .* \(owned by rank 1\) on rank"):
        comm.all_gather_owned([("a", np.zeros(3))], [int(RANK == SIZE - 1)])
    with pytest.raises(ValueError, match=r"missing on rank 0, shape"):
        comm.all_gather_owned([("a", np.zeros(3))] * (RANK == SIZE - 1), [0] * (RANK == SIZE - 1))


@pytest.mark.parametrize("name", NAMES)
def test_failures(comms, name):
    for _ in range(2):
        failed(comms[name])
        differ(comms[name])
        check(comms[name], [0] * len(SHAPES))


def test_an_array_that_must_not_be_written_to(comms):
    array = np.zeros(100_000)
    array.flags.writeable = RANK != SIZE - 1
    for comm in comms.values():
        with pytest.raises(ValueError, match="expected arrays that can be written to, got a read-only one: a"):
            comm.all_gather_owned([("a", array)], [0])


WRONG = {
    "no array": ([("a", [0.0])], [0], TypeError, "all_gather_owned: a: expected a numpy.ndarray, got list"),
    "objects": ([("a", np.zeros(3, object))], [0], TypeError, "expected a dtype without Python objects"),
    "a mask": ([("a", np.ma.zeros(3))], [0], TypeError, "expected an array without a mask"),
    "no rank": ([("a", np.zeros(3))], [SIZE], ValueError, rf"expected owner of a in 0\.\.{SIZE - 1}, got {SIZE}"),
    "no owner": ([("a", np.zeros(3))], [], ValueError, "expected an owner for each of 1 arrays, got 0"),
}


@pytest.mark.parametrize("ranks", [range(SIZE), [SIZE - 1]])
@pytest.mark.parametrize("wrong", WRONG)
def test_wrong_arguments(comms, wrong, ranks):
    named, owners, error, message = WRONG[wrong]
    if RANK not in ranks:
        named, owners = [("a", np.zeros(100_000))], [0]
    for comm in comms.values():
        with pytest.raises(error, match=message):
            comm.all_gather_owned(named, owners)
        check(comm, [0] * len(SHAPES))


@several
def test_dtypes_of_the_same_length_differ(comms):
    array = np.zeros(3, "f4, f4" if RANK == 0 else "i4, i4")
    for comm in comms.values():
        with pytest.raises(ValueError, match="expected the same parameters on every rank, but rank 1 differs"):
            comm.all_gather_owned([("a", array)], [0])


def test_communicators_that_cannot():
    class Other(CommunicatorBase):
        """Has no attributes of its own."""

    Other.__abstractmethods__ = frozenset()
    with pytest.raises(NotImplementedError, match="Other cannot gather arrays that some ranks own"):
        Other().all_gather_owned([], [])
