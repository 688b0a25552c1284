"""Averaging in the background: whatever happens on one rank, the others are informed."""

import contextlib
import itertools
import os
import sys
import threading
import warnings
import weakref
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from fake_model import Model, Param
from mpi4py import MPI

import mn_comm
from mn_comm import Future, create_communicator

pytestmark = pytest.mark.sizes(1)

WORLD = MPI.COMM_WORLD
RANK, SIZE = WORLD.rank, WORLD.size
NAMES = ["naive", "flat", "hierarchical", "two_dimensional", "single_node"]
MEAN = (SIZE - 1) / 2
several = pytest.mark.skipif(SIZE < 2, reason="needs two ranks that differ")


@pytest.fixture(params=NAMES)
def comm(request):
    return create_communicator(request.param)


def model_of(count=6, length=50, value=0.0):
    return Model(
        **{f"p{i}": Param(np.zeros(length, "f4"), np.full(length, RANK + i + value, "f4")) for i in range(count)}
    )


def fill(model, value):
    for i, param in enumerate(model.params.values()):
        param.grad[...] = RANK + i + value


def check(model, value):
    for i, param in enumerate(model.params.values()):
        np.testing.assert_array_equal(param.grad, np.full_like(param.grad, MEAN + i + value))


def test_buckets_leave_as_they_become_ready_and_means_arrive_in_place(comm):
    reducer = comm.gradient_reducer(background=True, bucket_bytes=250)
    model = model_of()
    arrays = [param.grad for param in model.params.values()]
    order = ["/p5", "/p4", "/p3", "/p2", "/p1", "/p0"]
    for step in range(5):
        fill(model, step)
        reduction = reducer.start(model, order=order)
        for name in order[:-1]:
            reduction.ready(name)
        assert not reduction.has_left
        for i, array in enumerate(arrays):  # they have not been written to: the backward pass may still read them
            np.testing.assert_array_equal(array, np.full_like(array, RANK + i + step))
        reduction.ready(order[-1])
        assert reduction.has_left
        reduction.wait()
        check(model, step)
        assert all(param.grad is array for param, array in zip(model.params.values(), arrays, strict=True))


def test_two_at_a_time(comm):
    reducer = comm.gradient_reducer(background=True, sets=2)
    model = model_of()
    previous = None
    for step in range(6):
        for i, param in enumerate(model.params.values()):
            param.grad = np.full(50, RANK + i + step, "f4")
        current = reducer.start(model)
        current.ready_all()
        if previous is not None:
            previous.wait()
            check(model, step - 1)
        previous = current
    previous.wait()
    check(model, 5)


def test_gradients_that_are_missing_or_changed_when_the_means_arrive(comm):
    reducer = comm.gradient_reducer(background=True)
    model = model_of()
    reduction = reducer.start(model)
    reduction.ready_all()
    model.params["p0"].grad = None
    model.params["p1"].grad = np.zeros(7, "f8")
    reduction.wait()
    check(model, 0)


def test_what_an_exception_left_behind_does_not_get_into_the_next_mean(comm):
    """On all ranks, after different numbers of buckets have been sent."""
    reducer = comm.gradient_reducer(background=True, bucket_bytes=250)
    model = model_of(count=8, length=20_000)
    for step in range(6):
        fill(model, 1000 + step)
        reduction = reducer.start(model)
        for name in list(model.params)[: (RANK + step) % 8]:
            reduction.ready(f"/{name}")
        if step % 2:
            reduction.abandon()
        del reduction  # or the script drops it
        fill(model, step)
        reduction = reducer.start(model)
        reduction.ready_all()
        reduction.wait()
        check(model, step)


@several
def test_a_rank_that_abandons_its_backward_pass_is_named_to_the_others(comm):
    reducer = comm.gradient_reducer(background=True, bucket_bytes=250)
    model = model_of()
    for _ in range(2):
        fill(model, 0)
        reduction = reducer.start(model)
        if RANK == SIZE - 1:
            reduction.ready("/p0")
            reduction.abandon()
        else:
            reduction.ready_all()
            with pytest.raises(RuntimeError, match=f"rank {SIZE - 1} has abandoned its backward pass"):
                reduction.wait()
            for i, param in enumerate(model.params.values()):  # nothing was written
                np.testing.assert_array_equal(param.grad, np.full(50, RANK + i))
        reduction = reducer.start(model)
        reduction.ready_all()
        reduction.wait()
        check(model, 0)


