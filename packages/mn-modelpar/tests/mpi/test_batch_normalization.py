import copy

import chainer
import chainer.functions as F
import chainer.links as L
import numpy as np
import pytest

from mn_comm import PureNcclCommunicator, create_communicator
from mn_modelpar.functions.batch_normalization import combine
from mn_modelpar.links import MultiNodeBatchNormalization, create_mnbn_model

pytestmark = pytest.mark.sizes(1, 4)

COMM = create_communicator("naive")
RANK, SIZE = COMM.rank, COMM.size

ROWS = [(4, 4, 4, 4), (1, 3, 4, 0), (0, 4, 1, 3), (5, 0, 0, 0)]


def batches(rows, shape=(3, 2, 2), dtype=np.float64, offset=0.0):
    """The batch of each rank, and the weights of its outputs in the loss."""
    random = np.random.RandomState(0)
    parts = [offset + random.randn(n, *shape).astype(dtype) * (1 + rank) for rank, n in enumerate(rows[:SIZE])]
    return parts, [random.randn(*part.shape).astype(dtype) for part in parts]


def loss_of(y, weights):
    return F.sum(y * y * weights) + F.sum(y * weights)


def links(dtype, size=3, **options):
    random = np.random.RandomState(1)
    options = {
        "initial_gamma": random.rand(*np.atleast_1d(size)),
        "initial_beta": random.randn(*np.atleast_1d(size)),
    } | options
    return (
        MultiNodeBatchNormalization(size, COMM, dtype=dtype, **options),
        L.BatchNormalization(size, dtype=dtype, **options),
    )


def test_statistics_of_two_links_match_although_the_graphs_of_ranks_differ():
    # The last rank has computed with its input before; the gradients of the two links differ in size.
    def gradients(is_deep):
        batch = np.random.RandomState(RANK).randn(4, 3)
        bns = [MultiNodeBatchNormalization(3, COMM, dtype=np.float64) for _ in range(2)]
        xs = [chainer.Variable(batch) for _ in range(2)]
        ys = [bn(F.identity(F.identity(x)) if deep else x) for bn, x, deep in zip(bns, xs, is_deep, strict=True)]
        F.sum(ys[0] ** 3 + 1000 * ys[1] ** 3).backward()
        return [x.grad for x in xs]

    for grad, expected in zip(gradients((RANK == SIZE - 1, RANK != SIZE - 1)), gradients((0, 0)), strict=True):
        np.testing.assert_array_equal(grad, expected)


@pytest.mark.parametrize("rows", [rows for rows in ROWS if any(rows[:SIZE])])  # Chainer's link fails on an empty batch
@pytest.mark.parametrize(("shape", "size"), [((3, 2, 2), 3), ((3,), 3), ((3, 2, 2), (3, 2, 2))])
@pytest.mark.filterwarnings("ignore:A batch with no more than one sample")
def test_it_is_chainers_on_all_batches_concatenated(rows, shape, size, check_slope):
    parts, weights = batches(rows, shape)
    ours, theirs = links(np.float64, size)
    x = chainer.Variable(parts[RANK])
    whole = chainer.Variable(np.concatenate(parts))
    for _ in range(2):
        ours.cleargrads()
        theirs.cleargrads()
        x.cleargrad()
        whole.cleargrad()
        y, expected = ours(x), theirs(whole)
        loss_of(y, weights[RANK]).backward()
        loss_of(expected, np.concatenate(weights)).backward()
        begin = sum(rows[:RANK])
        mine = slice(begin, begin + rows[RANK])
        np.testing.assert_allclose(y.array, expected.array[mine], rtol=1e-10, atol=1e-12)
        np.testing.assert_allclose(x.grad, whole.grad[mine], rtol=1e-7, atol=1e-9)
        np.testing.assert_allclose(ours.gamma.grad * SIZE, theirs.gamma.grad, rtol=1e-9, atol=1e-11)
        np.testing.assert_allclose(ours.beta.grad * SIZE, theirs.beta.grad, rtol=1e-9, atol=1e-11)
        np.testing.assert_allclose(ours.avg_mean, theirs.avg_mean, rtol=1e-10)
        np.testing.assert_allclose(ours.avg_var, theirs.avg_var, rtol=1e-10)

    def moved(arrays):
        return loss_of(ours(arrays[0]), weights[RANK]).array

    check_slope(moved, [parts[RANK]], [x.grad], rtol=1e-4, atol=1e-6)
    with chainer.using_config("train", False):
        # Every rank is alone with its batch now, and there is no communication.
        if RANK == 0:
            ours.avg_mean[...], ours.avg_var[...] = theirs.avg_mean, theirs.avg_var
            np.testing.assert_allclose(ours(parts[0]).array, theirs(parts[0]).array)


