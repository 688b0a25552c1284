import chainer
import chainer.functions as F
import chainer.links as L
import numpy as np
import pytest

import mn_optim  # noqa: F401 - before Chainer
from mn_comm import create_communicator
from mn_optim import (
    AfterBackward,
    DuringBackward,
    LocalSGD,
    MultiNodeOptimizer,
    OneStepLate,
    Sharded,
    create_multi_node_optimizer,
)

pytestmark = pytest.mark.sizes(1, 3, 4)

COMM = create_communicator("flat")
RANK, SIZE = COMM.rank, COMM.size


class MLP(chainer.Chain):
    def __init__(self, seed, n_in=5):
        super().__init__()
        initial = chainer.initializers.LeCunNormal(rng=np.random.RandomState(seed))
        with self.init_scope():
            self.l1 = L.Linear(n_in, 8, initialW=initial)
            self.l2 = L.Linear(8, 3, initialW=initial)

    def forward(self, x, t):
        return F.softmax_cross_entropy(self.l2(F.tanh(self.l1(x))), t)


def batch(iteration, rank, size=6):
    random = np.random.RandomState(1000 * iteration + rank)
    return random.rand(size, 5).astype("f4"), random.randint(0, 3, size).astype("i4")


def parameters(model):
    return {name: param.data.copy() for name, param in model.namedparams()}


def test_the_first_update_gives_the_parameters_of_rank_0_to_all_and_takes_no_step():
    model = MLP(seed=RANK)
    optimizer = create_multi_node_optimizer(chainer.optimizers.SGD(), COMM).setup(model)
    optimizer.update(model, *batch(0, RANK))
    assert optimizer.t == 0
    for name, data in parameters(MLP(seed=0)).items():
        np.testing.assert_array_equal(parameters(model)[name], data)


def test_parameters_that_a_signal_handler_has_kept_from_being_distributed_are_still_distributed(monkeypatch):
    def interrupt(*_):
        monkeypatch.undo()
        raise KeyboardInterrupt

    optimizer = create_multi_node_optimizer(chainer.optimizers.SGD(), COMM).setup(MLP(seed=RANK))
    monkeypatch.setattr(MultiNodeOptimizer, "_start_equal", interrupt)
    with pytest.raises(KeyboardInterrupt):
        optimizer.update(optimizer.target, *batch(0, RANK))
    optimizer.update(optimizer.target, *batch(0, RANK))
    assert optimizer.t == 0
    for name, data in parameters(MLP(seed=0)).items():
        np.testing.assert_array_equal(parameters(optimizer.target)[name], data)


@pytest.mark.parametrize(
    "make",
    [lambda: chainer.optimizers.SGD(lr=0.5), chainer.optimizers.Adam, lambda: chainer.optimizers.MomentumSGD(0.1)],
)
@pytest.mark.parametrize("name", ["naive", "flat", "hierarchical", "two_dimensional"])
def test_training_on_all_ranks_is_training_on_one_with_the_whole_batch(name, make):
    comm = create_communicator(name)
    model = MLP(seed=RANK)
    optimizer = create_multi_node_optimizer(make(), comm).setup(model)
    alone = MLP(seed=0)
    actual = make().setup(alone)
    optimizer.update(model, *batch(0, RANK))
    for iteration in range(1, 6):
        optimizer.update(model, *batch(iteration, RANK))
        parts = [batch(iteration, rank) for rank in range(SIZE)]
        actual.update(alone, *(np.concatenate(column) for column in zip(*parts, strict=True)))
    assert optimizer.t == actual.t == 5
    for key, data in parameters(alone).items():
        np.testing.assert_allclose(parameters(model)[key], data, rtol=2e-4, atol=2e-5)
    comm.finalize()


def test_update_without_a_loss_function_uses_the_gradients_that_are_there():
    model = MLP(seed=0)
    optimizer = create_multi_node_optimizer(chainer.optimizers.SGD(lr=1), COMM).setup(model)
    optimizer.update(model, *batch(0, RANK))
    before = parameters(model)
    for param in model.params():
        param.grad = np.full_like(param.data, RANK)
    optimizer.update()
    for name, data in parameters(model).items():
        np.testing.assert_allclose(data, before[name] - (SIZE - 1) / 2, rtol=1e-5)


