"""Local SGD, DiLoCo and Streaming DiLoCo, compared with the same computation for all ranks in NumPy."""

import contextlib
import io
import itertools
import warnings
from dataclasses import dataclass, replace

import chainer
import numpy as np
import pytest

import mn_optim  # noqa: F401 - before Chainer
from mn_comm import create_communicator
from mn_comm.building_blocks import synchronize_replicas
from mn_compress import Int8
from mn_optim import (
    AfterBackward,
    Asynchronous,
    DiLoCo,
    DuringBackward,
    LocalSGD,
    MultiNodeOptimizer,
    OneStepLate,
    Sharded,
    StreamingDiLoCo,
    SynchronousFirst,
)
from mn_optim.schemes import fragment

pytestmark = pytest.mark.sizes(1)

NAMES = ["naive", "flat", "hierarchical", "two_dimensional"]
COMM = create_communicator("flat")
RANK, SIZE = COMM.rank, COMM.size
SHAPES = {"a": (3, 4), "b": (5,), "c": (2, 2), "d": (40,)}


class Net(chainer.Link):
    """Parameters whose gradients are given."""

    def __init__(self, seed=0):
        super().__init__()
        random = np.random.RandomState(seed)
        with self.init_scope():
            for name, shape in SHAPES.items():
                setattr(self, name, chainer.Parameter(random.randn(*shape).astype("f4")))


def gradients(rank, step):
    random = np.random.RandomState(1000 * step + rank)
    return {name: random.randn(*shape).astype("f4") for name, shape in SHAPES.items()}


def exact_gradients(rank, step):
    """Multiples of 1/4, so that sums of few of them are exact; means on 3 ranks are not."""
    random = np.random.RandomState(1000 * step + rank)
    return {name: (random.randint(-8, 9, shape) / 4).astype("f4") for name, shape in SHAPES.items()}


def parameters(model):
    return {name.strip("/"): param.data.copy() for name, param in model.namedparams()}


def same(actual, expected, exactly=True):
    for name, data in expected.items():
        if exactly:
            np.testing.assert_array_equal(actual[name], data, err_msg=name)
        else:
            np.testing.assert_allclose(actual[name], data, rtol=1e-5, atol=1e-5, err_msg=name)


def equal_everywhere(model):
    mine = parameters(model)
    for other in COMM.allgather_obj(mine):
        same(mine, other)


def start(optimizer, model=None):
    optimizer.setup(model or Net())
    optimizer.assume_synchronized()
    return optimizer


def advance(optimizer, step, given=gradients):
    for name, grad in given(RANK, step).items():
        getattr(optimizer.target, name).grad = grad
    optimizer.update()


def train(optimizer, steps, given=gradients):
    """Yield the number of each step, after it."""
    for step in steps:
        advance(optimizer, step, given)
        yield step


def saved(target):
    file = io.BytesIO()
    chainer.serializers.save_npz(file, target)
    file.seek(0)
    return file


def make(when, actual=None, comm=COMM):
    actual = chainer.optimizers.SGD(lr=0.5) if actual is None else actual
    return MultiNodeOptimizer(actual, comm, LocalSGD(when) if isinstance(when, int) else when)


class InNumpy:
    """All ranks' parameters, and DiLoCo in fragments, step by step as in the papers."""

    def __init__(self, *, steps, lr=0.5, outer_lr=1.0, momentum=0.0, fragments=None, delay=0, alpha=1.0):
        self.own = [parameters(Net()) for _ in range(SIZE)]
        self.common = parameters(Net())
        self.velocity = {name: np.zeros_like(data) for name, data in self.common.items()}
        self.fragments = fragments or [list(SHAPES)]
        self.steps, self.lr, self.outer_lr, self.momentum = steps, lr, outer_lr, momentum
        self.delay, self.alpha = delay, alpha
        self.under_way = {}
        self.position = 0

    def advance(self, step):
        for rank, own in enumerate(self.own):
            for name, grad in gradients(rank, step).items():
                own[name] -= np.float32(self.lr) * grad
        self.position += 1
        for index, names in enumerate(self.fragments):
            first = self.steps * (index + 1) // len(self.fragments)
            if self.position >= first and (self.position - first) % self.steps == 0:
                self.under_way[index] = self.position + self.delay, self.mean(names)
        for index, (due, mean) in list(self.under_way.items()):
            if due <= self.position:
                del self.under_way[index]
                self.land(mean, self.alpha)

    def mean(self, names):
        return {name: np.mean([self.common[name] - own[name] for own in self.own], axis=0) for name in names}

    def land(self, mean, alpha):
        for name, grad in mean.items():
            v = self.velocity[name]
            v[...] = self.momentum * v - self.outer_lr * grad
            # As in Chainer, whose momentum counts once more than in the paper.
            self.common[name] += self.momentum**2 * v - (1 + self.momentum) * self.outer_lr * grad
            for own in self.own:
                own[name] = (
                    self.common[name].copy() if alpha == 1 else own[name] + alpha * (self.common[name] - own[name])
                )

    def synchronize(self):
        for index in list(self.under_way):
            self.land(self.under_way.pop(index)[1], self.alpha)
        for names in self.fragments:
            mean = self.mean(names)
            if any((own[name] != self.common[name]).any() for own in self.own for name in names):
                self.land(mean, 1.0)
        self.position = 0


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("steps", [1, 3])
def test_local_sgd(name, steps):
    optimizer = start(make(steps, comm=create_communicator(name)))
    expected = InNumpy(steps=steps)
    for step in train(optimizer, range(1, 8)):
        expected.advance(step)
        same(parameters(optimizer.target), expected.own[RANK], exactly=False)
        assert optimizer.is_meeting == (step % steps == 0)
        if optimizer.is_meeting:
            equal_everywhere(optimizer.target)
    optimizer.synchronize()
    equal_everywhere(optimizer.target)


