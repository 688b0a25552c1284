"""Ranks that have data for different numbers of updates: join(), in a loop of the script."""

import chainer
import chainer.functions as F
import chainer.links as L
import numpy as np
import pytest

import mn_compress as compression
import mn_optim  # noqa: F401 - before Chainer
from mn_comm import create_communicator
from mn_optim import (
    AfterBackward,
    Asynchronous,
    DiLoCo,
    DuringBackward,
    LocalSGD,
    MultiNodeOptimizer,
    OneStepLate,
    StreamingDiLoCo,
    SynchronousFirst,
    create_multi_node_optimizer,
)

pytestmark = pytest.mark.sizes(1, 3)

COMM = create_communicator("two_dimensional")
RANK, SIZE = COMM.rank, COMM.size
COUNTS = [[7, 5, 3, 0], [0, 2, 4, 1], [3, 3, 3, 3]]
EXACT = {"plain": AfterBackward(), "overlap": DuringBackward(), "double_buffering": OneStepLate()}
COMPRESSED = {
    "int8": AfterBackward(send=compression.Int8()),
    "top_k": AfterBackward(send=compression.TopK(0.5)),
    "power_sgd": AfterBackward(send=compression.PowerSGD(1)),
    "one_bit": AfterBackward(send=compression.OneBit()),
    "int8, overlap": DuringBackward(send=compression.Int8()),
    "int8, double_buffering": OneStepLate(send=compression.Int8()),
}
LOOSE = {
    "local_steps": LocalSGD(2),
    "post-local": SynchronousFirst(3, LocalSGD(2, average_state=True)),
    "diloco": DiLoCo(2),
    "streaming": StreamingDiLoCo(2, fragments=2),
    "asynchronous": Asynchronous(),
    "asynchronous, warm-up": SynchronousFirst(3, Asynchronous()),
}


class Net(chainer.Chain):
    """A net whose first parameters are created when it first gets data."""

    def __init__(self):
        super().__init__()
        initial = chainer.initializers.LeCunNormal(rng=np.random.RandomState(0))
        with self.init_scope():
            self.first = L.Linear(None, 8, initialW=initial)
            self.last = L.Linear(8, 3, initialW=initial)

    def forward(self, x, t):
        loss = F.softmax_cross_entropy(self.last(F.tanh(self.first(x))), t)
        chainer.report({"loss": loss}, self)
        return loss


def batch(rank, i, n=6):
    random = np.random.RandomState(100 * rank + i)
    return random.rand(n, 5).astype("f4"), random.randint(0, 3, n).astype("i4")


def parameters(model):
    return {name: param.data.copy() for name, param in model.namedparams() if param.data is not None}


def expect_equal_everywhere(model):
    mine = parameters(model)
    for other in COMM.allgather_obj(mine):
        for name, data in mine.items():
            np.testing.assert_array_equal(other[name], data, err_msg=name)


def train(counts, when, over="present", name="two_dimensional", actual=None):
    comm = create_communicator(name)
    actual = actual or chainer.optimizers.MomentumSGD(0.1)
    optimizer = MultiNodeOptimizer(actual, comm, when).setup(Net())
    with optimizer.join(over):
        for i in range(counts[RANK]):
            optimizer.update(optimizer.target, *batch(RANK, i))
    expect_equal_everywhere(optimizer.target)
    return optimizer


def alone(counts, over="present", delay=0, actual=None):
    """Train in one process with the same batches; the first update distributes parameters and takes no step."""
    counts = counts[:SIZE]
    optimizer = (actual or chainer.optimizers.MomentumSGD(0.1)).setup(Net())
    model = optimizer.target
    model(*batch(0, 0))
    queue = []
    for i in range(1, max(counts)):
        model.cleargrads()
        present = [rank for rank in range(SIZE) if counts[rank] > i]
        for rank in present:
            loss = model(*batch(rank, i)) / (len(present) if over == "present" else SIZE)
            loss.backward(loss_scale=optimizer._loss_scale)
        queue.append({name: param.grad.copy() for name, param in model.namedparams()})
        if len(queue) > delay:
            for name, param in model.namedparams():
                param.grad = queue[0][name]
            queue.pop(0)
            optimizer.update()
    return parameters(model)


def close(actual, expected, atol=1e-6):
    for name, data in expected.items():
        np.testing.assert_allclose(actual[name], data, rtol=1e-5, atol=atol, err_msg=name)


