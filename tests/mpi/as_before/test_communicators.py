import chainer
import chainer.links as L
import chainermn
import numpy as np
import pytest
from mpi4py import MPI

pytestmark = pytest.mark.sizes(1, 4)

COMM = chainermn.create_communicator("naive")
RANK, SIZE = COMM.rank, COMM.size

needs_two = pytest.mark.skipif(SIZE < 2, reason="needs two ranks")

SHAPES = [(), (1,), (7,), (2, 3), (2, 3, 4)]
DTYPES = ["i4", "i8", "f2", "f4", "f8"]
OBJECTS = [0, -1.5, None, "text", {1, 2}, [], {"a": (1, [2])}, np.arange(3)]


def array(rank, shape, dtype):
    return (np.arange(np.prod(shape, dtype=int)) + 10 * rank).astype(dtype).reshape(shape)


LAYOUTS = [np.asfortranarray, np.transpose, lambda array: array[:, ::2], lambda array: array[::-1]]


def same(actual, expected):
    assert (actual.dtype, actual.shape) == (expected.dtype, expected.shape)
    np.testing.assert_array_equal(actual, expected)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES)
def test_along_the_chain_of_ranks(shape, dtype):
    data = array(0, shape, dtype)
    if RANK > 0:
        same(COMM.recv(source=RANK - 1, tag=0), data)
    if RANK < SIZE - 1:
        COMM.send(data, dest=RANK + 1, tag=0)


@needs_two
@pytest.mark.parametrize("kind", [tuple, list])
@pytest.mark.parametrize("dtype", DTYPES)
def test_there_and_back_with_tuples(kind, dtype):
    data = kind(array(i, shape, dtype) for i, shape in enumerate(SHAPES))
    if RANK == 0:
        COMM.send(data, 1, 3)
        received = COMM.recv(1, 4)
    elif RANK == 1:
        received = COMM.recv(0, 3)
        COMM.send(received, 0, 4)
    else:
        return
    assert type(received) is tuple
    for got, expected in zip(received, data, strict=True):
        same(got, expected)


@pytest.mark.parametrize("root", [0, SIZE - 1])
@pytest.mark.parametrize("dtype", ["i4", "i8", "f4", "f8"])
@pytest.mark.parametrize("shape", SHAPES)
def test_collectives(shape, dtype, root):
    mine, everyones = array(RANK, shape, dtype), [array(rank, shape, dtype) for rank in range(SIZE)]
    same(COMM.bcast(mine if RANK == root else None, root=root), everyones[root])
    gathered = COMM.gather(mine, root=root)
    assert (gathered is None) == (root != RANK)
    for found in (gathered or everyones, COMM.allgather(mine), COMM.alltoall((mine,) * SIZE)):
        for got, expected in zip(found, everyones, strict=True):
            same(got, expected)
    same(COMM.scatter(tuple(everyones) if RANK == root else None, root), mine)
    same(COMM.allreduce(mine), np.asarray(sum(everyones), dtype))
    if shape:
        stacked = np.stack(everyones)
        same(COMM.scatter(stacked if RANK == root else None, root=root), mine)


@pytest.mark.parametrize("root", [0, SIZE - 1])
@pytest.mark.parametrize("layout", LAYOUTS, ids=["Fortran", "transposed", "strided", "reversed"])
def test_arrays_that_are_not_contiguous(layout, root):
    mine, *everyones = (layout(array(rank, (SIZE, 3, 4), "f4")) for rank in (RANK, *range(SIZE)))
    many = (mine,) * SIZE
    same(COMM.bcast(mine if RANK == root else None, root=root), everyones[root])
    for found in (COMM.gather(mine, root) or everyones, COMM.allgather(mine), COMM.alltoall(many)):
        for got, expected in zip(found, everyones, strict=True):
            same(got, expected)
    same(COMM.scatter(many if RANK == root else None, root), everyones[root])
    same(COMM.allreduce(mine), sum(everyones))
    if RANK > 0:
        for got, expected in zip((*COMM.recv(RANK - 1, 1), COMM.recv(RANK - 1, 2)), everyones[:1] * 3, strict=True):
            same(got, expected)
    if RANK < SIZE - 1:
        COMM.send((everyones[0], everyones[0]), RANK + 1, 1)
        COMM.send(everyones[0], RANK + 1, 2)


def test_shapes_of_their_own():
    mine = np.full((RANK + 1, 2), RANK, "f4")
    for rank, got in enumerate(COMM.allgather(mine)):
        same(got, np.full((rank + 1, 2), rank, "f4"))
    for rank, got in enumerate(COMM.alltoall([np.full(to + RANK, RANK) for to in range(SIZE)])):
        same(got, np.full(rank + RANK, rank))


TUPLE = (np.zeros(2, "f4"),) * SIZE


@pytest.mark.parametrize(
    ("call", "error"),
    [
        (lambda: COMM.allreduce(TUPLE), TypeError),
        (lambda: COMM.allgather(1), TypeError),
        (lambda: COMM.alltoall((*TUPLE, TUPLE[0])), ValueError),
    ],
)
def test_what_is_refused(call, error):
    with pytest.raises(error):
        call()


@needs_two
def test_dtypes_that_differ():
    with pytest.raises(TypeError):
        COMM.alltoall([np.zeros(1, "f4" if rank else "f8") for rank in range(SIZE)])


