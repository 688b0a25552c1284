"""Overlap with the backward pass, double buffering, and gradients that are added up before they are sent."""

import sys
import threading
from dataclasses import replace

import chainer
import chainer.functions as F
import chainer.links as L
import numpy as np
import pytest

import mn_optim  # noqa: F401 - before Chainer
from mn_comm import create_communicator
from mn_comm.gradients.bucket import Bucket
from mn_optim import (
    AfterBackward,
    DuringBackward,
    MultiNodeOptimizer,
    OneStepLate,
    Sharded,
    create_multi_node_optimizer,
)
from mn_optim.schemes.overlapped import Overlapped

NAMES = ["naive", "flat", "hierarchical", "two_dimensional"]
COMM = create_communicator("flat")
RANK, SIZE = COMM.rank, COMM.size


class Net(chainer.Chain):
    """A net with a different graph on every rank and in every step, with a link that is never used."""

    def __init__(self):
        super().__init__()
        initial = chainer.initializers.LeCunNormal(rng=np.random.RandomState(0))
        with self.init_scope():
            self.first = L.Linear(5, 8, initialW=initial)
            self.middle = chainer.ChainList(*(L.Linear(8, 8, initialW=initial) for _ in range(4)))
            self.last = L.Linear(8, 3, initialW=initial)
            self.unused = L.Linear(3, 3, initialW=initial)

    def forward(self, x, t, seed):
        h = F.relu(self.first(x))
        for link in np.random.RandomState(seed).permutation(4)[:3]:
            h = F.tanh(self.middle[int(link)](h))
        return F.softmax_cross_entropy(self.last(h), t)


def batch(iteration, rank=RANK):
    random = np.random.RandomState(100 * iteration + rank)
    return random.rand(6, 5).astype("f4"), random.randint(0, 3, 6).astype("i4"), 100 * iteration + rank


def parameters(model):
    return {name: param.data.copy() for name, param in model.namedparams()}


def same(actual, expected):
    for name, data in expected.items():
        np.testing.assert_array_equal(actual[name], data, err_msg=name)


def train(optimizer, iterations=6):
    model = Net()
    optimizer.setup(model)
    for iteration in range(iterations):
        optimizer.update(model, *batch(iteration))
    return parameters(model)


class AfterwardsInTheSameBuckets(Overlapped):
    """The same buckets in the same order, but all of them after the backward pass."""

    def average(self, model, backward):
        if self._order is None:
            return super().average(model, backward)
        backward(None)
        reduction = self._reducer.start(model, zero_fill=True, order=self._order)
        reduction.ready_all()
        reduction.wait()
        return True


@pytest.mark.parametrize("bucket_bytes", [1, 300, 1 << 20])
@pytest.mark.parametrize("name", NAMES)
def test_overlapping_changes_no_bit(name, bucket_bytes):
    comm = create_communicator(name)
    overlapped = MultiNodeOptimizer(
        chainer.optimizers.MomentumSGD(0.1), comm, DuringBackward(bucket_bytes=bucket_bytes)
    )
    afterwards = create_multi_node_optimizer(chainer.optimizers.MomentumSGD(0.1), comm)
    reducer = comm.gradient_reducer(background=True, bucket_bytes=bucket_bytes)
    afterwards._stepper.scheme = AfterwardsInTheSameBuckets(comm, reducer)
    expected = train(afterwards)
    actual = train(overlapped)
    same(actual, expected)
    for other in comm.allgather_obj(actual):
        same(other, actual)
    plain = train(create_multi_node_optimizer(chainer.optimizers.MomentumSGD(0.1), comm))
    for key, data in plain.items():
        np.testing.assert_allclose(actual[key], data, rtol=1e-4, atol=1e-6)


def test_buckets_travel_before_the_backward_pass_is_over(monkeypatch):
    optimizer = MultiNodeOptimizer(chainer.optimizers.SGD(), COMM, DuringBackward(bucket_bytes=1))
    model = Net()
    optimizer.setup(model)
    optimizer.update(model, *batch(0))
    optimizer.update(model, *batch(1))
    launched = []
    launch = Bucket.launch
    monkeypatch.setattr(Bucket, "launch", lambda bucket: launched.append(bucket) or launch(bucket))
    seen = []

    class Hook(chainer.FunctionHook):
        def backward_postprocess(self, function, in_data, out_grad):
            seen.append(len(launched))

    with Hook():
        optimizer.update(model, *batch(1))
    assert 0 < seen[-1] < len(launched)
    assert seen == sorted(seen)


