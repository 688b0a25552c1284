"""SIGINT while the main thread waits, or seems to: these tests do not wait for MPI."""

import asyncio
import contextlib
import errno
import math
import os
import signal
import threading
import time

import pytest

from mn_guard import forks, guard_thread, interrupts
from mn_guard.guard_thread import GuardThread
from mn_guard.interrupts import Interrupts, watch_interrupts


class Stand:
    """A main thread that waits, or does not."""

    wait = None


@pytest.fixture
def main(monkeypatch):
    stand = Stand()
    monkeypatch.setattr(interrupts, "activities", {threading.main_thread().ident: stand})
    monkeypatch.setattr(interrupts, "_PAUSE_SECONDS", 0.001)
    there = signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell makes background jobs ignore it
    yield stand
    signal.signal(signal.SIGINT, there)


@pytest.fixture
def ended():
    return threading.Event()


class Heard:
    """A duty that only notes signals; it is called after the other one."""

    due = math.inf

    def __init__(self):
        self.signals = b""

    def attend(self, signals):
        self.signals += signals


@pytest.fixture
def watching(main, ended):
    thread = GuardThread()
    thread.duty, thread.heard = Interrupts(ended.set, patience=0.02), Heard()
    thread.add(thread.duty)
    thread.add(thread.heard)
    yield thread
    thread.end()
    thread.forget()


def press(watching, number=signal.SIGINT):
    os.write(watching._open()[1], bytes([number]))


def is_read(watching, number=signal.SIGINT):
    """Return when a signal has been handled."""
    deadline = time.monotonic() + 10
    while number not in watching.heard.signals or watching.duty.due != math.inf:
        assert time.monotonic() < deadline
        time.sleep(0.001)


def test_a_main_thread_that_stays_where_it_waits(main, watching, ended):
    main.wait = ("Bcast", None, 0)
    press(watching)
    assert ended.wait(10)


def handle_by_waiting(main, error, then):
    try:
        try:
            raise error
        except BaseException:
            main.wait = ("recv", None, 0)
            os.close(-1)  # raises OSError while it handles it
    except OSError:
        then()


def test_who_waits_while_handling_the_exception_is_left_alone(main, watching, ended):
    """The thread looks when it was raised already. But the second time, nothing is raised."""

    def press_twice():
        press(watching)
        is_read(watching)
        time.sleep(0.1)  # five times its patience
        assert not ended.is_set()
        press(watching)
        assert ended.wait(10)

    handle_by_waiting(main, KeyboardInterrupt(), press_twice)


@pytest.mark.parametrize("wait", [("Bcast", None, 0), None])
def test_a_second_time_while_handling_the_exception_of_the_first(main, watching, ended, wait):
    """The thread has looked before that was raised: the main thread was still waiting, or computed."""

    def press_again():
        deadline = time.monotonic() + 10
        while not watching.duty._handled:
            assert time.monotonic() < deadline
            time.sleep(0.001)
        watching.duty._patience = 0.02
        assert not ended.is_set()
        press(watching)
        assert ended.wait(10)

    main.wait = wait
    watching.duty._patience = 60
    press(watching)
    while not watching.heard.signals:
        time.sleep(0.001)
    handle_by_waiting(main, KeyboardInterrupt(), press_again)


def test_who_waits_while_handling_another_exception(main, watching, ended):
    def press_once():
        press(watching)
        assert ended.wait(10)

    handle_by_waiting(main, ValueError(), press_once)


@pytest.mark.parametrize("step", ["_wake", "start"])
def test_a_signal_handler_may_raise_during_a_fork(watching, monkeypatch, step):
    """It interrupts the end of the thread before the fork, or its start after that."""
    raised = []

    def interrupted(*args, **options):
        if not raised:
            raised.append(True)
            raise TimeoutError
        return function(*args, **options)

    function = watching._wake if step == "_wake" else threading.Thread.start
    monkeypatch.setattr(*((watching, step) if step == "_wake" else (threading.Thread, step)), interrupted)
    for part in (watching.pause, watching.resume):
        with contextlib.suppress(TimeoutError):
            forks._insist(part)
    assert raised
    assert [thread.name for thread in threading.enumerate()].count("chainermn-guard") == 1
    press(watching, signal.SIGCHLD)
    is_read(watching, signal.SIGCHLD)


class Long:
    """A duty that takes a while, for example in MPI."""

    due = math.inf

    def __init__(self):
        self.begun, self.ended = threading.Event(), threading.Event()

    def attend(self, signals):
        if signal.SIGCHLD in signals:
            self.begun.set()
            self.ended.wait(20)


def test_a_thread_that_works_is_waited_for_even_if_that_is_interrupted(watching):
    watching.add(duty := Long())
    press(watching, signal.SIGCHLD)
    assert duty.begun.wait(10)

    def handle(*_):
        threading.Timer(0.2, duty.ended.set).start()
        raise TimeoutError

    there = signal.signal(signal.SIGUSR1, handle)
    threading.Timer(0.1, signal.pthread_kill, (threading.main_thread().ident, signal.SIGUSR1)).start()
    try:
        with pytest.raises(TimeoutError):
            forks._insist(watching.pause)
    finally:
        signal.signal(signal.SIGUSR1, there)
    assert duty.ended.is_set()
    assert watching.runner is None