@pytest.mark.skipif(SIZE == 3, reason="thirds are rounded")
def test_local_sgd_that_meets_in_every_step_is_synchronous_sgd():
    """Bit for bit if no number is rounded: one adds up parameters, the other gradients."""
    optimizer, exact = start(make(1)), start(MultiNodeOptimizer(chainer.optimizers.SGD(lr=0.5), COMM))
    for each in (optimizer, exact):
        for param in each.target.params():
            param.data[...] = np.round(param.data)
        for _ in train(each, range(5), exact_gradients):
            pass
    same(parameters(optimizer.target), parameters(exact.target))


@pytest.mark.parametrize("name", NAMES)
def test_diloco(name):
    outer = chainer.optimizers.NesterovAG(lr=0.7, momentum=0.9)
    optimizer = start(make(DiLoCo(2, outer=outer), comm=create_communicator(name)))
    expected = InNumpy(steps=2, outer_lr=0.7, momentum=0.9)
    for step in train(optimizer, range(1, 10)):
        expected.advance(step)
        same(parameters(optimizer.target), expected.own[RANK], exactly=False)
        if optimizer.is_meeting:
            equal_everywhere(optimizer.target)
    assert outer.target is None


def test_diloco_with_plain_sgd_outside_is_local_sgd():
    diloco = start(make(DiLoCo(3, outer=chainer.optimizers.SGD(lr=1))))
    local = start(make(LocalSGD(3)))
    for _ in zip(train(diloco, range(10)), train(local, range(10)), strict=True):
        same(parameters(diloco.target), parameters(local.target))


def test_streaming_in_one_fragment_at_once_is_diloco():
    streaming = start(make(StreamingDiLoCo(3, fragments=1, delay=0, alpha=1)))
    diloco = start(make(DiLoCo(3)))
    for _ in zip(train(streaming, range(10)), train(diloco, range(10)), strict=True):
        same(parameters(streaming.target), parameters(diloco.target))


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("delay", [0, 1, 3])
@pytest.mark.parametrize("alpha", [1, 0.5])
def test_streaming(name, delay, alpha):
    options = StreamingDiLoCo(4, fragments=2, delay=delay, alpha=alpha)
    optimizer = start(make(options, comm=create_communicator(name)))
    fragments = [["d"], ["a", "b", "c"]]  # of 160 and 84 bytes
    expected = InNumpy(steps=4, outer_lr=0.7, momentum=0.9, fragments=fragments, delay=delay, alpha=alpha)
    meetings = []
    for step in train(optimizer, range(1, 14)):
        expected.advance(step)
        same(parameters(optimizer.target), expected.own[RANK], exactly=False)
        meetings.append(optimizer.is_meeting)
    assert meetings == [step % 2 == 0 for step in range(1, 14)]
    optimizer.synchronize()
    equal_everywhere(optimizer.target)
    expected.synchronize()
    same(parameters(optimizer.target), expected.own[RANK], exactly=False)


def test_a_subclass_of_a_script_may_have_fields_of_its_own():
    @dataclass(frozen=True)
    class Labelled(LocalSGD):
        label: str = "of the script"

    assert MultiNodeOptimizer(chainer.optimizers.SGD(), create_communicator("naive"), Labelled(2)).may_diverge


def test_more_fragments_than_parameters():
    optimizer = start(make(StreamingDiLoCo(6, fragments=6, delay=5)))
    for _ in train(optimizer, range(20)):
        pass
    optimizer.synchronize()
    equal_everywhere(optimizer.target)


def test_post_local_sgd_begins_with_exact_steps():
    optimizer = start(make(SynchronousFirst(3, LocalSGD(4))))
    exact = start(MultiNodeOptimizer(chainer.optimizers.SGD(lr=0.5), COMM))
    meetings = []
    for step, _ in zip(train(optimizer, range(1, 12)), train(exact, range(1, 12)), strict=True):
        meetings.append(optimizer.is_meeting)
        if step <= 3:
            same(parameters(optimizer.target), parameters(exact.target))
            optimizer.synchronize()
    assert [i + 1 for i, is_meeting in enumerate(meetings) if is_meeting] == [1, 2, 3, 7, 11]


