import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from mn_comm import create_communicator
from mn_comm.collectives import pieces

pytestmark = pytest.mark.sizes(1)

COMM = create_communicator("naive")
RANK, SIZE = COMM.rank, COMM.size

NUMBERS = ["i1", "u2", "i4", "i8", "f2", "f4", "f8", "c8", "c16"]
ANYTHING = [*NUMBERS, "?", "U5", "S3", "M8[ms]", "g", ">f4", [("a", "i4"), ("b", "f8", (2,))]]

shapes = hnp.array_shapes(min_dims=0, max_dims=3, min_side=0, max_side=5)


def make(shape, dtype, rank):
    """Return an array that is different on every rank, and that every rank can compute for each rank."""
    size = int(np.prod(shape))
    # Sums over four ranks fit into int8; how overflows are handled depends on the MPI library.
    bits = np.random.RandomState(rank).randint(0, 30, (size,))
    dtype = np.dtype(dtype)
    if dtype.names:
        array = np.zeros(size, dtype)
        array["a"] = bits
        return array.reshape(shape)
    return bits.astype(dtype).reshape(shape)


def same(actual, expected):
    assert isinstance(actual, np.ndarray)
    assert actual.dtype == expected.dtype
    assert actual.shape == expected.shape
    np.testing.assert_array_equal(actual, expected)


@given(shape=shapes, dtype=st.sampled_from(ANYTHING), root=st.integers(0, SIZE - 1))
def test_bcast(shape, dtype, root):
    data = make(shape, dtype, RANK)
    received = COMM.bcast(data if root == RANK else None, root=root)
    same(received, make(shape, dtype, root))
    assert (received is data) == (root == RANK)


@given(shape=shapes, dtype=st.sampled_from(ANYTHING), root=st.integers(0, SIZE - 1))
def test_gather(shape, dtype, root):
    # Each rank's array has a different shape.
    gathered = COMM.gather(make((RANK, *shape), dtype, RANK), root=root)
    if root != RANK:
        assert gathered is None
        return
    assert isinstance(gathered, tuple)
    for rank, array in enumerate(gathered):
        same(array, make((rank, *shape), dtype, rank))


@given(shape=shapes, dtype=st.sampled_from(ANYTHING))
def test_allgather(shape, dtype):
    for rank, array in enumerate(COMM.allgather(make((RANK, *shape), dtype, RANK))):
        same(array, make((rank, *shape), dtype, rank))


@given(shape=shapes, dtype=st.sampled_from(ANYTHING), root=st.integers(0, SIZE - 1))
def test_scatter_of_a_tuple(shape, dtype, root):
    xs = tuple(make((rank, *shape), dtype, rank) for rank in range(SIZE)) if root == RANK else None
    same(COMM.scatter(xs, root=root), make((RANK, *shape), dtype, RANK))


@given(shape=shapes, dtype=st.sampled_from(ANYTHING), root=st.integers(0, SIZE - 1))
def test_scatter_of_an_array_along_its_first_axis(shape, dtype, root):
    whole = make((SIZE, *shape), dtype, 0)
    same(COMM.scatter(whole if root == RANK else None, root=root), np.asarray(whole[RANK, ...]))


@given(shape=shapes, dtype=st.sampled_from(ANYTHING))
def test_alltoall(shape, dtype):
    received = COMM.alltoall([make((dest, *shape), dtype, RANK) for dest in range(SIZE)])
    assert isinstance(received, tuple)
    for source, array in enumerate(received):
        same(array, make((RANK, *shape), dtype, source))


@given(shape=shapes, dtype=st.sampled_from(NUMBERS))
def test_allreduce(shape, dtype):
    mine = make(shape, dtype, RANK)
    kept = mine.copy()
    expected = sum(make(shape, "i8", rank) for rank in range(SIZE))
    same(COMM.allreduce(mine), np.asarray(expected, dtype))
    same(mine, kept)


OPERATIONS = {"sum": np.add, "prod": np.multiply, "max": np.maximum, "min": np.minimum}