@several
def test_ranks_that_differ_raise_when_they_wait_not_before(comm):
    """Not in the middle of the backward pass, in which there may be other communication."""
    reducer = comm.gradient_reducer(background=True, bucket_bytes=250)
    model = model_of()
    for step in range(2):
        if step and RANK == SIZE - 1:
            model.params["p3"] = Param(np.zeros(3, "f4"), np.zeros(3, "f4"))
        reduction = reducer.start(model)
        reduction.ready_all()
        np.testing.assert_array_equal(comm.allreduce(np.ones(1)), [SIZE])
        if step:
            with pytest.raises(ValueError, match=r"first at /p3: shape \(50,\) .* on rank 0, shape \(3,\)"):
                reduction.wait()
        else:
            reduction.wait()
    model = model_of()
    reduction = reducer.start(model)
    reduction.ready_all()
    reduction.wait()
    check(model, 0)


def test_one_slab_for_each_reducer(comm):
    before = len(os.listdir("/proc/self/fd"))
    reducers = [comm.gradient_reducer(background=True, bucket_bytes=200) for _ in range(3)]
    model = model_of(count=100)
    for reducer in reducers:
        reduction = reducer.start(model)
        reduction.ready_all()
        reduction.wait()
    assert len(os.listdir("/proc/self/fd")) - before <= 8
    del reducers, reducer, reduction


def test_a_hook_sees_and_changes_what_travels(comm):
    seen = []

    def hook(bucket):
        seen.append((bucket.index, bucket.names, bucket.shapes, bucket.flat.copy()))
        return bucket.average(bucket.flat.astype("f8") * 2).then(lambda mean: mean + 1)

    for background in (False, True):
        del seen[:]
        reducer = comm.gradient_reducer(background=background, comm_hook=hook, bucket_bytes=450)
        model = model_of(count=5)
        if background:
            reduction = reducer.start(model)
            reduction.ready_all()
            reduction.wait()
        else:
            reducer.average(model)
        for i, param in enumerate(model.params.values()):
            np.testing.assert_array_equal(param.grad, np.full(50, 2 * (MEAN + i) + 1))
        assert [name for _, names, _, _ in seen for name in names] == [f"/p{i}" for i in range(5)]
        assert all(shape == (50,) for _, _, shapes, _ in seen for shape in shapes)
        flat = np.concatenate([flat for *_, flat in seen])
        np.testing.assert_array_equal(flat, np.repeat(RANK + np.arange(5), 50))


def test_a_hook_may_average_the_bucket_itself_or_not_at_all(comm):
    for hook, expected in (
        (lambda bucket: bucket.average(), MEAN),
        (lambda bucket: Future(lambda: bucket.flat * 0 + 7), None),
    ):
        reducer = comm.gradient_reducer(comm_hook=hook)
        model = model_of(count=3)
        reducer.average(model)
        for i, param in enumerate(model.params.values()):
            np.testing.assert_array_equal(param.grad, np.full(50, 7 if expected is None else expected + i))


@several
def test_reducers_that_differ_between_ranks_raise_on_all(comm):
    with pytest.raises(
        ValueError,
        match="expected the same background, own_dtype, apart, use of comm_hook, bucket_bytes and sets on every rank",
    ):
        comm.gradient_reducer(background=RANK == 0)


@pytest.mark.parametrize("options", [{}, {"background": True}, {"background": True, "sets": 2}])
@pytest.mark.parametrize("name", ["hierarchical", "two_dimensional"])
def test_buckets_that_share_memory_go_on_doing_so_when_others_cannot(name, options, monkeypatch):
    comm = create_communicator(name, WORLD.Dup())
    reducer = comm.gradient_reducer(comm_hook=lambda bucket: bucket.average(), **options)
    models = [model_of(length=length) for length in (50, 51, 50)]

    def average(model, value):
        fill(model, value)
        if options:
            reduction = reducer.start(model)
            reduction.ready_all()
            reduction.wait()
        else:
            reducer.average(model)
        check(model, value)

    average(models[0], 0)
    with monkeypatch.context() as patch:
        patch.setattr(os, "memfd_create", None)
        patch.delattr(os, "memfd_create")
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            average(models[1], 1)
    for step in range(4):
        for model in models:
            average(model, step)