@pytest.mark.parametrize(
    ("dtype", "x_dtype", "rtol"),
    [(np.float32, np.float32, 1e-4), (np.float32, np.float16, 2e-2), (np.float16,) * 2 + (2e-2,)],
)
def test_dtypes(dtype, x_dtype, rtol):
    parts, weights = batches((1, 3, 4, 0)[:SIZE] if SIZE > 1 else (4,), dtype=x_dtype)
    ours, theirs = links(dtype)
    x, whole = chainer.Variable(parts[RANK]), chainer.Variable(np.concatenate(parts))
    y, expected = ours(x), theirs(whole)
    assert y.dtype == x_dtype
    assert ours.gamma.dtype == ours.avg_mean.dtype == dtype
    loss_of(y, weights[RANK]).backward()
    loss_of(expected, np.concatenate(weights)).backward()
    begin = sum(map(len, parts[:RANK]))
    mine = slice(begin, begin + len(parts[RANK]))
    np.testing.assert_allclose(y.array, expected.array[mine], rtol=rtol, atol=rtol)
    np.testing.assert_allclose(x.grad, whole.grad[mine], rtol=rtol, atol=5 * rtol)
    assert x.grad.dtype == x_dtype


def test_mixed16():
    with chainer.using_config("dtype", chainer.mixed16):
        link = MultiNodeBatchNormalization(3, COMM)
        y = link(np.random.RandomState(RANK).randn(4, 3).astype(np.float16))
    assert y.dtype == np.float16
    assert link.gamma.dtype == link.avg_var.dtype == np.float32


def test_a_mean_far_from_zero_costs_no_digits():
    parts, _ = batches((4,) * SIZE, dtype=np.float32, offset=1e4)
    ours, _ = links(np.float32, initial_gamma=None, initial_beta=None)
    whole = np.concatenate(parts).astype(np.float64)
    axes = (0, 2, 3)
    expected = (whole - whole.mean(axes, keepdims=True)) / np.sqrt(whole.var(axes, keepdims=True) + 2e-5)
    np.testing.assert_allclose(ours(parts[RANK]).array, expected[4 * RANK : 4 * RANK + 4], atol=5e-3)


def test_all_batches_empty():
    ours, _ = links(np.float32)
    x = chainer.Variable(np.zeros((0, 3), np.float32))
    y = ours(x)
    F.sum(y).backward()
    assert y.shape == x.grad.shape == (0, 3)
    assert (ours.avg_var == 1).all()


def test_finetuning():
    parts, _ = batches((4,) * SIZE)
    ours, theirs = links(np.float64)
    for scale in (1, 2, 3):
        ours(scale * parts[RANK], finetune=True)
        theirs(scale * np.concatenate(parts), finetune=True)
    assert ours.N == 3
    np.testing.assert_allclose(ours.avg_mean, theirs.avg_mean)
    np.testing.assert_allclose(ours.avg_var, theirs.avg_var)
    ours.start_finetuning()
    assert ours.N == 0