@pytest.mark.parametrize("make_actual", [lambda: chainer.optimizers.MomentumSGD(0.1), chainer.optimizers.Adam])
def test_the_optimizers_state_is_averaged_by_choice(make_actual):
    for average_state in (False, True):
        optimizer = start(make(LocalSGD(3, average_state=average_state), make_actual()))
        for _ in train(optimizer, range(3)):
            pass
        everywhere = COMM.allgather_obj(optimizer.target.d.update_rule.state)
        for key, value in everywhere[0].items():
            are_equal = all((other[key] == value).all() for other in everywhere)
            assert are_equal == (average_state or SIZE == 1)


def test_the_state_is_averaged_in_its_own_dtype():
    comm = create_communicator("flat", allreduce_grad_dtype="float16")
    optimizer = start(make(LocalSGD(1, average_state=True), chainer.optimizers.Adam(), comm))
    for name, shape in SHAPES.items():
        getattr(optimizer.target, name).grad = np.full(shape, 1e-4, "f4")
    optimizer.update()
    state = optimizer.target.d.update_rule.state
    np.testing.assert_allclose(state["v"], 1e-11, rtol=1e-5)  # nothing in float16


@pytest.mark.parametrize(
    "local_steps", [3, DiLoCo(3), StreamingDiLoCo(4, delay=2, fragments=2), LocalSGD(3, average_state=True)]
)
def test_a_rank_that_has_fewer_steps_does_not_hang_the_others(local_steps):
    optimizer = start(make(local_steps, chainer.optimizers.MomentumSGD(0.1)))
    for _ in train(optimizer, range(10 + 5 * RANK)):
        pass
    optimizer.synchronize()
    equal_everywhere(optimizer.target)
    before = parameters(optimizer.target)
    optimizer.synchronize()  # no rank has moved
    same(parameters(optimizer.target), before)
    for _ in train(optimizer, range(7)):
        pass
    optimizer.synchronize()
    equal_everywhere(optimizer.target)


def test_a_rank_that_waits_for_a_mean_applies_it_before_it_takes_part_in_the_next_meeting():
    optimizer = start(make(StreamingDiLoCo(2, fragments=1, delay=1)))
    for _ in train(optimizer, range(2 if RANK == 0 else 4)):  # a meeting in step 2, another one in step 4
        pass
    optimizer.synchronize()
    equal_everywhere(optimizer.target)


def test_a_rank_that_went_nowhere_does_not_count():
    optimizer = start(make(2, chainer.optimizers.SGD(lr=1)))
    n = 6 if RANK == SIZE - 1 else 2
    for _ in range(n):
        for name, shape in SHAPES.items():
            getattr(optimizer.target, name).grad = np.full(shape, -1, "f4")
        optimizer.update()
    optimizer.synchronize()
    for name, data in parameters(Net()).items():
        np.testing.assert_allclose(parameters(optimizer.target)[name], data + 6, rtol=1e-5)


def test_a_rank_without_any_step():
    optimizer = make(2).setup(Net(seed=RANK))
    if RANK == 0:
        for _ in train(optimizer, range(8)):
            pass
    optimizer.synchronize()
    equal_everywhere(optimizer.target)
    for _ in train(optimizer, range(4)):
        pass
    equal_everywhere(optimizer.target)


@pytest.mark.parametrize("actual", [chainer.optimizers.MomentumSGD, chainer.optimizers.Adam])
def test_a_rank_without_any_step_has_no_part_in_the_mean_of_state(actual):
    optimizer = make(LocalSGD(2, average_state=True), actual()).setup(Net(seed=RANK))
    alone = actual().setup(Net())
    with optimizer.join():
        for step in range(5 if RANK == SIZE - 1 else 0):
            advance(optimizer, step, lambda rank, step: gradients(0, step))
    for step in range(1, 5):  # the first update only distributes the parameters of rank 0
        for name, grad in gradients(0, step).items():
            getattr(alone.target, name).grad = grad
        alone.update()
    same(parameters(optimizer.target), parameters(alone.target), exactly=False)
    for (name, param), other in zip(optimizer.target.namedparams(), alone.target.params(), strict=True):
        for key, value in other.update_rule.state.items():
            np.testing.assert_allclose(param.update_rule.state[key], value, rtol=1e-5, atol=1e-6, err_msg=name)


@pytest.mark.parametrize(
    "local_steps",
    [
        LocalSGD(1, average_state=True),
        LocalSGD(2, average_state=True),
        DiLoCo(1),
        StreamingDiLoCo(2, fragments=2, delay=1, alpha=1),
    ],
)
def test_steps_for_which_no_rank_has_data_change_nothing(local_steps):
    optimizer = start(make(local_steps, chainer.optimizers.MomentumSGD(0.1)))
    optimizer.join_in_steps()
    for _ in train(optimizer, range(6)):
        pass
    optimizer.synchronize()
    before = parameters(optimizer.target)
    momentum = {name: param.update_rule.state["v"].copy() for name, param in optimizer.target.namedparams()}
    for _ in range(4):
        optimizer.update_without_data()
    same(parameters(optimizer.target), before)
    for name, param in optimizer.target.namedparams():
        np.testing.assert_array_equal(param.update_rule.state["v"], momentum[name])


