"""Training with compressed gradients: every compression, with each scheme of averaging."""

import functools
import io
import warnings
from dataclasses import replace

import chainer
import chainer.functions as F
import chainer.links as L
import numpy as np
import pytest
from mpi4py import MPI

import mn_optim  # noqa: F401 - before Chainer
from mn_comm import create_communicator
from mn_compress import Int8, OneBit, PowerSGD, TopK
from mn_optim import AfterBackward, DuringBackward, MultiNodeOptimizer, OneStepLate

pytestmark = pytest.mark.sizes(1)

COMM = create_communicator("flat")
RANK, SIZE = COMM.rank, COMM.size
ALL = [Int8(rounding="stochastic"), OneBit(block=64), TopK(0.2, momentum=0.5, warm_up=3), PowerSGD(2, 2, 1.2)]
SCHEMES = [AfterBackward(), DuringBackward(bucket_bytes=2000), OneStepLate()]
BY_HOW = pytest.mark.parametrize("how", ALL, ids=lambda how: type(how).__name__)
BY_SCHEME = pytest.mark.parametrize("scheme", SCHEMES, ids=lambda scheme: type(scheme).__name__)


class Net(chainer.Chain):
    def __init__(self):
        super().__init__()
        initial = chainer.initializers.LeCunNormal(rng=np.random.RandomState(0))
        with self.init_scope():
            self.first = L.Linear(12, 30, initialW=initial)
            self.last = L.Linear(30, 4, initialW=initial)
            self.unused = L.Linear(3, 3, initialW=initial)

    def forward(self, x, t):
        return F.softmax_cross_entropy(self.last(F.relu(self.first(x))), t)


WEIGHTS = np.random.RandomState(0).standard_normal((12, 4))


def batch(iteration):
    random = np.random.RandomState(1000 * iteration + RANK)
    x = random.standard_normal((20, 12)).astype("f4")
    return x, (x @ WEIGHTS).argmax(1).astype("i4")


def accuracy(model):
    x, t = batch(10_000)
    with chainer.using_config("train", False):
        return F.accuracy(model.last(F.relu(model.first(x))), t).array


def bits(model):
    return b"".join(param.data.tobytes() for _, param in sorted(model.namedparams()))


def make(how, scheme, optimizer=None, comm=COMM):
    optimizer = chainer.optimizers.MomentumSGD(0.05, 0.5) if optimizer is None else optimizer
    model = Net()
    return MultiNodeOptimizer(optimizer, comm, replace(scheme, send=how)).setup(model), model


@functools.cache
def exactly_trained():
    exact = Net()
    reference = MultiNodeOptimizer(chainer.optimizers.MomentumSGD(0.05, 0.5), COMM).setup(exact)
    for iteration in range(80):
        reference.update(exact, *batch(iteration))
    return exact


@BY_SCHEME
@BY_HOW
def test_it_learns_and_all_ranks_hold_the_same_bits(how, scheme):
    optimizer, model = make(how, scheme)
    for iteration in range(80):
        optimizer.update(model, *batch(iteration))
    assert len(set(COMM.allgather_obj(bits(model)))) == 1
    exact = exactly_trained()
    assert bits(model) != bits(exact) or SIZE == 1
    scores = [np.mean(COMM.allgather_obj(float(accuracy(each)))) for each in (model, exact)]
    assert scores[0] > scores[1] - 0.06, scores
    report = optimizer.compression_report
    assert (report.bytes_sent > 0) == (SIZE > 1)


def test_without_compression_there_is_no_report():
    optimizer, _ = make(None, AfterBackward())
    assert optimizer.compression_report is None


def save(target, form="npz"):
    buffer = io.BytesIO()
    getattr(chainer.serializers, f"save_{form}")(buffer, target)
    return buffer.getvalue()


def load(saved, target, form="npz"):
    getattr(chainer.serializers, f"load_{form}")(io.BytesIO(saved), target)


@pytest.mark.parametrize("scheme", SCHEMES[:2], ids=["afterwards", "overlap"])
@pytest.mark.parametrize("form", ["npz", "hdf5"])
@BY_HOW
def test_a_snapshot_goes_on_bit_by_bit(how, scheme, form):
    if form == "hdf5":
        pytest.importorskip("h5py")
    optimizer, model = make(how, scheme)
    for iteration in range(5):
        optimizer.update(model, *batch(iteration))
    saved = save(optimizer, form), save(model, form)
    for iteration in range(5, 9):
        optimizer.update(model, *batch(iteration))
    again, other = make(how, scheme)
    load(saved[0], again, form)
    load(saved[1], other, form)
    again.assume_synchronized()
    for iteration in range(5, 9):
        again.update(other, *batch(iteration))
    assert bits(other) == bits(model)
    if SIZE > 1:  # this tests the test: without the kept data, the result differs
        forgetful, third = make(how, scheme)
        load(saved[0], forgetful.actual_optimizer, form)
        load(saved[1], third, form)
        forgetful.assume_synchronized()
        for iteration in range(5, 9):
            forgetful.update(third, *batch(iteration))
        assert bits(third) != bits(model)