def test_a_mean_that_could_not_be_had_does_not_get_into_the_next_one(comm):
    """A hook's future raises on every rank while later buckets are still being averaged."""
    fails = [False]

    def hook(bucket):
        if fails[0] and bucket.index == 0:
            return bucket.submit(lambda: 1 / 0)
        return bucket.average()

    reducer = comm.gradient_reducer(background=True, comm_hook=hook, bucket_bytes=0)
    model = model_of(length=20_000)
    for step in range(12):
        fails[0] = step % 2 == 0
        fill(model, 1000 * step)
        reduction = reducer.start(model)
        reduction.ready_all()
        if fails[0]:
            with pytest.raises(ZeroDivisionError):
                reduction.wait()
        else:
            reduction.wait()
            check(model, 1000 * step)
            with pytest.raises(RuntimeError, match="got one that was waited for already"):
                reduction.wait()


@pytest.mark.parametrize(
    ("hook", "error", "message"),
    [
        (lambda bucket: None, TypeError, "expected a mn_comm.Future, got NoneType for bucket 0"),
        (
            lambda bucket: bucket.average().then(lambda mean: mean[1:]),
            ValueError,
            "expected a mean of (50|300) elements for bucket 0",
        ),
        (
            lambda bucket: bucket.average(np.zeros(300, "i4")),
            TypeError,
            "expected an array of floats .* got dtype int32",
        ),
    ],
)
@pytest.mark.parametrize("background", [False, True])
def test_what_a_hook_returns_is_checked(comm, hook, error, message, background):
    reducer = comm.gradient_reducer(background=background, comm_hook=hook)
    model = model_of()
    with pytest.raises(error, match=message):
        if background:
            reduction = reducer.start(model)
            reduction.ready_all()
            reduction.wait()
        else:
            reducer.average(model)


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"bucket_bytes": "4MB"}, TypeError, "expected an integer for bucket_bytes, got str"),
        ({"bucket_bytes": -1}, ValueError, "expected bucket_bytes of at least 0, got -1"),
        ({"sets": 0}, ValueError, "expected sets of at least 1, got 0"),
    ],
)
def test_arguments_of_a_reducer(comm, options, error, message):
    with pytest.raises(error, match=message):
        comm.gradient_reducer(**options)


@several
def test_a_hook_on_some_ranks_only_raises_on_all(comm):
    hook = None if RANK else lambda bucket: bucket.average()
    with pytest.raises(
        ValueError, match=r"bucket_bytes and sets on every rank, got \(False, False, False, True, None, 1\) on rank 0"
    ):
        comm.gradient_reducer(comm_hook=hook)


def test_a_bucket_holds_whole_gradients_if_its_size_is_asked_for(comm):
    reducer = comm.gradient_reducer(bucket_bytes=0)
    model = model_of()
    reducer.average(model)
    check(model, 0)
    assert len(reducer._layouts._latest[-1].buckets().buckets) == len(model.params)


def test_what_is_waited_for_is_not_forgotten_if_a_signal_handler_raises(comm, monkeypatch):
    """A new reduction waits for one that was left unfinished; until then, its memory is in use."""
    reducer = comm.gradient_reducer(background=True)
    model = model_of()
    reducer.start(model).ready_all()
    (left,) = reducer._under_way
    with monkeypatch.context() as changed, pytest.raises(TimeoutError):
        changed.setattr(type(left), "drain", interrupted)
        changed.setattr(type(left), "has_left", False)
        reducer.start(model)
    assert reducer._under_way == [left]
    fill(model, 1)
    reduction = reducer.start(model)
    reduction.ready_all()
    reduction.wait()
    check(model, 1)


def interrupted(_):
    raise TimeoutError  # by a signal handler


class Interrupted(BaseException):
    """What a signal handler raises."""


def raises_after_calls(number, function):
    """Raise after a number of calls in mn_comm, as a signal handler may; return whether there were as many."""
    numbers = itertools.count()
    folder = os.path.dirname(mn_comm.__file__)

    def profile(frame, event, _):
        if event in ("call", "c_return") and frame.f_code.co_filename.startswith(folder) and next(numbers) == number:
            raise Interrupted

    sys.setprofile(profile)
    try:
        function()
        sys.setprofile(None)
    except Interrupted:
        return True
    return False