def test_the_end_of_the_thread_waits_for_a_fork(watching):
    """Of another thread, which would start it again."""
    ending = threading.Thread(target=watching.end)
    with forks.one_fork:
        watching.pause()
        ending.start()
        ending.join(0.1)
        watching.resume()
    ending.join(10)
    assert watching.runner is None
    assert "chainermn-guard" not in [thread.name for thread in threading.enumerate()]


def test_a_main_thread_that_does_something_else(watching, ended):
    press(watching)
    is_read(watching)
    assert not ended.is_set()


def test_a_main_thread_that_comes_out(monkeypatch, main, watching, ended):
    """It then waits again: at each check, it is in a different operation."""

    class Busy:
        @property
        def wait(self):
            return ("Bcast", None, 0), object()

    monkeypatch.setattr(interrupts, "activities", {threading.main_thread().ident: Busy()})
    press(watching)
    is_read(watching)
    assert not ended.is_set()


def test_other_signals(main, watching, ended):
    main.wait = ("Bcast", None, 0)
    press(watching, signal.SIGCHLD)
    is_read(watching, signal.SIGCHLD)
    assert not ended.is_set()


def test_a_handler_of_the_script_decides(main, watching, ended, monkeypatch):
    main.wait = ("Bcast", None, 0)
    there = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        press(watching)
        is_read(watching)
        assert not ended.is_set()
    finally:
        signal.signal(signal.SIGINT, there)


@pytest.fixture
def as_new(monkeypatch):
    """Undo the changes that watching has made."""
    monkeypatch.setattr(guard_thread, "thread", thread := GuardThread())
    there = signal.signal(signal.SIGINT, signal.default_int_handler)
    descriptor = signal.set_wakeup_fd(-1)
    yield
    thread.end()
    thread.forget()
    signal.set_wakeup_fd(descriptor)
    signal.signal(signal.SIGINT, there)


def test_a_signal_that_comes_is_known_at_once(as_new, main, ended, monkeypatch):
    monkeypatch.setattr(interrupts, "_PATIENCE_SECONDS", 0.02)
    watch_interrupts(ended.set)
    watch_interrupts(pytest.fail)  # nothing more
    guard_thread.thread.find(Interrupts)._patience = 0.02
    main.wait = ("Bcast", None, 0)
    with pytest.raises(KeyboardInterrupt):
        signal.raise_signal(signal.SIGINT)
    assert ended.wait(10)
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_asyncio_still_cancels(as_new, main):
    watch_interrupts(pytest.fail)

    async def interrupted():
        signal.raise_signal(signal.SIGINT)
        await asyncio.sleep(60)

    with pytest.raises(KeyboardInterrupt):
        asyncio.run(interrupted())


def test_scripts_that_are_left_alone(as_new):
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    watch_interrupts(pytest.fail)
    assert signal.getsignal(signal.SIGINT) is signal.SIG_IGN
    signal.signal(signal.SIGINT, signal.default_int_handler)
    thread = threading.Thread(target=watch_interrupts, args=(pytest.fail,))
    thread.start()
    thread.join()
    reading, writing = os.pipe()
    os.set_blocking(writing, False)
    signal.set_wakeup_fd(writing)
    watch_interrupts(pytest.fail)
    assert signal.set_wakeup_fd(-1) == writing
    os.close(reading)
    os.close(writing)
    assert guard_thread.thread.find(Interrupts) is None


@pytest.mark.filterwarnings("ignore:.*multi-threaded:DeprecationWarning")  # the thread of pytest's time-out
def test_a_child_is_no_rank(as_new):
    watch_interrupts(pytest.fail)
    child = os.fork()
    if child == 0:
        thread = guard_thread.thread
        is_as_before = thread.find(Interrupts) is None and thread.runner is None and signal.set_wakeup_fd(-1) == -1
        os._exit(0 if is_as_before else 1)
    assert os.waitpid(child, 0)[1] == 0
    assert guard_thread.thread.runner.is_alive()


def test_signals_that_come_while_the_thread_pauses_are_kept(main, watching, ended):
    main.wait = ("Bcast", None, 0)
    watching.pause()
    press(watching)
    assert not ended.wait(0.1)
    watching.resume()
    assert ended.wait(10)


def test_one_thread_for_all_and_none_after_its_end(main, watching):
    assert [thread.name for thread in threading.enumerate()].count("chainermn-guard") == 1
    watching.end()
    watching.resume()
    assert "chainermn-guard" not in [thread.name for thread in threading.enumerate()]


def test_a_duty_that_cannot_be_done_for_want_of_descriptors_is_not_added(monkeypatch):
    def none_left():
        raise OSError(errno.EMFILE, "Too many open files")

    thread = GuardThread()
    with monkeypatch.context() as patch, pytest.raises(OSError, match="Too many open files"):
        patch.setattr(os, "pipe", none_left)
        thread.add(Heard())
    assert thread.find(Heard) is None
    thread.add(Heard())
    assert thread.find(Heard) is not None
    thread.end()
    thread.forget()
