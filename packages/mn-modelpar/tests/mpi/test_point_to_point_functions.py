import chainer
import chainer.functions as F
import chainer.links as L
import numpy as np
import pytest

import mn_modelpar.functions as MF
from mn_comm import create_communicator
from mn_modelpar.replies import GRADIENT, Word, gradient_tag, post_of

COMM = create_communicator("naive")
RANK, SIZE = COMM.rank, COMM.size
LAST = SIZE - 1

needs_two = pytest.mark.skipif(SIZE < 2, reason="needs two ranks")


def value(seed, shape=(2, 3), dtype=np.float64):
    return np.random.RandomState(seed).randn(*shape).astype(dtype)


@needs_two
@pytest.mark.parametrize("dtype", [np.float16, np.float32, np.float64])
def test_around_the_ring_and_back(dtype):
    x = chainer.Variable(value(RANK, dtype=dtype))
    delegate = MF.send(2 * x, COMM, (RANK + 1) % SIZE)
    received = MF.recv(COMM, (RANK - 1) % SIZE, delegate)
    np.testing.assert_array_equal(received.array, 2 * value((RANK - 1) % SIZE, dtype=dtype))
    F.sum((RANK + 1) * received).backward()
    assert x.grad.dtype == received.dtype == dtype
    np.testing.assert_array_equal(x.grad, np.full((2, 3), 2 * ((RANK + 1) % SIZE + 1)))


@needs_two
def test_slopes(check_slope):
    def loss(arrays, keep=None):
        xs = [chainer.Variable(x) for x in arrays]
        delegate = MF.send((F.tanh(xs[0]), xs[1] * xs[1]), COMM, (RANK + 1) % SIZE)
        a, b = MF.recv(COMM, (RANK - 1) % SIZE, delegate)
        total = F.sum(a * a) * (RANK + 1) + F.sum(F.exp(b))
        if keep is None:
            return total.array
        total.backward()
        keep += [x.grad for x in xs]
        return None

    arrays, grads = [value(RANK), value(10 + RANK, (4,))], []
    loss(arrays, grads)
    with chainer.no_backprop_mode():
        check_slope(loss, arrays, grads)


@needs_two
def test_a_second_backward_pass():
    # Rank 0 has x and sends x^2, the last rank has the loss w x^6, and rank 0 a penalty on its gradient 6 w x^5.
    w = np.array([1.0, -2.0, 3.0])
    if RANK == 0:
        x = chainer.Variable(np.array([0.5, 1.0, -1.5]))
        MF.send(x * x, COMM, LAST).backward(enable_double_backprop=True)
        grad = x.grad_var
        np.testing.assert_allclose(grad.array, 6 * w * x.array**5)
        x.cleargrad()
        F.sum(grad).backward()
        np.testing.assert_allclose(x.grad, 30 * w * x.array**4)
    elif RANK == LAST:
        start = chainer.Variable(np.zeros(0, np.float32))
        y = MF.recv(COMM, 0, start)
        F.sum(w * y * y * y).backward(enable_double_backprop=True)
        start.grad_var.backward()


@needs_two
@pytest.mark.parametrize("kind", [tuple, list])
def test_several_variables_of_different_shape_and_dtype(kind):
    if RANK == 0:
        xs = [chainer.Variable(value(0)), chainer.Variable(value(1, (4,), np.float32))]
        MF.send(kind(xs), COMM, LAST).backward()
        np.testing.assert_array_equal(xs[0].grad, np.full((2, 3), 2.0))
        np.testing.assert_array_equal(xs[1].grad, np.full(4, 3.0, np.float32))
    elif RANK == LAST:
        ys = MF.recv(COMM, 0)
        assert isinstance(ys, tuple)
        (F.sum(2 * ys[0]) + F.sum(F.cast(3 * ys[1], np.float64))).backward()