def test_hooks_see_averaged_gradients_and_may_change_them_in_place():
    model = MLP(seed=0)
    optimizer = create_multi_node_optimizer(chainer.optimizers.SGD(lr=1), COMM).setup(model)
    optimizer.add_hook(chainer.optimizer_hooks.GradientClipping(1e-3))
    optimizer.add_hook(chainer.optimizer_hooks.WeightDecay(0.5))
    optimizer.update(model, *batch(0, RANK))
    for iteration in range(3):
        optimizer.update(model, *batch(iteration, RANK))
    for name, data in parameters(model).items():
        for other in COMM.allgather(data):
            np.testing.assert_array_equal(other, data, err_msg=name)


def test_a_parameter_that_is_initialised_later_means_another_broadcast():
    class Lazy(chainer.Chain):
        def __init__(self):
            super().__init__()
            with self.init_scope():
                self.used = L.Linear(5, 3)
                self.late = L.Linear(None, 3)

        def forward(self, x, t, late):
            return F.softmax_cross_entropy(self.late(x) if late else self.used(x), t)

    model = Lazy()
    optimizer = create_multi_node_optimizer(chainer.optimizers.SGD(), COMM).setup(model)
    optimizer.update(model, *batch(0, RANK), late=False)
    optimizer.update(model, *batch(1, RANK), late=False)
    assert optimizer.t == 1
    optimizer.update(model, *batch(2, RANK), late=True)
    assert optimizer.t == 1
    for other in COMM.allgather(model.late.W.data):
        np.testing.assert_array_equal(other, model.late.W.data)
    optimizer.update(model, *batch(3, RANK), late=True)
    assert optimizer.t == 2


@pytest.mark.parametrize("zero_fill", [True, False])
def test_parameters_without_a_gradient(zero_fill):
    model = chainer.Chain(used=L.Linear(5, 3), unused=L.Linear(5, 3))
    seen = []

    class SGD(chainer.optimizers.SGD):
        def update(self, lossfun=None, *args, **kwds):
            seen.append(model.unused.W.grad)  # Chainer itself fills in zeros, but only after this
            super().update(lossfun, *args, **kwds)

    optimizer = create_multi_node_optimizer(SGD(), COMM, zero_fill=zero_fill).setup(model)
    for iteration in range(3):
        x, t = batch(iteration, RANK)
        optimizer.update(lambda x=x, t=t: F.softmax_cross_entropy(model.used(x), t))
    assert optimizer.t == 2
    assert [grad is not None for grad in seen] == [zero_fill] * 2


@pytest.mark.filterwarnings("ignore:.*zerograds? is deprecated")
@pytest.mark.parametrize("use_cleargrads", [True, False])
def test_cleargrads_and_zerograds(use_cleargrads):
    model = MLP(seed=0)
    optimizer = create_multi_node_optimizer(chainer.optimizers.SGD(lr=0.1), COMM).setup(model)
    optimizer._use_cleargrads = use_cleargrads
    assert optimizer.actual_optimizer._use_cleargrads is use_cleargrads
    reference = MLP(seed=0)
    actual = chainer.optimizers.SGD(lr=0.1).setup(reference)
    optimizer.update(model, *batch(0, 0))
    for iteration in range(1, 4):
        optimizer.update(model, *batch(iteration, 0))
        actual.update(reference, *batch(iteration, 0))
    for name, data in parameters(reference).items():
        np.testing.assert_allclose(parameters(model)[name], data, rtol=1e-5)


def test_loss_scaling():
    model = MLP(seed=0)
    optimizer = create_multi_node_optimizer(chainer.optimizers.SGD(lr=0.1), COMM).setup(model)
    optimizer.set_loss_scale(64)
    reference = MLP(seed=0)
    actual = chainer.optimizers.SGD(lr=0.1).setup(reference)
    optimizer.update(model, *batch(0, 0))
    for iteration in range(1, 4):
        optimizer.update(model, *batch(iteration, 0))
        actual.update(reference, *batch(iteration, 0))
    for name, data in parameters(reference).items():
        np.testing.assert_allclose(parameters(model)[name], data, rtol=1e-5, atol=1e-6)


def test_a_nan_on_one_rank_skips_the_step_on_all():
    model = MLP(seed=0)
    optimizer = create_multi_node_optimizer(chainer.optimizers.SGD(lr=0.1), COMM).setup(model)
    optimizer.loss_scaling()
    optimizer.update(model, *batch(0, RANK))
    optimizer.update(model, *batch(1, RANK))
    before = parameters(model)
    x, t = batch(2, RANK)
    if RANK == SIZE - 1:
        x[0, 0] = np.nan
    with pytest.warns(UserWarning, match="Non finite number found"):
        optimizer.update(model, x, t)
    for name, data in parameters(model).items():
        np.testing.assert_array_equal(data, before[name])