@needs_two
@pytest.mark.parametrize("tag", [0, 5])
@pytest.mark.parametrize("how", ["tag", "any tag", "any source", "looked for"])
def test_objects_there_and_back(how, tag):
    def receive(source):
        if how == "tag":
            return COMM.recv_obj(source, tag=tag)
        if how == "any tag":
            return COMM.recv_obj(source, tag=MPI.ANY_TAG)
        status = MPI.Status()
        if how == "any source":
            received = COMM.recv_obj(MPI.ANY_SOURCE, status=status)
        else:
            COMM.mpi_comm.probe(source=source, tag=MPI.ANY_TAG, status=status)
            received = COMM.recv_obj(source=status.Get_source(), tag=status.Get_tag())
        assert (status.Get_source(), status.Get_tag()) == (source, tag)
        return received

    for obj in OBJECTS:
        if RANK == 0:
            COMM.send_obj(obj, dest=1, tag=tag)
            received = receive(1)
        elif RANK == 1:
            received = receive(0)
            COMM.send_obj(received, dest=0, tag=tag)
        else:
            return
        assert type(received) is type(obj)
        np.testing.assert_equal(received, obj)


class Model(chainer.Chain):
    """Has parameters of several dtypes, one that is never initialised, and one that never has a gradient."""

    def __init__(self, dtypes):
        super().__init__()
        with self.init_scope():
            for i, dtype in enumerate(dtypes):
                setattr(self, f"l{i}", L.Linear(i + 2, i + 3, initialW=chainer.initializers.Normal(dtype=dtype)))
            self.late = L.Linear(None, 3, nobias=True)
            self.unused = L.Linear(2, 2, nobias=True)
        self.unused.W.cleargrad()

    def set(self, rank):
        for i, link in enumerate(list(self.children())[:-2]):
            link.W.array[...] = link.W.grad[...] = rank + i
            link.b.array[...] = link.b.grad[...] = 2 * rank + i


@pytest.mark.parametrize("dtypes", [["f4"], ["f2"], ["f4", "f2", "f8"]])
@pytest.mark.parametrize("zero_fill", [True, False])
def test_models_again_and_again(dtypes, zero_fill):
    mean = (SIZE - 1) / 2
    model = Model(dtypes)
    for _ in range(2):
        model.set(RANK)
        COMM.bcast_data(model)
        COMM.multi_node_mean_grad(model, zero_fill)
        for i, (link, dtype) in enumerate(zip(list(model.children()), dtypes, strict=False)):
            for param, factor in ((link.W, 1), (link.b, 2)):
                np.testing.assert_array_equal(param.array, np.full(param.shape, i))
                np.testing.assert_allclose(param.grad, np.full(param.shape, factor * mean + i))
            assert link.W.dtype == link.W.grad.dtype == np.dtype(dtype)
        assert model.late.W.array is None
        assert (model.unused.W.grad is None) == (not zero_fill)
        model.unused.W.cleargrad()
    model.set(RANK)
    COMM.broadcast_data(model)
    with pytest.warns(DeprecationWarning, match="allreduce_grad"):
        COMM.allreduce_grad(model, zero_fill=zero_fill)
    np.testing.assert_allclose(model.l0.b.grad, np.full(3, 2 * mean))


def test_gradients_that_only_some_ranks_have_count_as_zeros():
    model = L.Linear(2, 3)
    for _ in range(2):
        model.W.grad = np.full((3, 2), 6, "f4") if RANK % 2 else None
        model.b.grad = np.full(3, RANK, "f4")
        COMM.multi_node_mean_grad(model, zero_fill=True)
        np.testing.assert_allclose(model.W.grad, np.full((3, 2), 6 * (SIZE // 2) / SIZE))
        np.testing.assert_allclose(model.b.grad, np.full(3, (SIZE - 1) / 2))


def test_settings():
    comm = chainermn.create_communicator("naive", MPI.COMM_WORLD)
    assert comm.batched_copy is comm.get_config("batched_copy") is True
    assert chainermn.create_communicator("naive", batched_copy=False).batched_copy is False
    with pytest.raises(TypeError, match="nonsense"):
        chainermn.create_communicator("naive", nonsense=1)
    for value in (False, True):
        comm.set_config("batched_copy", value)
        assert comm.get_config("batched_copy") is comm.batched_copy is value
        assert comm.get_config()["batched_copy"] is value
    comm.set_config("batched_copy", False)
    comm.set_config("batched_copy")
    assert comm.batched_copy is True
    with pytest.raises(ValueError, match="nonsense"):
        comm.set_config("nonsense")


def test_settings_of_a_scope():
    comm = chainermn.create_communicator("naive")
    assert not comm.within_config_scope
    with comm.config_scope():
        assert comm.within_config_scope
        comm.own = "a"
    assert not comm.within_config_scope
    assert comm.own == comm.get_config("own") == comm.get_config()["own"] == "a"


def test_split():
    part = COMM.split(color=RANK % 2, key=-RANK)
    members = [rank for rank in range(SIZE) if rank % 2 == RANK % 2][::-1]
    assert (part.size, part.rank, type(part)) == (len(members), members.index(RANK), type(COMM))
    for rank, got in zip(members, part.alltoall([np.array([RANK])] * part.size), strict=True):
        same(got, np.array([rank]))


def test_names():
    assert type(COMM) is chainermn.communicators.naive_communicator.NaiveCommunicator
    with pytest.raises(ValueError, match="nonsense"):
        chainermn.create_communicator("nonsense")
    hosts = MPI.COMM_WORLD.allgather(MPI.Get_processor_name())
    assert (COMM.intra_rank, COMM.intra_size) == (hosts[:RANK].count(hosts[RANK]), hosts.count(hosts[RANK]))
    assert (COMM.inter_rank, COMM.inter_size) == (list(dict.fromkeys(hosts)).index(hosts[RANK]), len(set(hosts)))