def combined(op, shape, dtype):
    """Return the combination of the ranks' arrays, with elements 1, 2 or 3: products over four ranks fit into int8."""
    arrays = [few(shape, dtype, rank) for rank in range(SIZE)]
    return np.asarray(OPERATIONS[op].reduce(arrays, axis=0, dtype=np.dtype(dtype)))


def few(shape, dtype, rank):
    return np.asarray(make(shape, "i8", rank) % 3 + 1, dtype)


def has_order(dtype, op):
    return np.dtype(dtype).kind != "c" or op in ("sum", "prod")


@given(
    shape=shapes, dtype=st.sampled_from(NUMBERS), op=st.sampled_from(list(OPERATIONS)), root=st.integers(0, SIZE - 1)
)
def test_reductions_by_every_operation(shape, dtype, op, root):
    mine = few(shape, dtype, RANK)
    if not has_order(dtype, op):
        for reduction in (COMM.allreduce, COMM.reduce, COMM.reduce_scatter):
            with pytest.raises(TypeError, match=f"numbers that have an order for op='{op}', got dtype complex"):
                reduction(mine, op=op)
        return
    same(COMM.allreduce(mine, op=op), combined(op, shape, dtype))
    at_root = COMM.reduce(mine, op=op, root=root)
    if root == RANK:
        same(at_root, combined(op, shape, dtype))
    else:
        assert at_root is None
    same(mine, few(shape, dtype, RANK))


def test_the_name_of_an_operation_may_be_any_string():
    assert COMM.allreduce(np.ones(2), op=np.str_("sum") if RANK == 0 else "sum")[0] == SIZE


@pytest.mark.parametrize("dtype", ["f2", "f4", "f8", "g"])
@pytest.mark.parametrize("op", ["sum", "prod", "max", "min"])
@pytest.mark.parametrize("shape", [(), (3,), (7, 5)])
def test_nan_is_never_hidden(op, dtype, shape):
    for rank in range(SIZE):
        whole = np.ones((SIZE, *shape), dtype)
        at = tuple(np.random.RandomState(rank).randint(0, whole.shape))
        if rank == RANK:
            whole[at] = np.nan
        expected = np.zeros(whole.shape, bool)
        expected[at] = True
        np.testing.assert_array_equal(np.isnan(COMM.allreduce(whole, op=op)), expected)
        np.testing.assert_array_equal(np.isnan(COMM.reduce_scatter(whole, op=op)), expected[RANK : RANK + 1])
        at_root = COMM.reduce(whole, op=op, root=SIZE - 1)
        if RANK == SIZE - 1:
            np.testing.assert_array_equal(np.isnan(at_root), expected)
    assert np.isnan(COMM.allreduce(np.array(np.nan if RANK == 0 else 1.0), op=op))


@given(length=st.integers(0, 4), shape=shapes, dtype=st.sampled_from(NUMBERS), op=st.sampled_from(list(OPERATIONS)))
def test_reduce_scatter(length, shape, dtype, op):
    shape = (length * SIZE, *shape)
    if has_order(dtype, op):
        block = slice(RANK * length, (RANK + 1) * length)
        same(COMM.reduce_scatter(few(shape, dtype, RANK), op=op), combined(op, shape, dtype)[block])


def test_a_barrier_waits_for_all():
    counted = COMM.mpi_comm.allreduce(1)
    COMM.barrier()
    assert counted == SIZE


def test_what_a_communicator_says_it_is():
    hosts = "1 host" if COMM.inter_size == 1 else f"{COMM.inter_size} hosts"
    assert repr(COMM) == f"<NaiveCommunicator 'naive': rank {RANK} of {SIZE}, on {hosts}>"


def test_half_precision_is_added_up_in_float32():
    # In float16, 2048 + 1 is 2048 again.
    mine = np.float16([2048 if RANK == 0 else 1])
    total = COMM.allreduce(mine)
    assert total.dtype == np.float16
    assert total[0] == np.float16(2048 + SIZE - 1)


def layouts():
    base = np.arange(24, dtype="f4").reshape(2, 3, 4)
    return [base.T, base[:, ::2], base[::-1], np.asfortranarray(base), np.broadcast_to(np.float32(3), (2, 2))]