@BY_SCHEME
def test_snapshots_with_compression_and_without_go_together(scheme):
    compressed, model = make(Int8(), scheme)
    plain, other = make(None, scheme)
    for optimizer, each in ((compressed, model), (plain, other)):
        for iteration in range(4):
            optimizer.update(each, *batch(iteration))
    saved = save(compressed), save(plain)
    load(saved[0], plain)
    load(saved[1], compressed)
    for optimizer, each in ((compressed, model), (plain, other)):
        optimizer.update(each, *batch(4))
        assert len(set(COMM.allgather_obj(bits(each)))) == 1


@pytest.mark.skipif(SIZE < 2, reason="one rank remembers nothing")
@pytest.mark.parametrize("how", [TopK(0.2), PowerSGD(2, 0, 1.2)], ids=["TopK", "PowerSGD"])
def test_a_snapshot_of_rank_0_loaded_everywhere_begins_anew_on_all(how):
    optimizer, model = make(how, AfterBackward())
    for iteration in range(4):
        optimizer.update(model, *batch(iteration))
    again, other = make(how, AfterBackward())
    load(COMM.bcast_obj(save(optimizer)), again)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for iteration in range(4):
            again.update(other, *batch(iteration))
    assert ["error feedback starts again" in str(each.message) for each in caught] == ([True] if RANK == 0 else [])
    assert len(set(COMM.allgather_obj(bits(other)))) == 1


@BY_SCHEME
@BY_HOW
def test_a_nan_on_one_rank_skips_the_step_on_all(how, scheme):
    optimizer, model = make(how, scheme, chainer.optimizers.SGD(0.05))
    optimizer.loss_scaling()
    for iteration in range(5):
        optimizer.update(model, *batch(iteration))
    before = bits(model)
    x, t = batch(5)
    if RANK == SIZE - 1:
        x[0, 0] = np.nan
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        optimizer.update(model, x, t)
        if isinstance(scheme, OneStepLate):
            before = bits(model)
            optimizer.update(model, *batch(6))
    assert any("Non finite number found" in str(each.message) for each in caught)
    assert bits(model) == before
    for iteration in range(7, 10):
        optimizer.update(model, *batch(iteration))
    assert len(set(COMM.allgather_obj(bits(model)))) == 1
    assert all(np.isfinite(param.data).all() for param in model.params())


@BY_HOW
def test_another_loss_scale_changes_nothing(how):
    """The omitted part is in units of the scale."""
    scaled, model = make(how, AfterBackward(), chainer.optimizers.SGD(0.05))
    plain, other = make(how, AfterBackward(), chainer.optimizers.SGD(0.05))
    for iteration in range(8):
        scaled.set_loss_scale(256.0 * 4 ** (iteration % 3))
        scaled.update(model, *batch(iteration))
        plain.update(other, *batch(iteration))
    for one, another in zip(model.params(), other.params(), strict=True):
        np.testing.assert_allclose(one.data, another.data, rtol=2e-3, atol=2e-4)


@pytest.mark.parametrize("how", [None, Int8()], ids=["exact", "Int8"])
def test_a_parameter_that_only_some_ranks_use_is_scaled_on_all(how):
    model = chainer.Chain(a=L.Linear(2, 2), b=L.Linear(2, 2))
    optimizer = MultiNodeOptimizer(chainer.optimizers.SGD(1), COMM, AfterBackward(send=how)).setup(model)
    optimizer.set_loss_scale(64.0)
    x = np.ones((1, 2), "f4")
    for _ in range(3):
        before = model.b.b.data.copy()
        optimizer.update(lambda: F.sum(model.a(x) + model.b(x)) if RANK == 0 else F.sum(model.a(x)))
    np.testing.assert_allclose(before - model.b.b.data, 1 / SIZE, rtol=0.02)
    assert len(set(COMM.allgather_obj(bits(model)))) == 1


@pytest.mark.parametrize("wrong", ["int8", 0.01, Int8])
def test_an_unknown_compression(wrong):
    with pytest.raises(TypeError, match=r"expected Int8\(\), TopK\(\), PowerSGD\(\) or OneBit\(\)"):
        make(wrong, AfterBackward())


def test_naive_and_hooks_are_refused():
    with pytest.raises(ValueError, match="flat; got naive"):
        make(Int8(), AfterBackward(), comm=create_communicator("naive"))
    with pytest.raises(ValueError, match="expected one of compression and comm_hook"):
        COMM.gradient_reducer(compression=Int8(), comm_hook=lambda bucket: bucket.average())


def test_across_nodes(monkeypatch):
    for name in ("two_dimensional", "hierarchical"):
        monkeypatch.setattr(MPI, "Get_processor_name", lambda: f"node{RANK % 2}")
        comm = create_communicator(name, MPI.COMM_WORLD.Dup())
        monkeypatch.undo()
        for how in ALL:
            for scheme in SCHEMES:
                optimizer, model = make(how, scheme, comm=comm)
                for iteration in range(6):
                    optimizer.update(model, *batch(iteration))
                assert len(set(COMM.allgather_obj(bits(model)))) == 1
        comm.finalize()
