"""Means of the parameters in the background, with ranks at different speeds."""

import io
import threading

import chainer
import chainer.links as L
import numpy as np
import pytest

import mn_optim  # noqa: F401 - before Chainer
from mn_comm import create_communicator
from mn_optim import Asynchronous, DuringBackward, MultiNodeOptimizer, SynchronousFirst
from mn_optim.schemes.asynchronous import _Rounds

NAMES = ["naive", "flat", "hierarchical", "two_dimensional"]
COMM = create_communicator("flat")
RANK, SIZE = COMM.rank, COMM.size

pytestmark = pytest.mark.sizes(3)


class Net(chainer.Link):
    """A parameter that is pulled to a target, and one without a gradient."""

    def __init__(self, value=0):
        super().__init__()
        with self.init_scope():
            self.pulled = chainer.Parameter(np.full((2, 3), value, "f4"))
            self.left = chainer.Parameter(np.full(3, value, "f4"))


def make(when=None, comm=COMM, lr=0.1, value=0):
    actual, when = chainer.optimizers.SGD(lr=lr), Asynchronous() if when is None else when
    optimizer = MultiNodeOptimizer(actual, comm, when).setup(Net(value))
    if value == 0:
        optimizer.assume_synchronized()
    return optimizer


def pull(optimizer, target):
    net = optimizer.target
    net.pulled.grad = net.pulled.data - np.float32(target)
    optimizer.update()


def equal_everywhere(model):
    for _, param in model.namedparams():
        for other in COMM.allgather(param.data):
            np.testing.assert_array_equal(other, param.data)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("interval", [0, 0.001])
def test_all_come_to_what_is_best_for_all(name, interval):
    """Each rank alone would go to its own number; with as many steps of each, they come to the mean of these."""
    optimizer = make(Asynchronous(interval=interval, max_staleness=2), create_communicator(name))
    for _ in range(100):
        pull(optimizer, RANK)
        COMM.allgather_obj(None)
    optimizer.synchronize()
    equal_everywhere(optimizer.target)
    np.testing.assert_allclose(optimizer.target.pulled.data, (SIZE - 1) / 2, atol=0.1 * SIZE)
    np.testing.assert_array_equal(optimizer.target.left.data, 0)


def test_nothing_that_was_learned_is_lost():
    """Averaging moves ranks together without changing their sum: the result contains all steps of all ranks."""
    optimizer = make(Asynchronous(interval=0))
    n = 50 + 70 * RANK
    for _ in range(n):
        optimizer.target.pulled.grad = np.full((2, 3), -10, "f4")
        optimizer.update()
    optimizer.synchronize()
    mean = np.mean(COMM.allgather_obj(n))
    np.testing.assert_allclose(optimizer.target.pulled.data, mean, rtol=1e-4)
    equal_everywhere(optimizer.target)


def test_a_rank_that_stops_does_not_stop_the_others():
    """Rank 0 takes no more steps until the others have taken all of theirs."""
    optimizer = make(Asynchronous(interval=0, max_staleness=5))
    pull(optimizer, RANK)
    if RANK == 0:
        for rank in range(1, SIZE):
            COMM.recv_obj(rank)
    else:
        for _ in range(100):
            pull(optimizer, RANK)
        COMM.send_obj("done", 0)
    pull(optimizer, RANK)
    optimizer.synchronize()
    equal_everywhere(optimizer.target)


def test_any_number_of_steps_between_any_number_of_meetings():
    optimizer = make(Asynchronous(interval=0))
    for epoch in range(10):
        for _ in range((RANK * 3 + epoch) % 5):
            pull(optimizer, RANK)
        optimizer.synchronize()
        equal_everywhere(optimizer.target)
        assert not optimizer._stepper.scheme.has_diverged
    before = optimizer.target.pulled.data.copy()
    optimizer.synchronize()
    np.testing.assert_array_equal(optimizer.target.pulled.data, before)


def test_the_first_steps_are_exact():
    optimizer = make(SynchronousFirst(4, Asynchronous()))
    exact = MultiNodeOptimizer(chainer.optimizers.SGD(lr=0.1), COMM).setup(Net())
    exact.assume_synchronized()
    for _ in range(4):
        for each in (optimizer, exact):
            pull(each, RANK)
        assert optimizer.is_meeting
        np.testing.assert_array_equal(optimizer.target.pulled.data, exact.target.pulled.data)
        optimizer.synchronize()
    for _ in range(RANK):
        pull(optimizer, RANK)
    optimizer.synchronize()
    equal_everywhere(optimizer.target)


def test_the_first_update_shares_out_the_parameters_of_rank_0():
    optimizer = make(value=RANK + 1)
    pull(optimizer, 0)
    assert optimizer.t == 0
    np.testing.assert_array_equal(optimizer.target.pulled.data, 1)
    optimizer.synchronize()