@pytest.mark.parametrize("which", range(5))
def test_arrays_of_any_memory_layout(which):
    array = layouts()[which]
    same(COMM.bcast(array if RANK == 0 else None), array)
    same(COMM.allreduce(array), array * SIZE)
    for other in COMM.allgather(array):
        same(other, array)
    for other in COMM.alltoall([array] * SIZE):
        same(other, array)
    same(COMM.scatter([array] * SIZE if RANK == 0 else None), array)


@pytest.mark.parametrize("ranks", [range(SIZE), [SIZE - 1]])
def test_elements_that_are_not_aligned(ranks):
    array = np.ones(2 * SIZE, "f4")
    if RANK in ranks:
        array = np.frombuffer(b"header!" + array.tobytes(), "f4", offset=7)
        assert not array.flags.aligned
    same(COMM.allreduce(array), array * SIZE)
    same(COMM.reduce_scatter(array), array[:2] * SIZE)
    reduced = COMM.reduce(array)
    if RANK == 0:
        same(reduced, array * SIZE)
    for other in COMM.allgather(array):
        same(other, array)


def test_elements_without_bytes():
    array = np.zeros((2, RANK), np.dtype([]))
    for rank, other in enumerate(COMM.allgather(array)):
        assert (other.shape, other.dtype) == ((2, rank), array.dtype)


def test_received_arrays_are_the_receivers_own():
    part = COMM.scatter(np.zeros((SIZE, 2)) if RANK == 0 else None)
    part += RANK
    received = COMM.alltoall([np.zeros(2)] * SIZE)
    for array in received:
        array += RANK
    same(part, np.full(2, float(RANK)))


def test_long_arrays_travel_in_pieces(monkeypatch):
    # The limit is lowered, rather than using arrays longer than 2**30 bytes; tests/jobs has one of these.
    monkeypatch.setattr(pieces, "PIECE_BYTES", 24)
    test = np.arange(50.0) + RANK
    same(COMM.bcast(test, root=SIZE - 1), np.arange(50.0) + SIZE - 1)
    for rank, array in enumerate(COMM.allgather(test)):
        same(array, np.arange(50.0) + rank)
    same(COMM.allreduce(test), np.arange(50.0) * SIZE + sum(range(SIZE)))
    total = COMM.reduce(test, root=SIZE - 1)
    assert total is None or (total == np.arange(50.0) * SIZE + sum(range(SIZE))).all()
    tiled = np.tile(test, (SIZE, 1))
    same(COMM.reduce_scatter(tiled, op="max"), (np.arange(50.0) + SIZE - 1).reshape(1, 50))
    for source, array in enumerate(COMM.alltoall([test] * SIZE)):
        same(array, np.arange(50.0) + source)
    gathered = COMM.gather(test)
    if RANK == 0:
        for rank, array in enumerate(gathered):
            same(array, np.arange(50.0) + rank)
    same(COMM.scatter([test] * SIZE if RANK == 0 else None), np.arange(50.0))


def test_a_description_too_long_for_its_frame():
    dtype = np.dtype([(f"a_field_with_a_long_name_{i}", "f4") for i in range(20)])
    array = np.zeros(3, dtype)
    array["a_field_with_a_long_name_7"] = RANK
    received = COMM.bcast(array, root=SIZE - 1)
    assert received.dtype == dtype
    assert (received["a_field_with_a_long_name_7"] == SIZE - 1).all()
    for rank, other in enumerate(COMM.allgather(array)):
        assert (other["a_field_with_a_long_name_7"] == rank).all()


@pytest.mark.parametrize("make_comm", [lambda: COMM, lambda: COMM.split(0, RANK)])
def test_traffic_of_the_caller_on_mpi_comm_does_not_meet_that_of_collectives(make_comm):
    comm = make_comm()
    request = comm.mpi_comm.irecv(source=(RANK - 1) % SIZE)
    for rank, array in enumerate(comm.allgather(np.array(RANK))):
        same(array, np.array(rank))
    comm.alltoall([np.zeros(3)] * SIZE)
    comm.gather(np.zeros(3))
    comm.mpi_comm.send("mine", dest=(RANK + 1) % SIZE)
    assert request.wait() == "mine"
