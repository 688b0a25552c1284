import chainer
import chainer.functions as F
import numpy as np
import pytest

import mn_modelpar.functions as MF
from mn_comm import create_communicator

pytestmark = pytest.mark.sizes(1, 3)

COMM = create_communicator("naive")
RANK, SIZE = COMM.rank, COMM.size
LAST = SIZE - 1


def one(shape=(2, 3)):
    """Return inputs of every rank: one array on each."""
    return [[np.random.RandomState(rank).randn(*shape)] for rank in range(SIZE)]


def one_at(root):
    return [inputs if rank == root else [] for rank, inputs in enumerate(one())]


def several():
    return [[np.random.RandomState(10 * rank + i).randn(2, 3) for i in range(SIZE)] for rank in range(SIZE)]


def several_at(root):
    return [inputs if rank == root else [] for rank, inputs in enumerate(several())]


# Name, inputs of every rank, the call of this rank, and the result of all ranks together.
CASES = [
    ("bcast", one_at(0), lambda xs: [MF.bcast(COMM, *(xs or [None]))], lambda all_: [all_[0]] * SIZE),
    (
        "bcast from the last",
        one_at(LAST),
        lambda xs: [MF.bcast(COMM, *(xs or [None]), root=LAST)],
        lambda all_: [all_[LAST]] * SIZE,
    ),
    (
        "gather",
        one(),
        lambda xs: MF.gather(COMM, xs[0]) if RANK == 0 else [MF.gather(COMM, xs[0])],
        lambda all_: [[xs[0] for xs in all_]] + [[np.zeros(0)]] * LAST,
    ),
    (
        "scatter",
        several_at(LAST),
        lambda xs: [MF.scatter(COMM, xs or None, root=LAST)],
        lambda all_: [[x] for x in all_[LAST]],
    ),
    ("allgather", one(), lambda xs: MF.allgather(COMM, xs[0]), lambda all_: [[xs[0] for xs in all_]] * SIZE),
    ("alltoall", several(), lambda xs: MF.alltoall(COMM, xs), lambda all_: [list(c) for c in zip(*all_, strict=True)]),
    ("allreduce", one(), lambda xs: [MF.allreduce(COMM, xs[0])], lambda all_: [[sum(xs[0] for xs in all_)]] * SIZE),
    (
        "reduce_scatter",
        several(),
        lambda xs: [MF.reduce_scatter(COMM, xs)],
        lambda all_: [[sum(column)] for column in zip(*all_, strict=True)],
    ),
]
cases = pytest.mark.parametrize(
    ("inputs", "call", "reference"), [case[1:] for case in CASES], ids=[c[0] for c in CASES]
)


def loss_of(ys, rank):
    """Return a share of the loss that weights every output on every rank differently."""
    return sum(F.sum((rank + i + 2.0) * y * y * y) for i, y in enumerate(ys))


@cases
def test_values_and_gradients_are_those_of_one_process(inputs, call, reference, check_slope):
    xs = [chainer.Variable(x) for x in inputs[RANK]]
    ys = call(xs)
    everyone = [[chainer.Variable(x) for x in rank_inputs] for rank_inputs in inputs]
    everyones = reference(everyone)
    for y, expected in zip(ys, everyones[RANK], strict=True):
        np.testing.assert_allclose(y.array, chainer.as_variable(expected).array, rtol=1e-14, atol=1e-14)
    loss_of(ys, RANK).backward()
    sum(loss_of([chainer.as_variable(y) for y in ys], rank) for rank, ys in enumerate(everyones)).backward()
    for x, expected in zip(xs, everyone[RANK], strict=True):
        np.testing.assert_allclose(x.grad, expected.grad, rtol=1e-12)
    check_slope(lambda arrays: loss_of(call(arrays), RANK).array, inputs[RANK], [x.grad for x in xs])


@pytest.mark.parametrize(
    ("inputs", "call"),
    [case[1:3] for case in CASES if all(case[1])],  # a rank without inputs has no start for the second pass
    ids=[case[0] for case in CASES if all(case[1])],
)
def test_a_second_backward_pass(inputs, call, check_slope):
    def gradients(arrays):
        xs = [chainer.Variable(x) for x in arrays]
        loss_of(call(xs), RANK).backward(enable_double_backprop=True)
        return xs, [x.grad_var for x in xs]

    def penalty(arrays):
        return sum(F.sum(g * g) for g in gradients(arrays)[1]).array

    xs, grads = gradients(inputs[RANK])
    for x in xs:
        x.cleargrad()
    sum(F.sum(g * g) for g in grads).backward()
    check_slope(penalty, inputs[RANK], [x.grad for x in xs], rtol=1e-5)


@pytest.mark.parametrize("dtype", [np.float16, np.float32, np.float64])
@cases
def test_dtypes(inputs, call, reference, dtype):
    xs = [chainer.Variable(x.astype(dtype)) for x in inputs[RANK]]
    ys = call(xs)
    for y in ys:
        assert y.dtype == (dtype if y.size else np.float32)
    sum(F.sum(y) for y in ys if y.size or len(ys) == 1).backward()
    for x in xs:
        assert x.grad.dtype == dtype
        assert x.grad.shape == x.shape


def test_half_precision_is_added_up_in_single_precision():
    x = chainer.Variable(np.array([2048 if RANK == 0 else 1], np.float16))
    np.testing.assert_array_equal(MF.allreduce(COMM, x).array, np.float16([2048 + LAST]))
    total = MF.reduce_scatter(COMM, [x] * SIZE)
    np.testing.assert_array_equal(total.array, np.float16([2048 + LAST]))