def average_twice(bucket):
    """Give the worker two tasks for each bucket."""
    bucket.average(np.ones(3, "f4"))
    return bucket.average()


def average_again_in_the_worker(bucket):
    return bucket.average().then(lambda mean: bucket.average(mean).wait())


@pytest.mark.parametrize(
    ("name", "hook"), [("flat", average_twice), ("flat", average_again_in_the_worker), ("single_node", None)]
)
def test_whenever_a_signal_handler_raises_the_next_mean_is_right(name, hook):
    """The others may wait for what this rank was about to send, and this rank sends nothing twice."""
    reducer = create_communicator(name).gradient_reducer(background=True, bucket_bytes=0, comm_hook=hook)
    model = model_of(count=2)

    def begin():
        reduction = reducer.start(model)
        reduction.ready_all()
        return reduction

    begin().wait()
    for n_calls in itertools.count():
        was_interrupted = False
        fill(model, 1000)
        if RANK < SIZE - 1:
            with contextlib.suppress(RuntimeError):  # that the last rank has abandoned its backward pass
                begin().wait()
        elif raises_after_calls(n_calls, begin):
            was_interrupted = True
            if all(each.is_over for each in reducer._under_way):
                begin()  # it had not begun, and the others wait for it
        fill(model, n_calls)
        begin().wait()
        check(model, n_calls)
        if not WORLD.bcast(was_interrupted, SIZE - 1):
            assert n_calls > 50
            return


@pytest.mark.parametrize("interrupted", ["__init__", "_wait"])
def test_a_signal_handler_raises_while_an_unfinished_reduction_is_discarded(interrupted, monkeypatch):
    """Its buckets are sent all the same, and it is not discarded before they are averaged."""
    reducer = create_communicator("flat").gradient_reducer(background=True, bucket_bytes=0)
    model = model_of(count=3)
    left = reducer.start(model)
    real, raised = getattr(Future, interrupted), []

    def raise_once(*args):
        if not raised and RANK == SIZE - 1:
            raised.append(True)
            raise TimeoutError
        return real(*args)

    with monkeypatch.context() as changed, contextlib.suppress(TimeoutError):
        changed.setattr(Future, interrupted, raise_once)
        left.drain()
    assert left.has_left
    assert left.is_over == (interrupted == "__init__" or not raised)
    fill(model, 1)
    reduction = reducer.start(model)
    reduction.ready_all()
    reduction.wait()
    check(model, 1)


def test_memory_is_free_when_a_reduction_has_left():
    """For example the gradients of one step, while those of the next one are computed."""
    freed = []

    def hook(bucket):
        weakref.finalize(bucket.average(np.ones(3, "f4")).wait(), freed.append, "what the hook has averaged")
        return bucket.average()

    reducer = create_communicator("flat").gradient_reducer(background=True, comm_hook=hook)
    model = model_of(count=1)
    reducer.start(model).ready_all()
    model.params["p0"].grad = np.ones(50, "f4")
    weakref.finalize(model.params["p0"].grad, freed.append, "a gradient")
    reduction = reducer.start(model)
    reduction.ready_all()
    model.params["p0"].grad = None
    assert freed == ["what the hook has averaged", "what the hook has averaged", "a gradient"]
    reduction.wait()


def test_what_a_hook_submits_in_another_thread_is_done_by_the_worker():
    callers = []

    def hook(bucket):
        with ThreadPoolExecutor(1) as pool:
            return pool.submit(
                bucket.submit, lambda: callers.append(threading.current_thread()) or bucket.flat
            ).result()

    reducer = create_communicator("flat").gradient_reducer(background=True, comm_hook=hook)
    reduction = reducer.start(model_of())
    reduction.ready_all()
    reduction.wait()
    assert [caller.name for caller in callers] == ["mn_comm"]


def test_a_hook_may_average_in_the_worker_while_it_has_not_returned():
    averaged = threading.Event()

    def again(bucket, mean):
        mean = bucket.average(mean).wait()
        averaged.set()
        return mean

    def hook(bucket):
        future = bucket.average().then(lambda mean: again(bucket, mean))
        assert averaged.wait(60)
        return future

    reducer = create_communicator("flat").gradient_reducer(background=True, comm_hook=hook)
    model = model_of()
    reduction = reducer.start(model)
    reduction.ready_all()
    reduction.wait()
    check(model, 0)