def test_recomputing_does_not_count_twice():
    def forget(link, x):
        F.sum(F.forget(link, x)).backward()
        return link.avg_mean

    parts, _ = batches((4,) * SIZE)
    once, twice = links(np.float64)[0], links(np.float64)[0]
    once(parts[RANK])
    np.testing.assert_allclose(forget(twice, chainer.Variable(parts[RANK])), once.avg_mean)


@pytest.mark.parametrize("use_gamma", [True, False])
@pytest.mark.parametrize("use_beta", [True, False])
def test_without_gamma_or_beta(use_gamma, use_beta):
    parts, _ = batches((4,) * SIZE)
    ours, theirs = links(np.float64, use_gamma=use_gamma, use_beta=use_beta)
    expected = theirs(np.concatenate(parts)).array[4 * RANK : 4 * RANK + 4]
    np.testing.assert_allclose(ours(parts[RANK]).array, expected, rtol=1e-10, atol=1e-12)
    assert [name for name, _ in ours.namedparams()] == [name for name, _ in theirs.namedparams()]


def test_other_axes():
    parts, _ = batches((4,) * SIZE)
    ours = MultiNodeBatchNormalization(None, COMM, axis=(0, 1), dtype=np.float64)
    theirs = L.BatchNormalization(axis=(0, 1), dtype=np.float64)
    expected = theirs(np.concatenate(parts)).array[4 * RANK : 4 * RANK + 4]
    np.testing.assert_allclose(ours(parts[RANK]).array, expected, rtol=1e-10, atol=1e-12)


def test_wrong_input():
    link = MultiNodeBatchNormalization(3, COMM)
    with pytest.raises(
        ValueError, match=r"expected channels of shape \(3,\), got \(2,\) in an input of shape \(4, 2\)"
    ):
        link(np.zeros((4, 2), np.float32))
    with pytest.raises(TypeError, match="expected floats to normalise, got dtype int64"):
        link(np.zeros((4, 3), int))
    with pytest.raises(ValueError, match="for communication_backend, got 'gloo'"):
        MultiNodeBatchNormalization(3, COMM, communication_backend="gloo")
    with pytest.raises(ValueError, match="got 'nccl', which NaiveCommunicator cannot use"):
        MultiNodeBatchNormalization(3, COMM, communication_backend="nccl")


@pytest.mark.skipif(SIZE < 2, reason="needs two ranks that differ")
def test_wrong_input_on_one_rank_is_an_error_on_all():
    link = MultiNodeBatchNormalization(3, COMM)
    with pytest.raises(TypeError, match="expected floats" if RANK == 0 else "on rank 0: allreduce: expected"):
        link(np.zeros((4, 3), np.int32 if RANK == 0 else np.float32))
    assert link(np.ones((4, 3), np.float32)).shape == (4, 3)


def test_it_cannot_be_differentiated_twice():
    x = chainer.Variable(np.random.RandomState(RANK).randn(4, 3).astype("f"))
    F.sum(MultiNodeBatchNormalization(3, COMM)(x) ** 2).backward(enable_double_backprop=True)
    with pytest.raises(NotImplementedError, match="cannot be differentiated twice"):
        F.sum(x.grad_var).backward()


@pytest.mark.parametrize("offset", [0, 1e4])
def test_combining_parts(offset):
    random = np.random.RandomState(3)
    data = [random.randn(n, 2) + offset for n in (3, 0, 1, 6)[:SIZE]]
    part, whole = data[RANK], np.concatenate(data)
    mean = part.sum(axis=0) / max(len(part), 1)
    count, means, squares = combine(COMM, len(part), mean, ((part - mean) ** 2).sum(axis=0))
    assert count == len(whole)
    np.testing.assert_allclose(means, whole.mean(axis=0))
    np.testing.assert_allclose(squares / count, whole.var(axis=0), rtol=1e-10)


def test_what_travels_is_independent_of_the_number_of_ranks(monkeypatch):
    def refuse(data):
        raise AssertionError("one part for each rank")

    monkeypatch.setattr(type(COMM), "allgather", lambda self, data: refuse(data))
    x = chainer.Variable(np.ones((4, 3), "f4"))
    F.sum(MultiNodeBatchNormalization(3, COMM)(x)).backward()