@cases
def test_integers_travel_forward(inputs, call, reference):
    whole = [[(10 * x).astype("i4") for x in xs] for xs in inputs]
    for y, expected in zip(call(whole[RANK]), reference(whole)[RANK], strict=True):
        np.testing.assert_array_equal(y.array, expected)
        assert y.dtype == (np.int32 if y.size else np.float32)


@cases
def test_integers_do_not_travel_backward(inputs, call, reference):
    xs = [chainer.Variable((10 * x).astype("i4")) for x in inputs[RANK]]
    ys = call(xs)
    with pytest.raises(TypeError, match=r"expected floats in the backward of \w+\(.*\) called at .*test_coll.*int32"):
        # Other ranks start from the empty output.
        ys[0].creator_node.backward((0,), (None,) * len(ys[0].creator_node.outputs))


def test_a_rank_that_uses_only_some_outputs_counts_zeros_for_the_others():
    x = chainer.Variable(np.ones(2) * (RANK + 1))
    ys = MF.allgather(COMM, x)
    (2 * F.sum(ys[0])).backward()
    np.testing.assert_array_equal(x.grad, np.full(2, 2.0 * SIZE if RANK == 0 else 0.0))


def test_arrays_that_need_no_gradient_do_not_keep_a_rank_out_of_the_backward_pass():
    y = MF.allreduce(COMM, np.ones(3))
    x = chainer.Variable(np.ones(3))
    z = MF.allreduce(COMM, x if RANK == LAST else np.ones(3))
    F.sum(y + z).backward()
    if RANK == LAST:
        np.testing.assert_array_equal(x.grad, np.full(3, SIZE))


def test_backward_passes_match_although_the_graphs_of_ranks_differ():
    # Chainer would run the backward of the deeper one first: a different one on the last rank.
    xs = [chainer.Variable(np.full(2, 0.5)) for _ in range(2)]
    deep = 0 if RANK == LAST else 1
    ys = [MF.allreduce(COMM, F.tanh(F.tanh(x)) if i == deep else x) for i, x in enumerate(xs)]
    F.sum(10 * ys[0] + 1000 * ys[1]).backward()
    np.testing.assert_array_equal(xs[1 - deep].grad, np.full(2, SIZE * (10 if deep else 1000)))


def test_shapes_may_differ_between_ranks():
    x = chainer.Variable(np.ones((RANK + 1, 2)))
    ys = MF.allgather(COMM, x)
    assert [y.shape for y in ys] == [(rank + 1, 2) for rank in range(SIZE)]
    F.sum(F.concat(ys, axis=0)).backward()
    np.testing.assert_array_equal(x.grad, np.full((RANK + 1, 2), SIZE))


def on_last(good, bad):
    return bad if RANK == LAST else good


GOOD = np.ones(2)


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda: MF.allgather(COMM, on_last(GOOD, "x")), TypeError, "allgather: expected a .*Variable, got str: 'x'"),
        (lambda: MF.allgather(COMM, on_last(GOOD, chainer.Variable())), TypeError, "one without"),
        (lambda: MF.gather(COMM, on_last(GOOD, None)), TypeError, "gather: expected a .*Variable, got NoneType"),
        (lambda: MF.bcast(COMM, on_last(GOOD, 3.0), root=LAST), TypeError, "bcast: expected a .*Variable, got float"),
        (lambda: MF.allreduce(COMM, on_last(GOOD, [GOOD])), TypeError, "allreduce: expected a .*Variable, got list"),
        (lambda: MF.alltoall(COMM, on_last([GOOD] * SIZE, 5)), TypeError, "alltoall: expected a .*Variable, got int"),
        (lambda: MF.reduce_scatter(COMM, on_last([GOOD] * SIZE, ["x"] * SIZE)), TypeError, "reduce_scatter: expected"),
        (lambda: MF.scatter(COMM, on_last(None, ["x"] * SIZE), LAST), TypeError, "scatter: expected a .*Variable, got"),
        (lambda: MF.scatter(COMM, on_last(None, None), LAST), TypeError, "scatter: expected a .*Variable, got None"),
    ],
)
def test_wrong_input_on_one_rank_is_an_error_on_all(call, error, message):
    with pytest.raises(error, match=message if RANK == LAST else f"on rank {LAST}: "):
        call()
    np.testing.assert_array_equal(COMM.allreduce(np.ones(2)), [SIZE, SIZE])


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (
            lambda: MF.alltoall(COMM, on_last([GOOD] * SIZE, [GOOD] * (SIZE + 1))),
            f"expected {SIZE} arrays, .* {SIZE + 1}",
        ),
        (lambda: MF.reduce_scatter(COMM, on_last([GOOD] * SIZE, [])), f"expected {SIZE} arrays, .* got 0"),
        (lambda: MF.scatter(COMM, on_last(None, [GOOD] * (SIZE + 2)), LAST), f"expected {SIZE} parts, .* {SIZE + 2}"),
    ],
)
def test_too_many_or_too_few_are_an_error_on_all(call, message):
    with pytest.raises(ValueError, match=message):
        call()


@pytest.mark.skipif(SIZE < 2, reason="needs two ranks that differ")
def test_ranks_that_differ_are_an_error_on_all():
    with pytest.raises(ValueError, match="expected arrays of the same shape"):
        MF.allreduce(COMM, on_last(np.ones(2), np.ones(3)))
    with pytest.raises(ValueError, match=r"expected arrays of one shape to add up, got \(2,\) and \(3,\)"):
        MF.reduce_scatter(COMM, [GOOD, on_last(np.ones(2), np.ones(3)), *[GOOD] * (SIZE - 2)])


@pytest.mark.parametrize("call", [MF.bcast, MF.gather])
def test_a_root_out_of_range(call):
    with pytest.raises(ValueError, match=r"expected root in 0\.\."):
        call(COMM, GOOD, root=SIZE)