@pytest.mark.parametrize("over", ["present", "all"])
@pytest.mark.parametrize("counts", COUNTS, ids=str)
@pytest.mark.parametrize("scheme", EXACT)
def test_it_is_the_training_of_one_process(scheme, counts, over):
    optimizer = train(counts, EXACT[scheme], over)
    delay = scheme == "double_buffering"
    assert optimizer.t == max(max(counts[:SIZE]) - 1 - delay, 0)
    if max(counts[:SIZE]):
        close(parameters(optimizer.target), alone(counts, over, delay))


@pytest.mark.parametrize("name", ["naive", "flat", "hierarchical"])
def test_every_strategy_joins(name):
    close(parameters(train(COUNTS[0], AfterBackward(), name=name).target), alone(COUNTS[0]))


def test_state_of_the_optimizer_is_that_of_one_process():
    optimizer = train(COUNTS[0], AfterBackward(), actual=chainer.optimizers.Adam(0.01))
    close(parameters(optimizer.target), alone(COUNTS[0], actual=chainer.optimizers.Adam(0.01)), atol=1e-5)


def test_loss_scaling():
    actual, single = chainer.optimizers.MomentumSGD(0.1), chainer.optimizers.MomentumSGD(0.1)
    for each in (actual, single):
        each.set_loss_scale(64.0)
    close(parameters(train(COUNTS[0], AfterBackward(), actual=actual).target), alone(COUNTS[0], actual=single))


@pytest.mark.parametrize("scheme", COMPRESSED)
def test_compression_joins(scheme):
    optimizer = train(COUNTS[0], COMPRESSED[scheme])
    delay = "double" in scheme
    assert optimizer.t == 6 - delay
    if scheme.startswith("int8"):
        close(parameters(optimizer.target), alone(COUNTS[0], delay=delay), atol=5e-3)


@pytest.mark.parametrize("counts", COUNTS, ids=str)
@pytest.mark.parametrize("scheme", LOOSE)
def test_ranks_that_meet_less_often_join(scheme, counts):
    optimizer = train(counts, LOOSE[scheme])
    assert optimizer.t >= counts[RANK] - 1


def test_local_steps_are_the_mean_of_those_who_went_on():
    """With one step between meetings and SGD, local steps equal exact ones."""
    optimizer = train(COUNTS[0], LocalSGD(1), actual=chainer.optimizers.SGD(0.1))
    close(parameters(optimizer.target), alone(COUNTS[0], actual=chainer.optimizers.SGD(0.1)))


@pytest.mark.parametrize("scheme", [*EXACT, "local_steps"])
def test_one_join_after_another(scheme):
    when = {**EXACT, **LOOSE}[scheme]
    optimizer = MultiNodeOptimizer(chainer.optimizers.MomentumSGD(0.1), COMM, when).setup(Net())
    for epoch in range(3):
        with optimizer.join():
            for i in range(COUNTS[epoch % 2][RANK]):
                optimizer.update(optimizer.target, *batch(RANK, i))
        expect_equal_everywhere(optimizer.target)
    optimizer.update(optimizer.target, *batch(RANK, 0))  # outside


def test_double_buffering_loses_no_gradient_between_joins():
    optimizer = create_multi_node_optimizer(chainer.optimizers.MomentumSGD(0.1), COMM, double_buffering=True)
    optimizer.setup(Net())
    counts = [[n, 1, 1, 0] for n in (2, 2, 3)]
    expected = []
    single = chainer.optimizers.MomentumSGD(0.1).setup(Net())
    single.target(*batch(0, 0))
    for epoch, each in enumerate(counts):
        with optimizer.join():
            for i in range(each[RANK]):
                optimizer.update(optimizer.target, *batch(RANK, 10 * epoch + i))
        for i in range(each[0]):
            expected.append([(rank, 10 * epoch + i) for rank in range(SIZE) if each[rank] > i])
    for step in expected[1:-1]:  # the first distributes parameters, the last is still being averaged
        single.target.cleargrads()
        for rank, i in step:
            (single.target(*batch(rank, i)) / len(step)).backward()
        single.update()
    # The gradients of step k belong to the parameters before step k - 1 was taken: compare only the number.
    assert optimizer.t == single.t


@pytest.mark.parametrize("scheme", EXACT)
def test_hyperparameters_may_change_in_the_loop(scheme):
    """A rank that has left it would use the values that it had then."""
    optimizer = MultiNodeOptimizer(chainer.optimizers.MomentumSGD(0.1), COMM, EXACT[scheme]).setup(Net())
    with optimizer.join():
        for i in range(COUNTS[0][RANK]):
            optimizer.lr = 0.1 / (1 + i)
            optimizer.update(optimizer.target, *batch(RANK, i))
    expect_equal_everywhere(optimizer.target)
    assert optimizer.lr == 0.1 / 7