@needs_two
def test_gradients_that_are_missing_are_zeros():
    if RANK == 0:
        xs = [chainer.Variable(value(0)), chainer.Variable(value(1))]
        MF.send(xs, COMM, LAST).backward()
        np.testing.assert_array_equal(xs[0].grad, np.zeros((2, 3)))
        np.testing.assert_array_equal(xs[1].grad, np.ones((2, 3)))
    elif RANK == LAST:
        F.sum(MF.recv(COMM, 0)[1]).backward()


@needs_two
@pytest.mark.parametrize("force_tuple", [True, False])
def test_force_tuple(force_tuple):
    if RANK == 0:
        delegate = MF.send(value(0), COMM, LAST)
        delegate.backward()
    elif RANK == LAST:
        received = MF.recv(COMM, 0, force_tuple=force_tuple)
        assert isinstance(received, tuple) is force_tuple
        F.sum(received[0] if force_tuple else received).backward()


@needs_two
def test_tags_in_flight_arrive_in_any_order():
    if RANK == 0:
        xs = [chainer.Variable(value(tag)) for tag in range(4)]
        delegates = [MF.send(x, COMM, LAST, tag=tag) for tag, x in enumerate(xs)]
        MF.pseudo_connect(delegates[0], *delegates[1:])[-1].backward()  # reaches the others as well
        for tag, x in enumerate(xs):
            np.testing.assert_array_equal(x.grad, np.full((2, 3), tag + 1.0))
    elif RANK == LAST:
        ys = {tag: MF.recv(COMM, 0, tag=tag) for tag in (2, 0, 3, 1)}
        for tag, y in ys.items():
            np.testing.assert_array_equal(y.array, value(tag))
        sum(F.sum((tag + 1) * y) for tag, y in ys.items()).backward()


@needs_two
def test_a_deep_send_and_a_recv_that_are_connected_only_at_the_end():
    # All ranks would wait for the gradient of what they sent, before they send the gradient of what they received.
    x = chainer.Variable(value(RANK))
    delegate = MF.send(F.identity(F.identity(x)), COMM, (RANK + 1) % SIZE)
    received = MF.recv(COMM, (RANK - 1) % SIZE)
    MF.pseudo_connect(delegate, F.sum((RANK + 1) * received)).backward()
    np.testing.assert_array_equal(x.grad, np.full((2, 3), (RANK + 1) % SIZE + 1))


@needs_two
@pytest.mark.parametrize("swapped", [False, True])
def test_gradients_find_their_values_in_whatever_order_they_come(swapped):
    # The order in which gradients come back under one tag depends on the receiver's graph.
    if RANK == 0:
        xs = [chainer.Variable(value(i)) for i in range(2)]
        first = MF.send(xs[0], COMM, LAST)
        second = MF.send(xs[1], COMM, LAST)
        MF.pseudo_connect(first, second).backward()
        np.testing.assert_array_equal(xs[0].grad, np.full((2, 3), 5.0))
        np.testing.assert_array_equal(xs[1].grad, np.full((2, 3), 7.0))
    elif RANK == LAST:
        y1, y2 = MF.recv(COMM, 0), MF.recv(COMM, 0)
        F.sum(7 * y2 + 5 * y1 if swapped else 5 * y1 + 7 * y2).backward()


@needs_two
def test_integers_travel_forward_and_nothing_backward():
    if RANK == 0:
        delegate = MF.send(np.arange(3), COMM, LAST, tag=5)
        delegate.backward()
    elif RANK == LAST:
        begin = chainer.Variable(np.zeros(1))
        received = MF.recv(COMM, 0, begin, tag=5)
        np.testing.assert_array_equal(received.array, [0, 1, 2])
        received.grad = np.ones(3, int)
        received.backward()
        np.testing.assert_array_equal(begin.grad, [0])  # the link before it is reached


@needs_two
def test_integers_beside_floats():
    if RANK == 0:
        x = chainer.Variable(value(0))
        MF.send((np.arange(3), x, np.array([True])), COMM, LAST).backward()
        np.testing.assert_array_equal(x.grad, np.full((2, 3), 3.0))
    elif RANK == LAST:
        words, y, flag = MF.recv(COMM, 0)
        assert (words.dtype.kind, flag.dtype.kind) == ("i", "b")
        F.sum(3 * y).backward()