FREEZING = [DiLoCo(2), StreamingDiLoCo(4, fragments=2, delay=1, alpha=0.5), StreamingDiLoCo(4, delay=3, alpha=1)]


@pytest.mark.filterwarnings("ignore:the parameters of rank")
@pytest.mark.parametrize("local_steps", FREEZING)
def test_what_is_frozen_on_all_ranks_stays(local_steps):
    """The outer optimizer has momentum, by which it would move parameters that no rank changes."""
    optimizer = start(make(local_steps))
    for _ in train(optimizer, range(9)):
        pass
    optimizer.synchronize()
    frozen = optimizer.target.a
    frozen.update_rule.enabled = False
    before = frozen.data.copy()
    for _ in train(optimizer, range(9, 16)):
        pass
    np.testing.assert_array_equal(frozen.data, before)
    resumed = make(local_steps).setup(Net())  # maybe while a mean is pending
    chainer.serializers.load_npz(saved(optimizer.target), resumed.target)
    chainer.serializers.load_npz(saved(optimizer), resumed)
    resumed.target.a.update_rule.enabled = False
    resumed.assume_synchronized()
    for each in (optimizer, resumed):
        for _ in train(each, range(16, 20)):
            pass
        each.synchronize()
        np.testing.assert_array_equal(each.target.a.data, before)
    same(parameters(resumed.target), parameters(optimizer.target))
    optimizer.target.a.update_rule.enabled = RANK == SIZE - 1  # one rank is enough to move it
    for _ in train(optimizer, range(20, 28)):
        pass
    optimizer.synchronize()
    assert (optimizer.target.a.data != before).any()
    equal_everywhere(optimizer.target)


@pytest.mark.parametrize("local_steps", [LocalSGD(2), DiLoCo(2)])
def test_a_step_that_has_failed_after_its_update_has_changed_the_parameters(local_steps):
    def fail(optimizer):
        raise ArithmeticError("after the update")

    fail.timing = "post"
    optimizer = start(make(local_steps))
    optimizer.add_hook(fail, "fail")
    with pytest.raises(ArithmeticError):
        advance(optimizer, 0)
    optimizer.synchronize()
    equal_everywhere(optimizer.target)


@pytest.mark.parametrize("more_steps", [0, 1])
@pytest.mark.parametrize("what", ["update", "set_value"])
@pytest.mark.parametrize("local_steps", [LocalSGD(1), StreamingDiLoCo(1, fragments=1, delay=0)])
def test_a_signal_handler_may_raise_when_a_mean_has_arrived(monkeypatch, local_steps, what, more_steps):
    """The rank has half of its own parameters, or all, and would not know."""
    optimizer = start(make(local_steps))
    advance(optimizer, 0)
    calls = itertools.count()
    if RANK == 0:

        def interrupting(function, at):
            def call(*args):
                if next(calls) == at:
                    monkeypatch.undo()
                    raise KeyboardInterrupt
                return function(*args)

            return call

        (common,) = optimizer._stepper.scheme._fragments
        if what == "update":
            monkeypatch.setattr(common._outer, "update", interrupting(common._outer.update, 0))
        else:
            monkeypatch.setattr(fragment, "set_value", interrupting(fragment.set_value, 2))
        with pytest.raises(KeyboardInterrupt):
            advance(optimizer, 1)
    else:
        advance(optimizer, 1)
    for step in range(more_steps):
        advance(optimizer, 2 + step)
    optimizer.synchronize()
    equal_everywhere(optimizer.target)


def test_abandoned_steps():
    """An exception in the forward or backward pass; the rank's meeting takes place one update later."""
    optimizer = start(make(2))
    failed = 0
    for step in range(8):
        fails = RANK == SIZE - 1 and step == 3

        def loss(fails=fails):
            if fails:
                raise ArithmeticError("no loss")
            return sum(chainer.functions.sum(param) for param in optimizer.target.params())

        try:
            optimizer.update(loss)
        except ArithmeticError:
            failed += 1
    assert failed == (RANK == SIZE - 1)
    optimizer.synchronize()
    equal_everywhere(optimizer.target)