def test_nobody_has_data():
    optimizer = create_multi_node_optimizer(chainer.optimizers.SGD(), COMM).setup(Net())
    with optimizer.join():
        pass
    assert optimizer.t == 0
    optimizer.update(optimizer.target, *batch(RANK, 0))
    expect_equal_everywhere(optimizer.target)


def test_gradients_are_added_up_within():
    optimizer = create_multi_node_optimizer(chainer.optimizers.SGD(0.1), COMM).setup(Net())
    with optimizer.join():
        for i in range(COUNTS[0][RANK]):
            with optimizer.no_sync():
                optimizer.update(optimizer.target, *batch(RANK, 100 + i))
            optimizer.update(optimizer.target, *batch(RANK, i))
    assert optimizer.t == 6
    expect_equal_everywhere(optimizer.target)


class OneMatrix(chainer.Chain):
    """A parameter whose gradient is given."""

    def __init__(self):
        super().__init__()
        with self.init_scope():
            self.w = chainer.Parameter(np.zeros((24, 24), "f4"))

    def forward(self, grad):
        return F.sum(self.w * grad)


def test_a_part_whose_mini_batch_is_not_completed_is_not_added_to_means():
    model, ones = OneMatrix(), np.ones((24, 24), "f4")
    optimizer = create_multi_node_optimizer(chainer.optimizers.SGD(1.0), COMM).setup(model)
    optimizer.assume_synchronized()
    optimizer.join_in_steps()
    if RANK == 0:
        optimizer.update(model, ones)
    else:
        with optimizer.no_sync():
            optimizer.update(model, ones)
        optimizer.update_without_data()
    optimizer.update(model, ones)
    np.testing.assert_array_equal(model.w.array, -2)


@pytest.mark.parametrize("factor", [0.5, chainer.Variable(np.array(0.5, "f4"))], ids=["number", "variable"])
def test_a_model_that_communicates_may_have_read_only_gradients_and_arguments_without_axes(factor):
    class Model(OneMatrix):
        def forward(self, x, factor):
            return F.sum(self.w) * F.sum(x) * factor

    model = Model()
    model.comm = COMM
    optimizer = create_multi_node_optimizer(chainer.optimizers.SGD(1.0), COMM).setup(model)
    optimizer.assume_synchronized()
    with optimizer.join():
        if RANK == 0:
            optimizer.update(model, np.ones((2, 3), "f4"), factor)
    np.testing.assert_array_equal(model.w.array, -3)


@pytest.mark.skipif(SIZE < 2, reason="needs a rank that leaves")
@pytest.mark.parametrize("when", [AfterBackward, DuringBackward, OneStepLate])
@pytest.mark.parametrize("scheme", [compression.TopK(0.1), compression.OneBit(block=8), compression.PowerSGD(2)])
def test_what_compression_has_omitted_counts_once_when_ranks_leave(when, scheme):
    def given(rank, step):
        n_of_rank = 12 if rank == SIZE - 1 else 8
        random = np.random.RandomState(100 * step + rank)
        return random.randn(24, 24).astype("f4") * (step < n_of_rank)

    model = OneMatrix()
    optimizer = MultiNodeOptimizer(chainer.optimizers.SGD(1.0), COMM, when(send=scheme)).setup(model)
    n_steps = 20 if RANK == SIZE - 1 else 8
    optimizer.update(model, given(RANK, 0))  # distributes the parameters
    with optimizer.join():
        for step in range(n_steps):
            optimizer.update(model, given(RANK, step))
    while COMM.allreduce_obj(float(optimizer.compression_report.error_norm)) > 1e-3:
        optimizer.update(model, np.zeros((24, 24), "f4"))
    optimizer.update(model, np.zeros((24, 24), "f4"))  # a mean that is a step late
    means = [np.mean([given(rank, step) for rank in range(SIZE)], axis=0) for step in range(8)]
    means += [given(SIZE - 1, step) for step in range(8, 12)]  # over the one that is left
    np.testing.assert_allclose(-model.w.data, sum(means), atol=2e-3)


