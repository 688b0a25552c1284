"""Signal handlers that raise while parameters are averaged in the background, in scripts that catch it and continue."""

import _thread
import contextlib
import functools
import itertools
import operator
import signal
import sys
import threading

import chainer
import numpy as np
import pytest

import mn_optim  # noqa: F401 - before Chainer
from mn_comm import create_communicator
from mn_optim import Asynchronous, MultiNodeOptimizer
from mn_optim.schemes import asynchronous
from mn_optim.schemes.asynchronous import _Rounds

COMM = create_communicator("flat")
RANK, SIZE = COMM.rank, COMM.size

pytestmark = pytest.mark.sizes(3)


class Interrupt(KeyboardInterrupt):
    """What the handler raises."""


@pytest.fixture(autouse=True)
def handler():
    def handle(*_):
        raise Interrupt

    there = signal.signal(signal.SIGUSR1, handle)
    yield
    signal.signal(signal.SIGUSR1, there)


class Signal:
    """A signal that comes when ``comes`` is read: unlike a call, that leaves the handler to the function under test."""

    comes = property(operator.methodcaller("trip"))
    trip = functools.partial(_thread.interrupt_main, signal.SIGUSR1)


def interrupted(function, line, files, until=None):
    """Call a function, and let a signal come before a line of these files, counted in the order of execution.

    Return whether the handler has raised; ``None`` if fewer lines are executed, before a function named ``until``.
    """
    count, coming, there = itertools.count(1), Signal(), sys.gettrace()
    has_come = False

    def trace(frame, event, arg):
        nonlocal has_come
        if frame.f_code.co_name == until:
            sys.settrace(there)
            return None
        if not frame.f_code.co_filename.endswith(files):
            return None
        if event in ("call", "line") and next(count) == line:
            sys.settrace(there)
            has_come = True
            coming.comes  # noqa: B018
        return trace

    try:
        sys.settrace(trace)
        function()
    except Interrupt:
        return True
    finally:
        sys.settrace(there)
    return False if has_come else None


class Net(chainer.Link):
    def __init__(self):
        super().__init__()
        with self.init_scope():
            self.a = chainer.Parameter(np.zeros((2, 3), "f4"))
            self.b = chainer.Parameter(np.zeros(3, "f4"))


def make(**settings):
    optimizer = MultiNodeOptimizer(chainer.optimizers.SGD(lr=1), COMM, Asynchronous(interval=0, **settings))
    optimizer.setup(Net())
    optimizer.assume_synchronized()
    return optimizer


def step(optimizer):
    """Add 1 to all parameters."""
    for param in optimizer.target.params():
        param.grad = np.full_like(param.data, -1)
    optimizer.update()


def equal_everywhere(model):
    for _, param in model.namedparams():
        for other in COMM.allgather(param.data):
            np.testing.assert_array_equal(other, param.data)


def test_anywhere_in_a_step():
    """The thread, and with it all ranks, would wait for a lock that the main thread has kept."""
    optimizer = make(max_staleness=2)
    step(optimizer)
    for line in itertools.count(1):
        outcome = False
        if RANK == 0:
            outcome = interrupted(lambda: step(optimizer), line, ("asynchronous.py", "threading.py"))
        step(optimizer)
        if COMM.bcast_obj(outcome) is None:
            break
    optimizer.synchronize()
    equal_everywhere(optimizer.target)


def test_anywhere_in_the_start_of_rounds():
    """There would be rounds that nobody ends, and before whose end no others start."""
    optimizer = make(max_staleness=2)
    step(optimizer)
    optimizer.synchronize()
    for line in itertools.count(1):
        outcome = False
        if RANK == 0:
            outcome = interrupted(lambda: step(optimizer), line, ("asynchronous.py", "background.py"), until="_add")
        for _ in range(3):
            step(optimizer)
        optimizer.synchronize()
        equal_everywhere(optimizer.target)
        if COMM.bcast_obj(outcome) is None:
            break


def test_anywhere_before_synchronize_waits():
    """Other ranks would average forever with rounds of which this rank did not know any more."""
    optimizer = make()
    for line in itertools.count(1):
        step(optimizer)
        outcome = False
        if RANK == 0:
            outcome = interrupted(optimizer.synchronize, line, "asynchronous.py", until="wait_for_thread")
        if RANK != 0 or outcome:
            optimizer.synchronize()
        equal_everywhere(optimizer.target)
        if COMM.bcast_obj(outcome) is None:
            break


@pytest.mark.skipif(SIZE < 2, reason="needs a rank to wait for")
@pytest.mark.parametrize("repeats", [True, False])
def test_while_synchronize_waits(monkeypatch, repeats):
    """It would wait again at once, until all ranks call it, and then begin other rounds beside those."""
    optimizer = make()
    step(optimizer)
    if RANK == 0:
        make_round, main = _Rounds._make_round, threading.main_thread().ident

        def make_interrupting_round(rounds):
            if rounds._has_ended:
                monkeypatch.undo()
                signal.pthread_kill(main, signal.SIGUSR1)
            return make_round(rounds)

        monkeypatch.setattr(_Rounds, "_make_round", make_interrupting_round)
        with pytest.raises(Interrupt):
            optimizer.synchronize()
    COMM.bcast_obj(None)
    if RANK != 0 or repeats:
        optimizer.synchronize()
    for _ in range(RANK + 1):
        step(optimizer)
    optimizer.synchronize()
    equal_everywhere(optimizer.target)


def test_a_difference_is_not_added_twice(monkeypatch):
    """Adding is interrupted after the first parameter, again and again; nothing that was learned is lost."""
    optimizer = make(max_staleness=2)
    param, set_value = optimizer.target.b, asynchronous.set_value
    calls = itertools.count()

    def set_or_raise(changed, value):
        if changed is param and threading.current_thread() is threading.main_thread() and next(calls) % 2:
            raise Interrupt
        set_value(changed, value)

    monkeypatch.setattr(asynchronous, "set_value", set_or_raise)
    n_steps = 20 + 20 * RANK
    for _ in range(n_steps):
        with contextlib.suppress(Interrupt):
            step(optimizer)
    optimizer.synchronize()
    mean = np.mean(COMM.allgather_obj(n_steps))
    for each in optimizer.target.params():
        np.testing.assert_allclose(each.data, mean, rtol=1e-4)