def test_gradients_that_are_added_up_make_one_step():
    optimizer = start(make(2))
    loss = lambda: sum(chainer.functions.sum(param) for param in optimizer.target.params())  # noqa: E731
    with optimizer.no_sync():
        optimizer.update(loss)
    optimizer.update(loss)
    assert not optimizer.is_meeting
    optimizer.update(loss)
    assert optimizer.is_meeting
    for name, data in parameters(Net()).items():
        np.testing.assert_allclose(parameters(optimizer.target)[name], data - 1.5, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("comm_hook", [None, lambda bucket: bucket.average()])
@pytest.mark.parametrize("local_steps", [LocalSGD(2), StreamingDiLoCo(2, fragments=2, delay=1)])
def test_the_hook_is_given_how_far_the_ranks_went(local_steps, comm_hook):
    optimizer, plain = start(make(replace(local_steps, send=comm_hook))), start(make(local_steps))
    for _ in zip(train(optimizer, range(9)), train(plain, range(9)), strict=True):
        same(parameters(optimizer.target), parameters(plain.target), exactly=False)
    optimizer.synchronize()
    equal_everywhere(optimizer.target)


def test_the_first_update_shares_out_the_parameters_of_rank_0():
    optimizer = make(3).setup(Net(seed=RANK))
    advance(optimizer, 0)
    assert optimizer.t == 0
    same(parameters(optimizer.target), parameters(Net(seed=0)))


@pytest.mark.parametrize("send", [None, Int8()], ids=["exact", "compressed"])
@pytest.mark.parametrize("local_steps", [LocalSGD(2), StreamingDiLoCo(2, fragments=2, delay=1)])
def test_a_parameter_that_changes_its_shape_raises_on_all_ranks(local_steps, send):
    optimizer = start(make(replace(local_steps, send=send)))
    for _ in train(optimizer, range(4)):
        pass
    if RANK == SIZE - 1:
        optimizer.target.b.array = np.zeros(7, "f4")
        optimizer.target.b.grad = np.zeros(7, "f4")
    for call in (optimizer.update, optimizer.update, optimizer.synchronize):
        with (
            contextlib.suppress(ValueError)
            if call == optimizer.update
            else pytest.raises(ValueError, match=r"expected /b to keep its shape \(5,\) between meetings, got \(7,\)")
        ):
            call()


@pytest.mark.parametrize("local_steps", [LocalSGD(2, average_state=True), StreamingDiLoCo(2, fragments=2, delay=1)])
def test_parameters_without_axes_and_without_elements(local_steps):
    model = chainer.Link()
    with model.init_scope():
        for name, shape in {"scalar": (), "one": (1,), "none": (0, 3)}.items():
            setattr(model, name, chainer.Parameter(np.zeros(shape, "f4")))
    optimizer = start(make(local_steps, chainer.optimizers.MomentumSGD(0.5)), model)
    for _ in range(5):
        for param in model.params():
            param.grad = np.full_like(param.data, RANK)
        optimizer.update()
    optimizer.synchronize()
    equal_everywhere(model)
    assert (model.scalar.data < 0) == (SIZE > 1)
    if isinstance(local_steps, LocalSGD):
        momentum = {name: param.update_rule.state["v"] for name, param in model.namedparams()}
        for other in COMM.allgather_obj(momentum):
            same(momentum, other)


def test_a_parameter_that_is_initialised_later():
    model = chainer.Chain(used=chainer.links.Linear(5, 3), late=chainer.links.Linear(None, 3))
    optimizer = make(StreamingDiLoCo(3, delay=2, fragments=2)).setup(model)
    x = np.random.RandomState(RANK).rand(2, 5).astype("f4")
    for step in range(14):
        link = model.late if step >= 5 else model.used
        optimizer.update(lambda link=link: chainer.functions.sum(link(x)))
    assert optimizer.t == 12
    optimizer.synchronize()
    equal_everywhere(model)


@pytest.mark.parametrize("when", [LocalSGD(3), DiLoCo(3), StreamingDiLoCo(4), Asynchronous(interval=0)])
def test_float32_copies_are_distributed_with_the_parameters(when):
    model = chainer.Link()
    with model.init_scope():
        model.half = chainer.Parameter(np.ones(3, "f2"))
    optimizer = make(when).setup(model)
    optimizer.use_fp32_update()
    for step in range(6):
        if step == 3:  # the ranks differ: they have not met yet
            with model.init_scope():
                model.new = chainer.Parameter(np.ones(2, "f4"))
        for param in model.params():
            param.grad = np.full_like(param.data, 1 + RANK)
        optimizer.update()
    optimizer.synchronize()
    equal_everywhere(model)


LOCAL_STEPS = [
    LocalSGD(3),
    SynchronousFirst(4, LocalSGD(3)),
    DiLoCo(3),
    StreamingDiLoCo(4, fragments=2, delay=0),
    StreamingDiLoCo(4, fragments=2, delay=3, alpha=0.25),
    StreamingDiLoCo(5, fragments=3, delay=4, alpha=1),
]


@pytest.mark.parametrize("at", range(1, 9))
@pytest.mark.parametrize("local_steps", LOCAL_STEPS)
def test_kill_and_resume(local_steps, at):
    """In the middle, with fragments being exchanged: bit-identical to the run that was not killed."""
    lasting = start(make(local_steps, chainer.optimizers.MomentumSGD(0.1)))
    for _ in train(lasting, range(at)):
        pass
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        files = saved(lasting), saved(lasting.target)
    assert all("the parameters of rank" in str(each.message) for each in caught)
    assert bool(caught) == lasting._stepper.scheme.has_diverged
    resumed = make(local_steps, chainer.optimizers.MomentumSGD(0.1)).setup(Net(seed=RANK + 7))
    for file, target in zip(files, (resumed, resumed.target), strict=True):
        chainer.serializers.load_npz(file, target)
    resumed.assume_synchronized()
    for _ in zip(train(lasting, range(at, at + 9)), train(resumed, range(at, at + 9)), strict=True):
        assert lasting.is_meeting == resumed.is_meeting
        same(parameters(resumed.target), parameters(lasting.target))
    for each in (lasting, resumed):
        each.synchronize()
    same(parameters(resumed.target), parameters(lasting.target))


OTHERS = [
    LocalSGD(3),
    DiLoCo(3),
    StreamingDiLoCo(4, fragments=2, delay=1),
    StreamingDiLoCo(4, fragments=3, delay=1),
]


@pytest.mark.filterwarnings("ignore:the parameters of rank")
@pytest.mark.parametrize(("before", "after"), [*itertools.pairwise(OTHERS), (OTHERS[3], OTHERS[0]), (OTHERS[2],) * 2])
def test_a_snapshot_of_other_local_steps(before, after):
    """The common parameters are the same; everything else starts again, with one warning."""
    optimizer = start(make(before))
    for _ in train(optimizer, range(5)):
        pass
    files = saved(optimizer), saved(optimizer.target)
    other = start(make(after))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for file, target in zip(files, (other, other.target), strict=True):
            chainer.serializers.load_npz(file, target)
    warns = before is not after and RANK == 0
    assert ["the state of the outer optimizer is reset" in str(each.message) for each in caught] == [True] * warns
    commons = [
        dict(named for each in o._stepper.scheme._fragments for named in each.common) for o in (optimizer, other)
    ]
    for name, param in commons[0].items():
        np.testing.assert_array_equal(commons[1][name].data, param.data)
    for _ in train(other, range(5, 12)):
        pass
    other.synchronize()
    equal_everywhere(other.target)


@pytest.mark.filterwarnings("ignore:the parameters of rank")
def test_snapshots_from_and_for_plain_chainer():
    optimizer = start(make(DiLoCo(3), chainer.optimizers.MomentumSGD(0.1)))
    for _ in train(optimizer, range(4)):
        pass
    plain = chainer.optimizers.MomentumSGD().setup(Net())
    chainer.serializers.load_npz(saved(optimizer), plain)
    assert plain.t == 4
    other = start(make(DiLoCo(3), chainer.optimizers.MomentumSGD(0.1)))
    chainer.serializers.load_npz(saved(plain), other)
    assert other.t == 4
    for step in train(other, range(6)):
        assert other.is_meeting == (step % 3 == 2)


@pytest.mark.filterwarnings("ignore:the parameters of rank")
@pytest.mark.parametrize("when", [DiLoCo(3), SynchronousFirst(3, DiLoCo(2)), StreamingDiLoCo(2, fragments=2, delay=1)])
def test_an_optimizer_that_was_used_forgets_when_a_snapshot_of_plain_chainer_is_loaded(when):
    optimizer = start(make(when, chainer.optimizers.MomentumSGD(0.1)))
    for _ in train(optimizer, range(5)):
        pass
    plain = chainer.optimizers.MomentumSGD(0.1).setup(Net(seed=1))
    for name, grad in gradients(0, 0).items():
        getattr(plain.target, name).grad = grad
    plain.update()
    fresh = start(make(when, chainer.optimizers.MomentumSGD(0.1)))
    for each in (optimizer, fresh):
        chainer.serializers.load_npz(saved(plain.target), each.target)
        chainer.serializers.load_npz(saved(plain), each)
    for _ in zip(train(optimizer, range(7)), train(fresh, range(7)), strict=True):
        same(parameters(optimizer.target), parameters(fresh.target))
        assert optimizer.is_meeting == fresh.is_meeting


def test_a_meeting_that_fails_on_all_ranks_is_made_up_for(monkeypatch):
    optimizer = start(make(DiLoCo(2)))
    advance(optimizer, 0)
    (fragment,) = optimizer._stepper.scheme._fragments
    with monkeypatch.context() as patch, pytest.raises(ZeroDivisionError):
        patch.setattr(fragment, "_average", lambda model: 1 / 0)
        advance(optimizer, 1)
    for _ in train(optimizer, range(2, 5)):
        pass
    optimizer.synchronize()
    equal_everywhere(optimizer.target)


def test_a_model_is_needed():
    with pytest.raises(RuntimeError, match="expected a model before assume_synchronized"):
        make(2).assume_synchronized()


def test_meetings_are_reported():
    optimizer = start(make(2))
    for step in range(1, 5):
        observation = {}
        with chainer.Reporter().scope(observation):
            advance(optimizer, step)
        assert observation["meeting"] == (step % 2 == 0)


def test_whoever_has_a_part_of_the_model_can_synchronize_it():
    model = chainer.Chain(net=Net(), other=chainer.links.Linear(2, 2))
    optimizer = make(5).setup(model)
    optimizer.assume_synchronized()
    for param in model.params():
        param.grad = np.full_like(param.data, RANK)
    optimizer.update()
    synchronize_replicas(model.other)
    equal_everywhere(model.net)
    start(MultiNodeOptimizer(chainer.optimizers.SGD(), COMM), model)  # which owns them now
    model.net.a.data += RANK
    synchronize_replicas(model)
    assert (model.net.a.data == COMM.bcast(model.net.a.data)).all() == (RANK == 0)


class Tied(chainer.Link):
    """One parameter under two names, and one that is a transposed view of another."""

    def __init__(self):
        super().__init__()
        with self.init_scope():
            self.a = chainer.Parameter(np.zeros((2, 3), "f4"))
            self.b = self.a
            self.c = chainer.Parameter(self.a.data.T)


def moved(when, model, lr):
    optimizer = MultiNodeOptimizer(chainer.optimizers.SGD(lr=lr), COMM, when).setup(model)
    optimizer.assume_synchronized()
    for _ in range(20):
        model.a.grad = np.full((2, 3), -RANK, "f4")
        optimizer.update()
    optimizer.synchronize()
    return model.a.data


@pytest.mark.parametrize("delay", [0, 1])
def test_what_is_shared_within_a_model_moves_once(delay):
    alone = chainer.Link()
    with alone.init_scope():
        alone.a = chainer.Parameter(np.zeros((2, 3), "f4"))
    when = StreamingDiLoCo(4, fragments=2, delay=delay)  # the second one of which is empty
    expected = moved(when, alone, 1)
    tied = Tied()
    np.testing.assert_allclose(moved(when, tied, 0.5), expected, rtol=1e-5)  # Chainer takes a step for each name
    np.testing.assert_array_equal(tied.c.data, tied.a.data.T)


def test_what_is_shared_within_a_model_moves_once_asynchronously():
    np.testing.assert_allclose(moved(Asynchronous(interval=0), Tied(), 0.5), 10 * (SIZE - 1), rtol=1e-4)


@pytest.mark.parametrize("dtype", ["f2", "f8"])
@pytest.mark.parametrize("use_fp32_update", [False, True])
@pytest.mark.parametrize(
    "when",
    [
        LocalSGD(2),
        StreamingDiLoCo(2, fragments=2, delay=1, outer=chainer.optimizers.SGD(lr=1)),
        Asynchronous(interval=0),
    ],
)
def test_other_dtypes_and_float32_copies_of_half_precision(when, use_fp32_update, dtype):
    """Steps that are too small for float16 are not lost if the optimizer keeps a copy in float32."""
    model = chainer.Link()
    with model.init_scope():
        model.a = chainer.Parameter(np.full(3, 1, dtype))
        model.b = chainer.Parameter(np.full((2, 5), 1, dtype))
    actual = chainer.optimizers.SGD(lr=1)
    if use_fp32_update:
        actual.use_fp32_update()
    optimizer = MultiNodeOptimizer(actual, COMM, when).setup(model)
    optimizer.assume_synchronized()
    for _ in range(40):
        for param in model.params():
            param.grad = np.full(param.shape, -(2.0**-13) * (1 + RANK), dtype)  # float16 has 2**-10 after 1
        optimizer.update()
    optimizer.synchronize()
    equal_everywhere(model)
    assert model.a.dtype == dtype
    if dtype == "f8" or use_fp32_update:
        learned = model.a.data[0] - 1
        expected = 40 * 2.0**-13 * (SIZE + 1) / 2
        mixes = isinstance(when, StreamingDiLoCo)  # and then loses some of it
        assert (0.5 if mixes else 0.8) * expected < learned < 1.2 * expected


def test_a_nan_on_one_rank_reaches_all():
    optimizer = start(make(DiLoCo(2)))
    for step in range(2):
        for name, grad in gradients(RANK, step).items():
            getattr(optimizer.target, name).grad = grad
        if RANK == SIZE - 1 and step == 0:
            optimizer.target.a.grad[0, 0] = np.nan
        optimizer.update()
    assert np.isnan(optimizer.target.a.data[0, 0])
    assert np.isfinite(optimizer.target.b.data).all()


@pytest.mark.parametrize("wrong", [2.5, None, LocalSGD, "LocalSGD"])
@pytest.mark.parametrize("where", ["all", "one"])
def test_what_is_no_value_of_when_raises_on_all_ranks(wrong, where):
    when = wrong if where == "all" or RANK == SIZE - 1 else LocalSGD(2)
    with pytest.raises(TypeError, match=r"expected AfterBackward\(\) or alike for when, got"):
        MultiNodeOptimizer(chainer.optimizers.SGD(), COMM, when)


@pytest.mark.parametrize(
    ("error", "message", "call"),
    [
        (ValueError, r"fragments in 1..3, .* got 4", lambda: StreamingDiLoCo(3, fragments=4)),
        (ValueError, r"delay in 0..2, .* got 3", lambda: StreamingDiLoCo(3, fragments=1, delay=3)),
        (ValueError, r"alpha in \(0, 1\], got 0", lambda: StreamingDiLoCo(8, alpha=0)),
        (ValueError, "steps of at least 0, got -1", lambda: SynchronousFirst(-1, DiLoCo(3))),
        (ValueError, "steps of at least 1, got 0", lambda: LocalSGD(0)),
        (ValueError, "steps of at least 1, got -3", lambda: LocalSGD(-3)),
        (TypeError, "expected an integer for steps, got float: 2.5", lambda: LocalSGD(2.5)),
        (TypeError, "expected an integer for steps, got bool: True", lambda: LocalSGD(True)),
        (TypeError, "chainer.Optimizer for outer, got str", lambda: DiLoCo(3, outer="sgd")),
        (ValueError, "not set up", lambda: DiLoCo(3, outer=chainer.optimizers.SGD().setup(Net()))),
    ],
)
def test_bad_numbers(error, message, call):
    with pytest.raises(error, match=message):
        call()


SYNCHRONOUS = [AfterBackward(), DuringBackward(), OneStepLate(), Sharded(), Sharded(DuringBackward())]
OF_OTHER_OPTIONS = [
    *((DiLoCo(2), other) for other in (DiLoCo(2, outer=chainer.optimizers.SGD(lr=0.1)), DiLoCo(3), LocalSGD(2))),
    *itertools.pairwise([*SYNCHRONOUS, Asynchronous(), SynchronousFirst(2, LocalSGD(2)), AfterBackward()]),
    (AfterBackward(zero_fill=True), AfterBackward(zero_fill=False)),
    *((True, other) for other in (False, AfterBackward(zero_fill=False), DuringBackward(), LocalSGD(2))),
]


@pytest.mark.skipif(SIZE < 2, reason="needs two ranks that differ")
@pytest.mark.parametrize(("of_first", "of_others"), OF_OTHER_OPTIONS)
def test_ranks_whose_options_differ(of_first, of_others):
    with pytest.raises(ValueError, match="expected the same when on every rank, got "):
        MultiNodeOptimizer(chainer.optimizers.SGD(), COMM, of_first if RANK == 0 else of_others)


@pytest.mark.skipif(SIZE < 2, reason="needs two ranks that differ")
@pytest.mark.parametrize("zero_fill", [True, False])
def test_a_bool_means_the_same_as_after_backward(zero_fill):
    when = AfterBackward(zero_fill) if RANK == 0 else zero_fill
    optimizer = start(MultiNodeOptimizer(chainer.optimizers.SGD(lr=0.5), COMM, when))
    assert optimizer.zero_fill == zero_fill
    for _ in train(optimizer, range(2)):
        equal_everywhere(optimizer.target)


@pytest.mark.parametrize("when", [*SYNCHRONOUS, Sharded(OneStepLate()), LocalSGD(2), DiLoCo(2), Asynchronous()])
@pytest.mark.parametrize("replaces", ["the model", "a parameter"])
def test_other_parameters_of_the_same_names_are_trained_together(when, replaces):
    optimizer = start(make(when))
    for _ in train(optimizer, range(3)):  # in an odd number of steps, something is pending
        pass
    optimizer.synchronize()
    other = Net(seed=RANK)
    if replaces == "a parameter":
        with optimizer.target.init_scope():
            optimizer.target.b = other.b
        other = optimizer.target
    optimizer.setup(other)
    for _ in train(optimizer, range(4)):
        pass
    optimizer.synchronize()
    equal_everywhere(other)
    assert not np.array_equal(other.b.data, Net(seed=0).b.data)  # it was trained


@pytest.mark.parametrize("when", [AfterBackward(), OneStepLate(), LocalSGD(2)])
def test_a_parameter_that_is_not_optimised_may_be_a_new_one_in_each_step(when):
    optimizer = start(make(when))
    for _ in train(optimizer, range(3)):
        with optimizer.target.init_scope():
            optimizer.target.noise = chainer.Parameter(np.ones(2, "f4"))
        if optimizer.t == 0:
            optimizer.assume_synchronized()  # of its name
    assert optimizer.t > 0


@pytest.mark.skipif(SIZE < 2, reason="needs two ranks that differ")
@pytest.mark.parametrize("when", [*SYNCHRONOUS, Sharded(OneStepLate()), LocalSGD(2), DiLoCo(2)])
def test_other_parameters_on_one_rank_raise_on_all(when):
    optimizer = start(make(when))
    for _ in train(optimizer, range(3)):
        pass
    if RANK == SIZE - 1:
        optimizer.setup(Net(seed=5))
    with pytest.raises((ValueError, RuntimeError), match=r"expected all ranks (in|to come to) the same "):
        for _ in train(optimizer, range(3)):
            pass


def test_rank_without_a_step_of_its_own_meets_those_that_have_taken_one():
    options = SynchronousFirst(1, LocalSGD(4))
    optimizer = MultiNodeOptimizer(chainer.optimizers.SGD(0.1), COMM, options)
    optimizer.setup(chainer.Sequential(chainer.links.Linear(2, 2)))
    for _ in range(2 if COMM.rank else 3):  # one distributes parameters, one is exact
        for param in optimizer.target.params():
            param.grad = np.full(param.shape, COMM.rank + 1, np.float32)
        optimizer.update()
    optimizer.synchronize()
    mine = [param.data.copy() for param in optimizer.target.params()]
    for other in COMM.allgather_obj(mine):
        for a, b in zip(mine, other, strict=True):
            np.testing.assert_array_equal(a, b)