@needs_two
@pytest.mark.parametrize("size", [3, 1_000_000])
@pytest.mark.parametrize("reached", [True, False])
@pytest.mark.parametrize("used", [True, False])
def test_an_array_that_needs_no_gradient_expects_none(size, reached, used):
    # A mask: whatever the receiver does with it, the sender neither waits nor has to read anything afterwards.
    if RANK == 0:
        delegate = MF.send(np.ones(size), COMM, LAST)
        if reached:
            delegate.backward()
        x = chainer.Variable(np.ones(2))
        MF.send(x, COMM, LAST).backward()
        np.testing.assert_array_equal(x.grad, [4, 4])
        COMM.recv_obj(LAST, tag=1)
        assert not COMM.ranks.Iprobe(LAST, gradient_tag(0))
    elif RANK == LAST:
        mask, y = MF.recv(COMM, 0), MF.recv(COMM, 0)
        (F.sum(4 * y) + (F.sum(mask) if used else mask.array[0])).backward()
        COMM.send_obj("done", 0, tag=1)


@needs_two
def test_two_backward_passes_through_the_same_message():
    if RANK == 0:
        x = chainer.Variable(np.ones(2))
        delegate = MF.send(x, COMM, LAST)
        delegate.backward()
        np.testing.assert_array_equal(x.grad, [1, 1])
        delegate.backward()
        np.testing.assert_array_equal(x.grad, [3, 3])
    elif RANK == LAST:
        y = MF.recv(COMM, 0)
        F.sum(y).backward()
        F.sum(2 * y).backward()


@needs_two
def test_a_gradient_that_is_averaged_in_place_while_it_travels():
    # y + w has one array for the gradients of both; changes by the owner of w must not affect the sender.
    size = 2_000_000
    if RANK == 0:
        x = chainer.Variable(np.ones(size))
        delegate = MF.send(x, COMM, LAST)
        COMM.recv_obj(LAST, tag=1)
        delegate.backward()
        np.testing.assert_array_equal(x.grad, np.full(size, 2))
    elif RANK == LAST:
        w = chainer.Parameter(np.ones(size))
        F.sum(2 * (MF.recv(COMM, 0) + w)).backward()
        w.grad[...] = 7
        COMM.send_obj("go on", 0, tag=1)


@needs_two
def test_a_gradient_of_another_shape_names_both_sides():
    comm = COMM.split(0, RANK)
    if RANK == 0:
        delegate = MF.send(chainer.Variable(value(0)), comm, LAST, tag=8)
        with pytest.raises(RuntimeError, match=rf"send\(rank={LAST}, tag=8\).*\(2, 3\).*got shape \(5,\).*rank {LAST}"):
            delegate.backward()
    elif RANK == LAST:
        comm.recv(0, 8)
        word = Word(GRADIENT, 1, (((5,), np.dtype(float)),))
        post_of(comm).post(word, [np.zeros(5)], 0, gradient_tag(8))


@needs_two
def test_a_value_received_by_other_means():
    comm = COMM.split(0, -RANK)  # messages remain here
    if comm.rank == 0:
        MF.send(chainer.Variable(value(0)), comm, 1)
        delegate = MF.send(chainer.Variable(value(1, (4,))), comm, 1)
        with pytest.raises(RuntimeError, match=r"\(2, 3\).*, got shape \(4,\) .* by the function recv"):
            delegate.backward()
    elif comm.rank == 1:
        comm.recv(0)
        F.sum(MF.recv(comm, 0)).backward()


class Model0(chainer.Chain):
    def __init__(self, f, h):
        super().__init__(f=f, h=h)

    def __call__(self, x):
        z = self.f(x)
        phi = MF.send(z, COMM, rank=1)
        z = MF.recv(COMM, rank=1, delegate_variable=phi)
        return self.h(z)


class Model1(chainer.Chain):
    def __init__(self, g):
        super().__init__(g=g)

    def __call__(self, _):
        z = MF.recv(COMM, rank=0)
        z = self.g(z)
        return MF.send(z, COMM, rank=0)


