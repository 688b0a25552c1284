"""SIGINT while Python's handler cannot run, by hand: nothing here waits for MPI."""

import os
import signal
import threading

import pytest

from mn_comm import interrupts, watch
from mn_comm.interrupts import Interrupts, watch_interrupts


@pytest.fixture
def clock(monkeypatch):
    """Return a list whose last element is the time."""
    times = [100.0]
    monkeypatch.setattr(interrupts.time, "monotonic", lambda: times[-1])
    return times


@pytest.fixture
def pressed():
    """Return the two ends of a pipe that signals are written to."""
    reading, writing = os.pipe()
    os.set_blocking(reading, False)
    yield reading, lambda number=signal.SIGINT: os.write(writing, bytes([number]))
    os.close(reading)
    os.close(writing)


@pytest.fixture
def watched(clock, pressed):
    """Return an object that watches, with its handler installed, and whether it has ended the job."""
    ended = []
    found = Interrupts(pressed[0], 1.5, lambda: ended.append(True))
    there = signal.signal(signal.SIGINT, found.handle)
    yield found, ended
    signal.signal(signal.SIGINT, there)


def polls(found, clock, count):
    for _ in range(count):
        clock.append(clock[-1] + 1)
        found.poll()


def test_nothing_comes(watched, clock):
    found, ended = watched
    polls(found, clock, 10)
    assert not ended


def test_a_main_thread_that_does_not_notice(watched, clock, pressed):
    found, ended = watched
    polls(found, clock, 3)
    pressed[1]()
    polls(found, clock, 2)
    assert not ended
    polls(found, clock, 1)
    assert ended


def test_a_main_thread_that_notices(watched, clock, pressed):
    found, ended = watched
    polls(found, clock, 3)
    clock.append(clock[-1] + 0.5)
    pressed[1]()
    with pytest.raises(KeyboardInterrupt):
        signal.raise_signal(signal.SIGINT)
    polls(found, clock, 5)
    assert not ended
    pressed[1]()  # a second time, and now it does not
    polls(found, clock, 3)
    assert ended


def test_a_main_thread_that_notices_late(watched, clock, pressed):
    found, ended = watched
    pressed[1]()
    polls(found, clock, 2)
    with pytest.raises(KeyboardInterrupt):
        signal.raise_signal(signal.SIGINT)
    polls(found, clock, 5)
    assert not ended


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGCHLD])
def test_other_signals(watched, clock, pressed, number):
    found, ended = watched
    pressed[1](number)
    polls(found, clock, 5)
    assert not ended


def test_a_handler_of_the_script_decides(watched, clock, pressed):
    found, ended = watched
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    pressed[1]()
    polls(found, clock, 5)
    assert not ended


@pytest.fixture
def as_new(monkeypatch):
    """Undo what watching has installed."""
    monkeypatch.setattr(watch, "polled", polled := [])
    monkeypatch.setattr(interrupts, "polled", polled)
    there = signal.signal(signal.SIGINT, signal.default_int_handler)
    descriptor = signal.set_wakeup_fd(-1)
    yield polled
    signal.set_wakeup_fd(descriptor)
    signal.signal(signal.SIGINT, there)


def test_a_signal_that_comes_is_known_at_once(as_new, clock):
    ended = []
    watch_interrupts(lambda: ended.append(True))
    watch_interrupts(lambda: ended.append(True))  # nothing more
    (look,) = as_new
    with pytest.raises(KeyboardInterrupt):
        signal.raise_signal(signal.SIGINT)
    assert look().__self__._read() == bytes([signal.SIGINT])


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
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    assert as_new == []


@pytest.mark.filterwarnings("ignore:.*multi-threaded:DeprecationWarning")  # the thread is that of pytest's time-out
def test_a_child_is_no_rank(as_new):
    watch_interrupts(pytest.fail)
    child = os.fork()
    if child == 0:
        is_as_before = signal.getsignal(signal.SIGINT) is signal.default_int_handler
        os._exit(0 if is_as_before and signal.set_wakeup_fd(-1) == -1 else 1)
    assert os.waitpid(child, 0)[1] == 0