@pytest.mark.parametrize("when", [AfterBackward(), DuringBackward(), OneStepLate()])
def test_a_nan_on_one_rank_raises_on_all_in_debug_mode(when):
    model = MLP(seed=0)
    optimizer = MultiNodeOptimizer(chainer.optimizers.SGD(), COMM, when).setup(model)
    optimizer.assume_synchronized()
    with pytest.raises(ValueError, match="expected finite gradients in debug mode, got NaN or infinity for /l2/b"):
        with chainer.using_config("debug", True):
            for _ in range(2):  # with double buffering the second step applies the gradients of the first
                for param in model.params():
                    param.grad = np.ones_like(param.data)
                model.l2.b.grad[1] = np.nan if RANK == SIZE - 1 else 1
                optimizer.update()


@pytest.mark.skipif(SIZE < 2, reason="needs two ranks that differ")
@pytest.mark.parametrize(
    ("other", "message"),
    [
        (lambda: chainer.Chain(l1=L.Linear(5, 8)), "first at /l2/W: shape (3, 8) and dtype float32 on rank 0, missing"),
        (lambda: MLP(0, n_in=6), "first at /l1/W: shape (8, 5) and dtype float32 on rank 0, shape (8, 6)"),
    ],
)
def test_models_that_differ_raise_on_all_ranks(other, message):
    model = MLP(0) if RANK == 0 else other()
    model.cleargrads()
    optimizer = create_multi_node_optimizer(chainer.optimizers.SGD(), COMM).setup(model)
    with pytest.raises(ValueError) as caught:
        optimizer.update()
    assert message in str(caught.value)


def test_in_a_trainer(tmp_path):
    chainer.global_config.autotune = False
    model = L.Classifier(L.Linear(5, 3))
    optimizer = create_multi_node_optimizer(chainer.optimizers.Adam(), COMM).setup(model)
    x, t = batch(0, RANK, size=20)
    dataset = chainer.datasets.TupleDataset(x, t)
    iterator = chainer.iterators.SerialIterator(dataset, 4)
    updater = chainer.training.StandardUpdater(iterator, optimizer)
    trainer = chainer.training.Trainer(updater, (2, "epoch"), out=tmp_path)
    trainer.run()
    assert optimizer.t == 9  # ten iterations, of which the first takes no step


def test_a_training_in_an_exception_handler_ends_with_equal_parameters(tmp_path):
    """For example after another one that Ctrl-C has ended."""
    model = L.Classifier(L.Linear(5, 3))
    optimizer = MultiNodeOptimizer(chainer.optimizers.SGD(), COMM, LocalSGD(3)).setup(model)
    iterator = chainer.iterators.SerialIterator(chainer.datasets.TupleDataset(*batch(0, RANK, size=20)), 4)
    trainer = chainer.training.Trainer(
        chainer.training.StandardUpdater(iterator, optimizer), (6, "iteration"), out=tmp_path
    )
    try:
        raise KeyboardInterrupt
    except KeyboardInterrupt:
        trainer.run()
    assert optimizer.t == 5
    mine = parameters(model)
    for other in COMM.allgather_obj(mine):
        for name, data in mine.items():
            np.testing.assert_array_equal(other[name], data)


@pytest.mark.skipif(SIZE < 2, reason="needs ranks that differ")
@pytest.mark.parametrize("step", [1, 4])
@pytest.mark.parametrize("where", [0, SIZE - 1])
@pytest.mark.parametrize(
    "when", [AfterBackward(), DuringBackward(), OneStepLate(), Sharded(DuringBackward())], ids=repr
)
def test_a_parameter_that_only_one_rank_adds(when, where, step):
    """All ranks raise, also those that average the gradients of the old parameters."""
    model = MLP(seed=0)
    optimizer = MultiNodeOptimizer(chainer.optimizers.SGD(), COMM, when).setup(model)
    for iteration in range(step):
        optimizer.update(model, *batch(iteration, RANK))
    if where == RANK:
        with model.init_scope():
            model.l3 = L.Linear(3, 3)
    with pytest.raises(
        ValueError, match=rf"only rank {where} has the parameter /l3/W|the first backward pass|the choice of which rank"
    ):
        optimizer.update(model, *batch(step, RANK))
        optimizer.update(model, *batch(step + 1, RANK))
