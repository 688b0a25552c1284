import chainer
import chainer.functions as F
import chainer.links as L
import chainermn
import chainermn.functions as MF
import numpy as np
import pytest
from chainer import gradient_check

COMM = chainermn.create_communicator("naive")
RANK, SIZE = COMM.rank, COMM.size
NEXT, PREVIOUS = (RANK + 1) % SIZE, (RANK - 1) % SIZE

needs_two = pytest.mark.skipif(SIZE < 2, reason="needs two ranks")


def value(rank, shape=(2, 3), dtype="f8"):
    return np.random.RandomState(rank).uniform(-1, 1, shape).astype(dtype)


def at_root(root, y, x):
    """``y`` at the root; elsewhere ``x``, with ``y`` in its graph."""
    return y if RANK == root else x + 0 * F.sum(y)


def gathered(x, root):
    ys = MF.gather(COMM, x, root)
    return ys[root] + 0 * sum(ys) if RANK == root else MF.pseudo_connect(ys, x)[0]


# Each returns its own argument, after it has been sent to other ranks.
THERE_AND_BACK = {
    "alltoall": lambda x, root: sum(MF.alltoall(COMM, MF.alltoall(COMM, [x] * SIZE))) / SIZE,
    "allgather": lambda x, root: sum(y * float(rank == RANK) for rank, y in enumerate(MF.allgather(COMM, x))),
    "bcast": lambda x, root: at_root(root, MF.bcast(COMM, x, root), x),
    "gather": gathered,
    "scatter": lambda x, root: at_root(root, MF.scatter(COMM, [x] * SIZE if RANK == root else None, root), x),
}