def test_a_rank_without_any_step():
    optimizer = make(value=RANK + 1)
    for _ in range(5 * RANK):
        pull(optimizer, 0)
    optimizer.synchronize()
    equal_everywhere(optimizer.target)
    np.testing.assert_array_equal(optimizer.target.left.data, 1)
    pull(optimizer, 0)
    optimizer.synchronize()
    equal_everywhere(optimizer.target)


def test_a_rank_waits_where_the_last_mean_is_too_old(monkeypatch):
    goes_on, steps = threading.Event(), []
    make_round = _Rounds._make_round

    def held_up(rounds):
        assert goes_on.wait(60)
        return make_round(rounds)

    monkeypatch.setattr(_Rounds, "_make_round", held_up)
    optimizer = make(Asynchronous(interval=0, max_staleness=3))

    def train():
        for _ in range(8):
            pull(optimizer, RANK)
            steps.append(optimizer.is_meeting)

    thread = threading.Thread(target=train)
    thread.start()
    while len(steps) < 2:
        thread.join(0.01)
    thread.join(0.3)  # long enough for the other six steps
    assert thread.is_alive()
    assert steps == [False, False]
    goes_on.set()
    thread.join(60)
    assert len(steps) == 8
    assert steps[2]
    optimizer.synchronize()
    equal_everywhere(optimizer.target)


def test_what_ends_the_rounds_is_raised_by_the_next_step(monkeypatch):
    def fail(rounds):
        raise ArithmeticError("no mean")

    monkeypatch.setattr(_Rounds, "_make_round", fail)
    optimizer = make(Asynchronous(max_staleness=1))
    with pytest.raises(ArithmeticError, match="no mean"):
        pull(optimizer, RANK)
    with pytest.raises(ArithmeticError, match="no mean"):
        optimizer.synchronize()


@pytest.mark.skipif(SIZE < 2, reason="needs two ranks that differ")
def test_models_that_come_to_differ_raise_on_all_ranks():
    optimizer = make(Asynchronous(max_staleness=1, interval=0))
    pull(optimizer, RANK)
    optimizer.synchronize()
    if RANK == SIZE - 1:
        optimizer.target.left.array = np.zeros(4, "f4")
        optimizer.target.left.grad = None
    with pytest.raises(ValueError, match=r"first at /left: shape \(3,\) .* on rank 0, shape \(4,\)"):
        for _ in range(3):
            pull(optimizer, RANK)


def test_a_parameter_that_changes_its_shape_raises_on_all_ranks():
    """It happens on one rank, while a difference is still to be added: the others are not left waiting in a round."""
    optimizer = make(Asynchronous(max_staleness=1, interval=0))
    for _ in range(3):
        pull(optimizer, RANK)
    COMM.barrier()  # the other ranks may not hear of it before they expect it
    if RANK == SIZE - 1:
        (rounds,) = optimizer._stepper.scheme._rounds
        while not rounds._pending:  # only steps make it empty again
            rounds._await_news()
        with rounds._changes:
            optimizer.target.left.array = np.zeros(4, "f4")
            optimizer.target.left.grad = None
    COMM.barrier()  # and they may not take all of their steps before it happens
    with pytest.raises(ValueError, match=r"to keep its shape \(3,\), got \(4,\)|first at /left"):
        for _ in range(5):
            pull(optimizer, RANK)
    with pytest.raises(ValueError, match=r"to keep its shape \(3,\), got \(4,\)|first at /left"):
        optimizer.synchronize()


@pytest.mark.skipif(SIZE < 2, reason="needs ranks that differ")
@pytest.mark.parametrize("where", [0, SIZE - 1])
def test_a_parameter_that_only_one_rank_adds_raises_when_the_others_have_ended(where):
    """Until then the rank waits: the others might add it, too, when they have taken as many steps."""
    optimizer = make(Asynchronous(interval=0))
    pull(optimizer, RANK)
    if where == RANK:
        with optimizer.target.init_scope():
            optimizer.target.new = chainer.Parameter(np.zeros(2, "f4"))
    with pytest.raises(ValueError, match=f"got 1 of {SIZE} ranks that distribute them again"):
        for _ in range(3):
            pull(optimizer, RANK)
        optimizer.synchronize()


def test_several_models_beside_each_other_and_beside_overlap():
    """Their rounds have a different order on every rank."""
    optimizers = [make(Asynchronous(interval=0)) for _ in range(3)]
    overlapped = MultiNodeOptimizer(chainer.optimizers.SGD(), COMM, DuringBackward()).setup(Net())
    overlapped.assume_synchronized()
    for optimizer in optimizers:
        pull(optimizer, RANK)  # the first step is collective
    for step in range(60):
        for optimizer in optimizers[RANK % 3 :] + optimizers[: RANK % 3]:
            pull(optimizer, RANK)
        if step % 3 == 0:
            pull(overlapped, RANK)
    for optimizer in (*optimizers, overlapped):
        optimizer.synchronize()
        equal_everywhere(optimizer.target)