@pytest.mark.skipif(SIZE < 2, reason="needs a rank without data")
@pytest.mark.parametrize("n_steps", [0, 3])
def test_a_rank_without_data_in_the_first_asynchronous_step(n_steps):
    optimizer = MultiNodeOptimizer(chainer.optimizers.SGD(0.1), COMM, SynchronousFirst(n_steps, Asynchronous()))
    optimizer.setup(Net()).join_in_steps()
    for i in range(8):
        if i < n_steps + 1 or RANK == 0:
            optimizer.update(optimizer.target, *batch(RANK, i))
        else:
            optimizer.update_without_data()
        assert COMM.allreduce_obj(i) == i * SIZE  # another extension communicates after each step
    optimizer.synchronize()
    expect_equal_everywhere(optimizer.target)


def test_a_join_in_steps_ends_at_the_next_join():
    optimizer = MultiNodeOptimizer(chainer.optimizers.SGD(0.1), COMM, AfterBackward()).setup(Net())
    for _ in range(2):
        optimizer.join_in_steps()
        for i in range(3):
            if i < 2 or RANK == 0:
                optimizer.update(optimizer.target, *batch(RANK, i))
            else:
                optimizer.update_without_data()
    with optimizer.join():
        for i in range(2 + RANK):
            optimizer.update(optimizer.target, *batch(RANK, i))
        with pytest.raises(RuntimeError, match="expected one join at a time, got one within another"):
            optimizer.join_in_steps()
    assert optimizer.t == 5 + 1 + SIZE
    expect_equal_everywhere(optimizer.target)


@pytest.mark.skipif(SIZE < 2, reason="needs a rank that waits")
@pytest.mark.parametrize("others_have_data", [False, True])
@pytest.mark.parametrize("is_first", [False, True])
@pytest.mark.parametrize("scheme", ["plain", "double_buffering", "local_steps", "asynchronous", "post-local"])
def test_rank_that_leaves_by_an_exception_before_its_first_update(scheme, is_first, others_have_data):
    when = {**EXACT, **LOOSE}[scheme]
    optimizer = MultiNodeOptimizer(chainer.optimizers.SGD(0.1), COMM, when).setup(Net())
    if not is_first:
        for i in range(4):
            optimizer.update(optimizer.target, *batch(RANK, i))
        optimizer.synchronize()
    culprit = SIZE - 1
    expected = (KeyError, "mine") if culprit == RANK else (RuntimeError, "left join")
    with pytest.raises(expected[0], match=expected[1]), optimizer.join():
        if culprit == RANK:
            raise KeyError("mine")
        for i in range(4 * others_have_data):
            optimizer.update(optimizer.target, *batch(RANK, i))
    for i in range(4):  # a script may go on
        optimizer.update(optimizer.target, *batch(RANK, i))
    optimizer.synchronize()
    expect_equal_everywhere(optimizer.target)


@pytest.mark.parametrize("moment", ["before", "forward", "step"])
@pytest.mark.parametrize("scheme", [*EXACT, "int8", "local_steps", "asynchronous", "post-local"])
def test_rank_that_leaves_by_an_exception_tells_all(scheme, moment):
    when = {**EXACT, **COMPRESSED, **LOOSE}[scheme]
    optimizer = MultiNodeOptimizer(chainer.optimizers.SGD(0.1), COMM, when).setup(Net())
    culprit = SIZE - 1
    expected = (KeyError, "mine") if culprit == RANK else (RuntimeError, "left join")

    def fail(*args):
        raise KeyError("mine")

    with pytest.raises(expected[0], match=expected[1]):
        with optimizer.join():
            for i in range(2 if RANK == 0 and SIZE > 2 else 6):
                if i == 3 and culprit == RANK:
                    if moment == "before":
                        fail()
                    if moment == "step":
                        optimizer.add_hook(fail, "failing")
                optimizer.update(
                    fail if (i, RANK, moment) == (3, culprit, "forward") else optimizer.target, *batch(RANK, i)
                )
    with optimizer.join():  # all have left
        pass


def test_what_fails_on_all_ranks_fails_on_all():
    optimizer = create_multi_node_optimizer(chainer.optimizers.SGD(0.1), COMM).setup(Net())
    with pytest.raises(KeyError, match=f"rank {RANK}"), optimizer.join():
        raise KeyError(f"rank {RANK}")


def test_join_within_join_is_refused():
    optimizer = create_multi_node_optimizer(chainer.optimizers.SGD(0.1), COMM).setup(Net())
    with pytest.raises(RuntimeError, match="one join at a time"), optimizer.join(), optimizer.join():
        pass


def test_gradients_that_are_missing_must_count():
    optimizer = create_multi_node_optimizer(chainer.optimizers.SGD(0.1), COMM, zero_fill=False).setup(Net())
    with pytest.raises(ValueError, match="expected zero_fill=True"), optimizer.join():
        pass