class Block(chainer.Chain):
    def __init__(self):
        super().__init__()
        with self.init_scope():
            self.conv = L.Convolution2D(3, 3, 1)
            self.bn = L.BatchNormalization(3, decay=0.5, eps=1e-3)
        self.same = self.bn  # a second name for it

    def forward(self, x):
        return self.same(self.conv(x))


class Model(chainer.Chain):
    def __init__(self):
        super().__init__()
        with self.init_scope():
            self.blocks = chainer.ChainList(
                Block(), chainer.Sequential(Block(), F.relu, L.BatchNormalization(axis=(0, 2, 3)))
            )
            self.renormalization = L.BatchRenormalization(3)

    def forward(self, x):
        return self.blocks[1](self.blocks[0](x))


def test_a_model_with_every_batch_normalization_replaced():
    x = np.random.RandomState(2).randn(4 * SIZE, 3, 2, 2).astype("f")
    model = Model()
    COMM.bcast_data(model)
    with chainer.using_config("train", True):
        model(x)  # initialises, and moves the running statistics
    ours = create_mnbn_model(model, COMM)
    kinds = [type(link).__name__ for link in ours.links() if "ormalization" in type(link).__name__]
    assert sorted(kinds) == ["BatchRenormalization", *["MultiNodeBatchNormalization"] * 3]
    assert not any(isinstance(link, MultiNodeBatchNormalization) for link in model.links())
    assert ours.blocks[0].same is ours.blocks[0].bn
    assert ours.blocks[0].bn.name == "bn"
    theirs, copies = dict(model.namedparams()), dict(ours.namedparams())
    assert theirs.keys() == copies.keys()
    for name, param in theirs.items():
        assert param is not copies[name]
        np.testing.assert_array_equal(param.array, copies[name].array)
    np.testing.assert_array_equal(ours.blocks[0].bn.avg_mean, model.blocks[0].bn.avg_mean)
    assert ours.blocks[0].bn.decay == 0.5
    np.testing.assert_allclose(
        ours(x[4 * RANK : 4 * RANK + 4]).array, model(x).array[4 * RANK : 4 * RANK + 4], atol=1e-4
    )
    again = create_mnbn_model(ours, COMM)
    assert again.blocks[0].bn.comm is COMM
    assert copy.deepcopy(again).blocks[0].bn.comm is COMM


def test_a_batch_normalization_itself():
    ours = create_mnbn_model(L.BatchNormalization(3), COMM)
    assert type(ours) is MultiNodeBatchNormalization
    with pytest.raises(ValueError, match="for communication_backend, got 'x'"):
        create_mnbn_model(ours, COMM, "x")


def test_models_are_saved_and_loaded(tmp_path):
    link = MultiNodeBatchNormalization(3, COMM)
    link(np.random.RandomState(RANK).randn(4, 3).astype("f"))
    chainer.serializers.save_npz(tmp_path / "bn.npz", link)
    plain = L.BatchNormalization(3)
    chainer.serializers.load_npz(tmp_path / "bn.npz", plain)
    np.testing.assert_array_equal(plain.avg_mean, link.avg_mean)


def test_the_backend_nccl_is_accepted_with_pure_nccl():
    class PureNccl(PureNcclCommunicator):
        strategy = "naive"  # NCCL itself needs a device; gradients are not tested here

    x = np.arange(6, dtype=np.float32).reshape(2, 3) + RANK
    made = [
        MultiNodeBatchNormalization(3, PureNccl(COMM.mpi_comm), communication_backend=name) for name in ("nccl", "mpi")
    ]
    ys = [link(x).array for link in made]
    np.testing.assert_array_equal(*ys)
    model = create_mnbn_model(L.BatchNormalization(3), PureNccl(COMM.mpi_comm), communication_backend="nccl")
    np.testing.assert_array_equal(model(x).array, ys[0])