def test_hundreds_of_them_are_made_and_dropped():
    """Half of them in the middle of a round. Neither threads nor MPI communicators remain."""
    threads = None
    for i in range(100):
        optimizer = make(Asynchronous(interval=0))
        for _ in range(RANK + 1):
            pull(optimizer, RANK)
        if i % 2:
            optimizer.synchronize()
            equal_everywhere(optimizer.target)
        del optimizer
        if i == 20:
            threads = threading.active_count()
    assert threading.active_count() <= threads + 10
    assert len(COMM._contexts._others) < 30


def test_parameters_travel_in_their_own_dtype():
    comm = create_communicator("flat", allreduce_grad_dtype="float16")
    optimizer = make(Asynchronous(interval=0), comm)
    optimizer.target.left.data[...] = 1 / 3
    for _ in range(5):
        pull(optimizer, RANK)
    optimizer.synchronize()
    np.testing.assert_allclose(optimizer.target.left.data, 1 / 3, rtol=1e-6)


def test_a_parameter_that_is_initialised_later():
    model = chainer.Chain(used=L.Linear(5, 3), late=L.Linear(None, 3))
    optimizer = MultiNodeOptimizer(chainer.optimizers.SGD(), COMM, Asynchronous()).setup(model)
    x = np.random.RandomState(RANK).rand(2, 5).astype("f4")
    for step in range(14):
        link = model.late if step >= 5 + RANK else model.used
        optimizer.update(lambda link=link: chainer.functions.sum(link(x)))
    assert optimizer.t == 12
    optimizer.synchronize()
    equal_everywhere(model)


def test_resume_in_the_middle_of_the_warm_up():
    optimizer = make(SynchronousFirst(6, Asynchronous()))
    for _ in range(4):
        pull(optimizer, RANK)
    file = io.BytesIO()
    chainer.serializers.save_npz(file, optimizer)
    file.seek(0)
    resumed = make(SynchronousFirst(6, Asynchronous()))
    chainer.serializers.load_npz(file, resumed)
    assert resumed._stepper.scheme.n_steps == 4
    for each in (optimizer, resumed):
        each.synchronize()


def test_a_snapshot_of_diverged_ranks_warns():
    optimizer = make()
    pull(optimizer, RANK)
    with pytest.warns(RuntimeWarning, match=f"parameters of rank {RANK} are saved while those of other ranks differ"):
        chainer.serializers.save_npz(io.BytesIO(), optimizer)
    optimizer.synchronize()
    chainer.serializers.save_npz(io.BytesIO(), optimizer)


def test_loading_while_parameters_are_averaged_warns():
    optimizer = make()
    file = io.BytesIO()
    chainer.serializers.save_npz(file, optimizer)
    file.seek(0)
    pull(optimizer, RANK)
    with pytest.warns(RuntimeWarning, match="state is loaded while parameters are averaged"):
        chainer.serializers.load_npz(file, optimizer)
    optimizer.synchronize()
    file.seek(0)
    chainer.serializers.load_npz(file, optimizer)


def test_another_model_after_a_step_of_some_ranks_only():
    optimizer = make()
    pull(optimizer, RANK)
    optimizer.synchronize()
    if RANK == 0:
        pull(optimizer, RANK)
    optimizer.setup(Net(RANK))
    for _ in range(3):
        pull(optimizer, RANK)
    optimizer.synchronize()
    equal_everywhere(optimizer.target)


class Communicating(chainer.Chain):
    def __init__(self, comm):
        super().__init__()
        self.comm = comm
        with self.init_scope():
            self.linear = L.Linear(2, 2)


@pytest.mark.parametrize("where", ["all", "one"])
def test_a_model_that_communicates_is_refused_on_all_ranks(where):
    inner = Communicating(COMM if where == "all" or RANK == SIZE - 1 else None)
    model = chainer.Chain(inner=inner)
    optimizer = MultiNodeOptimizer(chainer.optimizers.SGD(), COMM, Asynchronous()).setup(model)
    for param in model.params():
        param.grad = np.zeros_like(param.data)
    for _ in range(2):
        with pytest.raises(ValueError, match="got a Communicating with a communicator at /inner"):
            optimizer.update()


@pytest.mark.parametrize("wrong", [1, None, Asynchronous])
@pytest.mark.parametrize("where", ["all", "one"])
def test_what_is_no_value_of_when_raises_on_all_ranks(wrong, where):
    when = wrong if where == "all" or RANK == SIZE - 1 else Asynchronous()
    with pytest.raises(TypeError, match=r"expected AfterBackward\(\) or alike for when, got"):
        MultiNodeOptimizer(chainer.optimizers.SGD(), COMM, when)


@pytest.mark.parametrize(
    ("error", "message", "numbers"),
    [
        (TypeError, "unexpected keyword argument 'send'", {"send": lambda bucket: bucket.average()}),
        (ValueError, "max_staleness of at least 1, got 0", {"max_staleness": 0}),
        (TypeError, "an integer for max_staleness, got float", {"max_staleness": 1.5}),
        (ValueError, "interval of at least 0 seconds, got -1", {"interval": -1}),
    ],
)
def test_bad_numbers(error, message, numbers):
    with pytest.raises(error, match=message):
        Asynchronous(**numbers)