@pytest.mark.parametrize("root", [0, SIZE - 1])
@pytest.mark.parametrize("name", THERE_AND_BACK)
def test_numerical_gradients(name, root):
    def function(x):
        y = THERE_AND_BACK[name](x, root)
        np.testing.assert_allclose(y.array, x.array)
        return y * y

    gradient_check.check_backward(function, value(RANK), value(10 + RANK), dtype="d", rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("kind", [tuple, list])
@pytest.mark.parametrize("dtype", ["f2", "f4", "f8"])
def test_alltoall_of_many(kind, dtype):
    xs = kind(chainer.Variable(value(10 * RANK + to, dtype=dtype)) for to in range(SIZE))
    ys = MF.alltoall(COMM, xs)
    for rank, y in enumerate(ys):
        np.testing.assert_array_equal(y.array, value(10 * rank + RANK, dtype=dtype))
    sum(F.mean_squared_error(y, np.zeros_like(y.array)) for y in ys).backward()
    for x in xs:
        assert x.grad.dtype == np.dtype(dtype)
        np.testing.assert_allclose(x.grad, x.array / 3, rtol=1e-2)
    with pytest.raises(ValueError):
        MF.alltoall(COMM, xs[1:])


@pytest.mark.parametrize("kind", [np.asarray, chainer.Variable], ids=["array", "variable"])
@pytest.mark.parametrize("shape", [(2,), (3, 2)])
def test_one_array_for_all_ranks(shape, kind):
    """Each rank gets its own slice along the first axis."""
    given = [value(rank, (SIZE, *shape)) for rank in range(SIZE)]
    mine = kind(given[RANK])
    for rank, y in enumerate(tuple_of(MF.alltoall(COMM, mine))):
        np.testing.assert_array_equal(y.array, given[rank][RANK])
    y = MF.scatter(COMM, mine if RANK == SIZE - 1 else None, SIZE - 1)
    np.testing.assert_array_equal(y.array, given[-1][RANK])
    if isinstance(mine, chainer.Variable):
        F.sum((RANK + 2) * y).backward()
        if RANK == SIZE - 1:
            np.testing.assert_array_equal(mine.grad, np.broadcast_to(np.arange(2, SIZE + 2), (*shape[::-1], SIZE)).T)
    with pytest.raises(ValueError):
        MF.alltoall(COMM, kind(np.zeros((SIZE + 1, 2))))


def tuple_of(ys):
    """For one rank the old one returns the Variable itself."""
    return ys if isinstance(ys, tuple) else (ys,)


@pytest.mark.parametrize("call", [lambda x: MF.send(x, COMM, RANK), lambda x: MF.recv(COMM, RANK)])
def test_a_rank_cannot_talk_to_itself(call):
    with pytest.raises(ValueError):
        call(chainer.Variable(value(0)))


def around(x, model=F.identity, **options):
    """Send through the models of all ranks, one after the other; return what came back, or what reaches it."""
    if RANK == 0:
        return MF.recv(COMM, PREVIOUS, delegate_variable=MF.send(model(x), COMM, NEXT), **options)
    received = MF.recv(COMM, PREVIOUS, **options)
    if isinstance(received, tuple):
        received = tuple(model(each) for each in received)
    else:
        received = model(received)
    return MF.send(received, COMM, NEXT)


@needs_two
def test_an_array_goes_around():
    x = value(0)
    y = around(x)
    if RANK == 0:
        assert isinstance(y, chainer.Variable)
        y = F.mean_squared_error(y, x)
        assert y.array == 0
    y.backward()


@needs_two
@pytest.mark.parametrize("retain", [True, False])
def test_gradients_around_the_ring(retain):
    models = [L.Linear(3, 3, nobias=True, initialW=value(rank, (3, 3), "f4")) for rank in range(SIZE)]
    x = value(7, dtype="f4")
    expected = x
    for model in models:
        expected = model(expected)
    for model in models:
        model.cleargrads()
    F.mean_squared_error(expected, x).backward()
    grads = [model.W.grad.copy() for model in models]
    mine = models[RANK]
    for _ in range(2):
        mine.cleargrads()
        y = around(x, mine)
        received = y
        if RANK == 0:
            np.testing.assert_allclose(y.array, expected.array, rtol=1e-5)
            y = F.mean_squared_error(y, x)
        y.backward(retain_grad=retain)
        np.testing.assert_allclose(mine.W.grad, grads[RANK], rtol=1e-4, atol=1e-7)
        if RANK == 0:
            assert (received.grad is not None) is retain


@needs_two
@pytest.mark.parametrize("length", [1, 2, 5])
@pytest.mark.parametrize("kind", [tuple, list])
def test_tuples_go_around(kind, length):
    xs = kind(chainer.Variable(value(i, (i + 1, 2))) for i in range(length))
    ys = around(xs, lambda x: x if RANK == 0 else 2 * x, force_tuple=True)
    factor = 2.0 ** (SIZE - 1)
    if RANK == 0:
        assert isinstance(ys, tuple)
        assert len(ys) == length
        for x, y in zip(xs, ys, strict=True):
            np.testing.assert_array_equal(y.array, factor * x.array)
        sum(F.sum((i + 1) * y) for i, y in enumerate(ys)).backward()
        for i, x in enumerate(xs):
            np.testing.assert_array_equal(x.grad, np.full(x.shape, factor * (i + 1)))
    else:
        ys.backward()


@needs_two
@pytest.mark.parametrize("tag", [0, 9])
def test_a_part_of_the_graph_that_is_joined_by_hand(tag):
    x = chainer.Variable(value(RANK))
    if RANK == 0:
        phi = MF.send(3 * x, COMM, 1, tag=tag)
        y = chainer.Variable(value(5))
        (joined,) = MF.pseudo_connect(phi, y)
        F.sum(2 * joined).backward()
        np.testing.assert_array_equal(y.grad, np.full((2, 3), 2))
        np.testing.assert_array_equal(x.grad, np.full((2, 3), 12))
    elif RANK == 1:
        F.sum(4 * MF.recv(COMM, 0, tag=tag)).backward()


@needs_two
def test_to_every_other_rank_and_back():
    x = chainer.Variable(value(0))
    if RANK == 0:
        phi = None
        for rank in range(1, SIZE):
            sent = x if phi is None else MF.pseudo_connect(phi, x)[0]
            phi = MF.send(sent, COMM, rank)
        total = 0
        for rank in range(1, SIZE):
            phi = MF.recv(COMM, rank, delegate_variable=phi)
            total += phi
        factor = sum(range(1, SIZE))
        np.testing.assert_allclose(total.array, factor * x.array)
        F.sum(total).backward()
        np.testing.assert_allclose(x.grad, np.full((2, 3), factor))
    else:
        MF.send(RANK * MF.recv(COMM, 0), COMM, 0).backward()