def layers():
    random = np.random.RandomState(3)
    return [L.Linear(n, m, initialW=random.randn(m, n).astype("f4")) for n, m in ((4, 5), (5, 6), (6, 2))]


@needs_two
def test_a_model_on_two_ranks_that_goes_there_and_back():
    f, g, h = layers()
    x = value(0, (3, 4), np.float32)
    loss = F.sum(h(g(f(x))) ** 2)
    loss.backward()
    expected = {"f": f.W.grad, "g": g.W.grad, "h": h.W.grad}
    f, g, h = layers()
    if RANK == 0:
        model = Model0(f, h)
        here = F.sum(model(x) ** 2)
        here.backward()
        np.testing.assert_allclose(here.array, loss.array, rtol=1e-6)
    elif RANK == 1:
        model = Model1(g)
        model(None).backward()
    else:
        return
    for link in model.children():
        np.testing.assert_allclose(link.W.grad, expected[link.name], rtol=1e-5)


@needs_two
def test_two_sends_joined_by_pseudo_connect():
    f, _, _ = layers()
    x = value(0, (3, 4), np.float32)
    y = f(x)
    F.sum((y[:, :2] + 3 * y[:, 2:4]) ** 2).backward()
    expected = f.W.grad
    f, _, _ = layers()
    if RANK == 0:
        y = f(x)
        phi1 = MF.send(y[:, :2], COMM, rank=1)
        phi2 = MF.send(y[:, 2:4], COMM, rank=1)
        psi = MF.pseudo_connect(phi1, phi2)
        psi.backward()
        np.testing.assert_allclose(f.W.grad, expected, rtol=1e-5)
    elif RANK == 1:
        z1 = MF.recv(COMM, rank=0)
        z2 = MF.recv(COMM, rank=0)
        F.sum((z1 + 3 * z2) ** 2).backward()


@needs_two
@pytest.mark.parametrize(
    ("x", "error", "message"),
    [
        ("x", TypeError, r"send\(rank=\d, tag=0\) called at .*py:\d+: expected a chainer.Variable, got str: 'x'"),
        ((np.zeros(2), None), TypeError, "expected a chainer.Variable, got NoneType"),
        (chainer.Variable(), TypeError, "got one without"),
        ((), ValueError, "expected at least one chainer.Variable, got none"),
    ],
)
def test_wrong_input_is_an_error_of_the_receiver_too(x, error, message):
    if RANK == 0:
        with pytest.raises(error, match=message):
            MF.send(x, COMM, LAST)
    elif RANK == LAST:
        with pytest.raises(TypeError, match="on rank 0: send: expected"):
            MF.recv(COMM, 0)


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda: MF.send(np.zeros(1), COMM, SIZE), ValueError, rf"send: expected rank in 0\.\.{LAST}, got {SIZE}"),
        (lambda: MF.recv(COMM, -1), ValueError, rf"recv: expected rank in 0\.\.{LAST}, got -1"),
        (
            lambda: MF.send(np.zeros(1), COMM, RANK),
            ValueError,
            f"send: expected a rank other than this one, got {RANK}",
        ),
        (lambda: MF.recv(COMM, RANK), ValueError, f"recv: expected a rank other than this one, got {RANK}"),
        (lambda: MF.send(np.zeros(1), COMM, (RANK + 1) % SIZE, tag=-1), ValueError, r"expected tag in 0\.\."),
        (lambda: MF.send(np.zeros(1), COMM, (RANK + 1) % SIZE, tag=2**60), ValueError, r"expected tag in 0\.\."),
    ],
)
def test_peers_and_tags_out_of_range(call, error, message):
    with pytest.raises(error, match=message):
        call()


@needs_two
def test_a_delegate_that_is_none_of_ours():
    with pytest.raises(TypeError, match=r"expected a chainer.Variable for delegate_variable, got int"):
        MF.recv(COMM, (RANK + 1) % SIZE, delegate_variable=3)
