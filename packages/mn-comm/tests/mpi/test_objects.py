import numpy as np
import pytest

from mn_comm import create_communicator

pytestmark = pytest.mark.sizes(1, 3)

COMM = create_communicator("naive")
RANK, SIZE = COMM.rank, COMM.size

OBJECTS = [
    None,
    0,
    "text",
    {"a": [1, (2,)]},
    np.arange(5),
    {"big": np.zeros(100_000), "f": np.asfortranarray(np.eye(3))},
]


def same(actual, expected):
    np.testing.assert_equal(actual, expected)


@pytest.mark.parametrize("obj", OBJECTS)
@pytest.mark.parametrize("max_buf_len", [1 << 28, 1000])
def test_bcast_obj(obj, max_buf_len):
    root = SIZE - 1
    received = COMM.bcast_obj(obj if root == RANK else None, max_buf_len=max_buf_len, root=root)
    same(received, obj)


def test_only_the_root_of_bcast_obj_says_how_long_pieces_are():
    text = "a" * 10_000
    received = COMM.bcast_obj(text, max_buf_len=1000) if RANK == 0 else COMM.bcast_obj(None)
    assert received == text
    assert COMM.allgather_obj(RANK) == list(range(SIZE))  # no piece is left


@pytest.mark.parametrize("obj", OBJECTS)
def test_gather_obj_allgather_obj_scatter_obj(obj):
    gathered = COMM.gather_obj((RANK, obj), root=SIZE - 1)
    same(gathered, [(rank, obj) for rank in range(SIZE)] if RANK == SIZE - 1 else None)
    same(COMM.allgather_obj((RANK, obj)), [(rank, obj) for rank in range(SIZE)])
    same(COMM.scatter_obj([(rank, obj) for rank in range(SIZE)] if RANK == 0 else None), (RANK, obj))


@pytest.mark.parametrize("shortest", [0, SIZE - 1])
def test_objects_of_different_lengths(shortest):
    """Short objects travel in another way than long ones."""
    objs = [{"rank": rank, "x": np.full(1 if rank == shortest else 100_000 * rank, rank)} for rank in range(SIZE)]
    same(COMM.allgather_obj(objs[RANK]), objs)
    for root in range(SIZE):
        same(COMM.gather_obj(objs[RANK], root), objs if root == RANK else None)
        same(COMM.scatter_obj(objs if root == RANK else None, root), objs[RANK])


@pytest.mark.parametrize("length", [4, 100_000])
def test_received_arrays_can_be_written_to_and_are_nobody_elses(length):
    mine = np.zeros(length)
    received = [*COMM.allgather_obj(mine), COMM.scatter_obj([mine] * SIZE if RANK == 0 else None)]
    received += COMM.gather_obj(mine) or []
    sent = COMM.bcast_obj(mine)
    received += [sent] if RANK else []
    for each in received:
        assert not each.any()
        each[:] = 1
    assert not mine.any()


class NotFor:
    """Cannot be unpickled on one rank."""

    def __init__(self, rank):
        if rank == RANK:
            raise ValueError("not here")
        self.args = (rank,)

    def __reduce__(self):
        return NotFor, self.args


@pytest.mark.skipif(SIZE < 2, reason="every rank unpickles its own object, too")
@pytest.mark.parametrize("call", [COMM.gather_obj, COMM.allgather_obj])
def test_an_object_that_one_rank_cannot_unpickle_leaves_no_other_rank_waiting(call):
    # Rank 0 gets the first object first, and long objects of the other ranks after it.
    obj = np.zeros(100_000) if RANK else NotFor(-1)
    if RANK == 0:
        obj.args = (0,)
        with pytest.raises(ValueError, match="not here"):
            call(obj)
    else:
        call(obj)
    assert COMM.allreduce_obj(1) == SIZE


def test_allreduce_obj_adds_up_in_the_order_of_ranks():
    assert COMM.allreduce_obj([RANK]) == list(range(SIZE))
    assert COMM.allreduce_obj(0.1) == sum([0.1] * (SIZE - 1), 0.1)
    np.testing.assert_array_equal(COMM.allreduce_obj(np.array([RANK])), [sum(range(SIZE))])


@pytest.mark.parametrize("culprit", [0, SIZE - 1])
@pytest.mark.parametrize("call", [COMM.gather_obj, COMM.allgather_obj])
def test_an_object_that_cannot_be_pickled_raises_on_every_rank(call, culprit):
    with pytest.raises(Exception, match=r"lambda|local object") as caught:
        call((lambda: None) if culprit == RANK else 1)
    assert (f"on rank {culprit}" in str(caught.value)) == (culprit != RANK)


class Unpicklable(int):
    def __add__(self, other):
        return self

    __radd__ = __add__

    def __reduce_ex__(self, protocol):
        raise TypeError("this one stays here")


@pytest.mark.skipif(SIZE < 2, reason="needs somebody to add to")
@pytest.mark.parametrize("culprit", range(SIZE))
@pytest.mark.parametrize(
    ("wrong", "message"), [("x", "unsupported operand|concatenate"), (Unpicklable(), "stays here")]
)
def test_objects_that_cannot_be_added_up_raise_on_every_rank(culprit, wrong, message):
    with pytest.raises(TypeError, match=message):
        COMM.allreduce_obj(wrong if culprit == RANK else 1)
    assert COMM.allreduce_obj(1) == SIZE


def test_objects_from_and_to_mpi4py():
    """Scripts mix the methods with those of ``comm.mpi_comm``."""
    thing = {"a": np.arange(3), "b": [1, "x"]}
    for send, recv in (
        (COMM.send_obj, lambda source: COMM.mpi_comm.recv(source=source)),
        (COMM.mpi_comm.send, COMM.recv_obj),
    ):
        if RANK == 0 and SIZE > 1:
            send(thing, 1)
        elif RANK == 1:
            received = recv(0)
            np.testing.assert_array_equal(received["a"], thing["a"])
            assert received["b"] == thing["b"]


def test_bcast_obj_of_what_cannot_be_pickled_raises_on_every_rank():
    with pytest.raises(Exception, match=r"lambda|local object"):
        COMM.bcast_obj((lambda: None) if RANK == 0 else None)


def test_a_wrong_number_of_objects_raises_on_every_rank():
    with pytest.raises(ValueError, match=f"expected {SIZE} objects, one for each rank, got {SIZE + 1}"):
        COMM.scatter_obj([None] * (SIZE + 1) if RANK == 0 else None)


@pytest.mark.parametrize("limit", [0, -1])
def test_a_max_buf_len_below_one_byte(limit):
    with pytest.raises(ValueError, match=f"expected max_buf_len of at least 1 byte, got {limit}"):
        COMM.bcast_obj(1, max_buf_len=limit)