def test_updates_without_a_loss_function():
    optimizer = MultiNodeOptimizer(chainer.optimizers.SGD(lr=1), COMM, DuringBackward())
    model = Net()
    optimizer.setup(model)
    optimizer.update(model, *batch(0))
    for _ in range(2):
        before = parameters(model)
        for param in model.params():
            param.grad = np.full_like(param.data, RANK)
        optimizer.update()
        for name, data in parameters(model).items():
            np.testing.assert_allclose(data, before[name] - (SIZE - 1) / 2, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("name", NAMES)
def test_double_buffering_applies_the_gradients_of_the_step_before(name):
    comm = create_communicator(name)
    model, alone = Net(), Net()
    optimizer = create_multi_node_optimizer(chainer.optimizers.SGD(lr=0.5), comm, double_buffering=True).setup(model)
    optimizer.update(model, *batch(0))
    assert optimizer.t == 0
    optimizer.update(model, *batch(1))
    assert optimizer.t == 0
    same(parameters(model), parameters(alone))
    previous = mean_gradients(alone, 1)
    for iteration in range(2, 6):
        current = mean_gradients(alone, iteration)
        optimizer.update(model, *batch(iteration))
        for key, param in alone.namedparams():
            param.data -= 0.5 * previous[key]
        previous = current
        for key, data in parameters(alone).items():
            np.testing.assert_allclose(parameters(model)[key], data, rtol=1e-4, atol=1e-6)
    assert optimizer.t == 4


def test_loading_discards_the_mean_that_double_buffering_would_apply_next(tmp_path):
    optimizer = MultiNodeOptimizer(chainer.optimizers.MomentumSGD(0.1), COMM, OneStepLate())
    train(optimizer)
    files = [tmp_path / "model.npz", tmp_path / "optimizer.npz"]
    for file, each in zip(files, (optimizer.target, optimizer), strict=True):
        chainer.serializers.save_npz(file, each)
    expected = parameters(optimizer.target)
    optimizer.target.first.W.data[...] = np.nan
    optimizer.update(optimizer.target, *batch(6))
    for file, each in zip(files, (optimizer.target, optimizer), strict=True):
        chainer.serializers.load_npz(file, each)
    optimizer.update(optimizer.target, *batch(7))
    same(parameters(optimizer.target), expected)
    optimizer.update(optimizer.target, *batch(8))
    assert all(np.isfinite(data).all() for data in parameters(optimizer.target).values())


def mean_gradients(model, iteration):
    """Return the mean over all ranks, computed on this rank alone."""
    total = {name: np.zeros_like(param.data) for name, param in model.namedparams()}
    for rank in range(SIZE):
        model.cleargrads()
        model(*batch(iteration, rank)).backward()
        for name, param in model.namedparams():
            if param.grad is not None:
                total[name] += param.grad / SIZE
    model.cleargrads()
    return total


@pytest.mark.parametrize("when", [AfterBackward(), DuringBackward(bucket_bytes=300)])
def test_gradients_are_added_up_and_travel_once(when, monkeypatch):
    model, whole = Net(), Net()
    optimizer = MultiNodeOptimizer(chainer.optimizers.SGD(lr=0.5), COMM, when).setup(model)
    reference = create_multi_node_optimizer(chainer.optimizers.SGD(lr=0.5), COMM).setup(whole)
    optimizer.update(model, *batch(0))
    reference.update(whole, *batch(0))
    for iteration in range(3):
        x, t, _ = batch(iteration)
        before = parameters(model)
        with optimizer.no_sync():
            optimizer.update(lambda x=x, t=t: model(x[:2], t[:2], 7) / 3)
            optimizer.update(lambda x=x, t=t: model(x[2:4], t[2:4], 7) / 3)
            same(parameters(model), before)
        optimizer.update(lambda x=x, t=t: model(x[4:], t[4:], 7) / 3)
        assert optimizer.t == iteration + 1
        reference.update(whole, x, t, 7)
        for key, data in parameters(whole).items():
            np.testing.assert_allclose(parameters(model)[key], data, rtol=1e-4, atol=1e-6)


def test_no_update_is_lost_when_the_parameters_are_known_to_be_equal():
    model = Net()
    optimizer = create_multi_node_optimizer(chainer.optimizers.SGD(), COMM).setup(model)
    optimizer.assume_synchronized()
    optimizer.update(model, *batch(0))
    assert optimizer.t == 1


def test_a_nan_on_one_rank_skips_the_step_on_all():
    model = Net()
    optimizer = MultiNodeOptimizer(chainer.optimizers.SGD(0.1), COMM, DuringBackward(bucket_bytes=300))
    optimizer.setup(model).loss_scaling()
    for iteration in range(3):
        optimizer.update(model, *batch(iteration))
    before = parameters(model)
    x, t, seed = batch(3)
    if RANK == SIZE - 1:
        x[0, 0] = np.nan
    with pytest.warns(UserWarning, match="Non finite number found"):
        optimizer.update(model, x, t, seed)
    same(parameters(model), before)


@pytest.mark.parametrize("when", [OneStepLate(), Sharded(OneStepLate())])
@pytest.mark.parametrize("scales", [[None, 1, 2, 4, 32, 8], [None, None, None, 4, 4, None, None]], ids=str)
def test_double_buffering_divides_by_the_loss_scale_of_the_gradients(scales, when):
    model = L.Linear(2, 1, nobias=True, initialW=0)
    optimizer = MultiNodeOptimizer(chainer.optimizers.SGD(1), COMM, when).setup(model)
    x = np.ones((1, 2), np.float32)
    for i, scale in enumerate(scales):
        optimizer.set_loss_scale(scale)
        optimizer.update(lambda x: F.sum(model(x)), x)
        np.testing.assert_array_equal(model.W.data, -max(i - 1, 0))  # all gradients are 1; one is being averaged


@pytest.mark.skipif(SIZE < 2, reason="needs two ranks that differ")
@pytest.mark.parametrize("when", [DuringBackward(), OneStepLate()])
def test_models_that_come_to_differ_raise_on_all_ranks(when):
    model = chainer.Chain(a=L.Linear(5, 3), b=L.Linear(5, 3))
    optimizer = MultiNodeOptimizer(chainer.optimizers.SGD(), COMM, when).setup(model)
    x = batch(0)[0]
    for _ in range(2):
        optimizer.update(lambda: F.sum(model.a(x)) + F.sum(model.b(x)))
    if RANK == SIZE - 1:
        model.b.W.array = np.zeros((3, 6), "f4")
        model.b.W.grad = None
    wide = np.zeros((6, 6), "f4")
    with pytest.raises(ValueError, match=r"first at /b/W: shape \(3, 5\) .* on rank 0, shape \(3, 6\)"):
        optimizer.update(lambda: F.sum(model.a(x)) + F.sum(model.b(wide if RANK == SIZE - 1 else x)))


def advance(optimizer, without=()):
    for name, param in optimizer.target.namedparams():
        param.grad = None if name in without else np.full_like(param.data, RANK + 1)
    optimizer.update()


@pytest.mark.parametrize("when", [OneStepLate(), OneStepLate(zero_fill=False), Sharded(OneStepLate())], ids=str)
@pytest.mark.parametrize("has_gradient", [True, False])
def test_a_mean_of_an_old_shape_is_not_applied_on_any_rank(when, has_gradient):
    model = chainer.Link(a=(2, 3), b=5)
    optimizer = MultiNodeOptimizer(chainer.optimizers.SGD(1), COMM, when).setup(model)
    for _ in range(3):
        advance(optimizer)
    taken = optimizer.t
    # Without gradients, nothing else compares the shapes of this parameter.
    if has_gradient or when != OneStepLate(zero_fill=False) or RANK == SIZE - 1:
        model.b.array = np.zeros(7, "f4")
    with pytest.raises(ValueError, match=r"expected /b to keep its shape \(5,\) until .*; got \(7,\)"):
        advance(optimizer, without=() if has_gradient else ["/b"])
    assert optimizer.t == taken
    model.b.array = np.zeros(7, "f4")
    for _ in range(2):  # the first has no means yet
        advance(optimizer)
    assert optimizer.t == taken + 1
    np.testing.assert_array_equal(model.b.data, -(SIZE + 1) / 2)


class Raising(chainer.FunctionNode):
    """The identity; its backward pass raises."""

    def forward(self, inputs):
        return inputs

    def backward(self, indexes, grads):
        raise ArithmeticError("half way")


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("when", [AfterBackward(), DuringBackward(), OneStepLate()])
def test_a_batch_skipped_by_all_ranks_leaves_nothing_in_the_next_mean(when, name):
    """The backward pass raises after large buckets have been sent."""
    optimizer = MultiNodeOptimizer(chainer.optimizers.SGD(), create_communicator(name), when)
    model = chainer.Link()
    with model.init_scope():
        for i in range(3):
            setattr(model, f"p{i}", chainer.Parameter(np.zeros(1_500_000, "f4")))
    optimizer.setup(model)
    optimizer.assume_synchronized()

    def loss(factor, fails=False):
        p0 = Raising().apply((model.p0,))[0] if fails else F.identity(model.p0)
        return sum(F.sum(p * np.float32(factor)) for p in (F.identity(F.identity(p0)), model.p1, model.p2))

    for step in range(8):
        with pytest.raises(ArithmeticError, match="half way"):
            optimizer.update(loss, 100 + RANK, fails=True)
        optimizer.update(loss, RANK + step)
        if isinstance(when, OneStepLate):
            optimizer.update(loss, RANK + step)  # applies the gradients of the previous update
        for param in model.params():
            assert (param.grad == (SIZE - 1) / 2 + step).all()


@pytest.mark.parametrize("name", NAMES)
def test_a_parameter_that_is_not_initialised_beside_gradients_set_by_hand(name):
    """Chainer raises if it is asked for the gradient of such a parameter before ``cleargrads()``."""
    model = chainer.Chain(known=L.Linear(2, 3), unknown=L.Linear(None, 3))
    given = (model.known.W, model.known.b, model.unknown.b)
    for factor, param in enumerate(given):
        param.grad = np.full(param.shape, factor * RANK, "f4")
    create_communicator(name).multi_node_mean_grad(model)
    for factor, param in enumerate(given):
        np.testing.assert_array_equal(param.grad, np.full(param.shape, factor * (SIZE - 1) / 2))


@pytest.mark.parametrize("where", ["all", "one"])
@pytest.mark.parametrize("when", [DuringBackward(), OneStepLate()])
def test_after_a_hook_that_raises_all_ranks_have_taken_the_same_steps(when, where):
    calls = []

    def hook(bucket):
        calls.append(bucket)
        if len(calls) == 3 and (where == "all" or RANK == SIZE - 1):
            raise ArithmeticError("no mean")
        return bucket.average()

    model = chainer.Link()
    with model.init_scope():
        model.p = chainer.Parameter(np.zeros(3, "f4"))
    optimizer = MultiNodeOptimizer(chainer.optimizers.SGD(1), COMM, replace(when, send=hook)).setup(model)
    optimizer.assume_synchronized()
    failed = 0
    for step in range(8):
        model.p.grad = np.full(3, 10.0**step * (RANK + 1), "f4")
        try:
            optimizer.update()
        except (ArithmeticError, RuntimeError):
            failed += 1
    assert failed == 1
    taken = [0, 1, 3, 4, 5, 6, 7] if isinstance(when, DuringBackward) else [0, 3, 4, 5, 6]
    expected = -sum(10.0**step for step in taken) * (SIZE + 1) / 2
    np.testing.assert_allclose(model.p.array, np.full(3, expected), rtol=1e-6)
    assert len({param.tobytes() for param in COMM.allgather_obj(model.p.array)}) == 1


@pytest.mark.parametrize("when", [AfterBackward(), DuringBackward(), OneStepLate()])
def test_parameters_are_shared_out_though_the_first_backward_pass_raises(when):
    model = chainer.Link()
    with model.init_scope():
        model.p = chainer.Parameter(np.full(3, RANK, "f4"))
    optimizer = MultiNodeOptimizer(chainer.optimizers.SGD(), COMM, when).setup(model)
    with pytest.raises(ArithmeticError, match="half way"):
        optimizer.update(lambda: F.sum(Raising().apply((model.p,))[0]))
    optimizer.update(lambda: F.sum(model.p))
    np.testing.assert_array_equal(model.p.array, np.zeros(3))
    assert optimizer.t == 0


def test_backward_passes_of_several_threads():
    """Each has its own communicator."""
    comms = [create_communicator("flat", COMM.mpi_comm.Dup()) for _ in range(3)]
    wrong = []

    def train(i):
        model = chainer.Sequential(*[L.Linear(3, 3, initialW=np.eye(3), nobias=True) for _ in range(4)])
        optimizer = MultiNodeOptimizer(chainer.optimizers.SGD(0), comms[i], DuringBackward()).setup(model)
        optimizer.assume_synchronized()
        for step in range(100):
            factor = (step + 1) * (i + 1)
            x = chainer.Variable(np.full((1, 3), (RANK + 1) * factor, "f4"))
            optimizer.update(lambda x=x: F.sum(model(x)))
            means = [float(param.grad[0, 0]) for param in model.params()]
            if means != [(SIZE + 1) / 2 * factor] * 4:
                wrong.append((i, step, means))

    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    try:
        threads = [threading.Thread(target=train, args=(i,)) for i in range(len(comms))]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    finally:
        sys.setswitchinterval(interval)
    assert not wrong