def test_over_is_one_of_two():
    optimizer = create_multi_node_optimizer(chainer.optimizers.SGD(0.1), COMM).setup(Net())
    with pytest.raises(ValueError, match="expected 'present' or 'all' for over, got 'some'"), optimizer.join("some"):
        pass


@pytest.mark.skipif(SIZE == 1, reason="ranks that differ")
def test_over_is_the_same_on_all_ranks():
    optimizer = create_multi_node_optimizer(chainer.optimizers.SGD(0.1), COMM).setup(Net())
    with pytest.raises(ValueError, match="expected the same over"), optimizer.join("all" if RANK else "present"):
        optimizer.update(optimizer.target, *batch(RANK, 0))


@pytest.mark.skipif(SIZE == 1, reason="ranks that differ")
@pytest.mark.parametrize("when", EXACT.values(), ids=EXACT)
def test_rank_outside_is_found(when):
    optimizer = MultiNodeOptimizer(chainer.optimizers.SGD(0.1), COMM, when).setup(Net())
    optimizer.update(optimizer.target, *batch(RANK, 0))
    optimizer.update(optimizer.target, *batch(RANK, 1))
    with pytest.raises(RuntimeError, match="expected every rank within"):
        if RANK:
            with optimizer.join():
                optimizer.update(optimizer.target, *batch(RANK, 2))
        else:
            optimizer.update(optimizer.target, *batch(RANK, 2))


@pytest.mark.skipif(SIZE == 1, reason="ranks that differ")
def test_parameters_that_change_on_some_ranks_only():
    optimizer = create_multi_node_optimizer(chainer.optimizers.SGD(0.1), COMM).setup(Net())
    with pytest.raises(RuntimeError, match="expected the parameters of all ranks to change together"):
        with optimizer.join():
            for i in range(4):
                if i == 2 and RANK == SIZE - 1:
                    optimizer.target.add_link("more", L.Linear(2, 2))
                optimizer.update(optimizer.target, *batch(RANK, i))


def test_join_costs_no_message_of_its_own_while_nobody_is_short(monkeypatch):
    from mn_comm.building_blocks import Ranks

    optimizer = create_multi_node_optimizer(chainer.optimizers.SGD(0.1), COMM).setup(Net())
    calls = []
    for name in ("Iallreduce", "Allreduce", "Barrier", "allgather", "Bcast"):
        inner = getattr(Ranks, name)
        monkeypatch.setattr(Ranks, name, lambda self, *a, _f=inner, _n=name, **k: calls.append(_n) or _f(self, *a, **k))

    def of_one_update(i):
        before = len(calls)
        optimizer.update(optimizer.target, *batch(RANK, i))
        return calls[before:]

    def of_a_usual_update():
        # One of them may create a new layout: how often ranks meet depends on the time that the first averages took.
        return min((of_one_update(i) for i in range(6)), key=len)

    for i in range(2):
        of_one_update(i)
    outside = of_a_usual_update()
    with optimizer.join():
        assert of_a_usual_update() == outside


class Growing(Net):
    """A net whose last parameters are created when it gets many samples."""

    def __init__(self):
        super().__init__()
        with self.init_scope():
            self.extra = L.Linear(None, 3)

    def forward(self, x, t):
        return super().forward(x, t) + (F.sum(self.extra(x)) if len(x) > 6 else 0)


@pytest.mark.parametrize("when", EXACT.values(), ids=EXACT)
def test_parameters_that_are_made_while_some_ranks_have_no_data_any_more(when):
    optimizer = MultiNodeOptimizer(chainer.optimizers.SGD(0.01), COMM, when).setup(Growing())
    with optimizer.join():
        for i in range(COUNTS[0][RANK]):
            optimizer.update(optimizer.target, *batch(RANK, i, 7 if i >= 4 else 6))
    assert optimizer.target.extra.W.array is not None
    expect_equal_everywhere(optimizer.target)


def test_reports_are_those_of_ranks_with_data():
    optimizer = create_multi_node_optimizer(chainer.optimizers.SGD(0.1), COMM).setup(Net())
    reporter = chainer.Reporter()
    reporter.add_observer("main", optimizer.target)
    seen = {}
    with reporter, reporter.scope(seen), optimizer.join():
        for i in range(COUNTS[0][RANK]):
            optimizer.update(optimizer.target, *batch(RANK, i))
    assert bool(seen) == bool(COUNTS[0][RANK])
