"""Signal handlers of the program are deferred, in the main thread."""

import signal
import threading

import pytest

from mn_guard.handlers import deferred


@pytest.fixture
def handled():
    """Return the names of the signals that were handled; the handler of SIGUSR2 raises."""
    handled = []

    def note(number, frame):
        handled.append(signal.Signals(number).name)

    def fail(number, frame):
        note(number, frame)
        raise TimeoutError

    before = {number: signal.signal(number, note) for number in (signal.SIGUSR1, signal.SIGALRM)}
    before[signal.SIGUSR2] = signal.signal(signal.SIGUSR2, fail)
    yield handled
    for number, handler in before.items():
        signal.signal(number, handler)


def test_handlers_run_afterwards_once_and_in_their_order(handled):
    before = signal.getsignal(signal.SIGUSR1)
    with deferred():
        for number in (signal.SIGALRM, signal.SIGUSR1, signal.SIGALRM):
            signal.raise_signal(number)
        assert handled == []
    assert handled == ["SIGALRM", "SIGUSR1"]
    assert signal.getsignal(signal.SIGUSR1) is before
    signal.raise_signal(signal.SIGUSR1)
    assert handled[2:] == ["SIGUSR1"]


def test_what_a_handler_raises_is_raised_afterwards(handled):
    done = []
    with pytest.raises(TimeoutError) as caught, deferred():
        signal.raise_signal(signal.SIGUSR2)
        done.append(True)
        raise KeyError  # of the block itself
    assert done
    assert isinstance(caught.value.__context__, KeyError)
    with pytest.raises(TimeoutError):
        signal.raise_signal(signal.SIGUSR2)


def test_all_handlers_are_called_and_restored_although_one_raises(handled):
    before = {number: signal.getsignal(number) for number in (signal.SIGUSR1, signal.SIGUSR2)}
    with pytest.raises(TimeoutError), deferred():
        for number in (signal.SIGUSR2, signal.SIGUSR1):
            signal.raise_signal(number)
    assert handled == ["SIGUSR2", "SIGUSR1"]
    assert {number: signal.getsignal(number) for number in before} == before


def test_one_within_another(handled):
    with deferred():
        with deferred():
            signal.raise_signal(signal.SIGUSR1)
        assert handled == []
    assert handled == ["SIGUSR1"]


def test_some_handlers_may_run(handled):
    with deferred(signal.getsignal(signal.SIGUSR1)):
        for number in (signal.SIGUSR1, signal.SIGALRM):  # both have the same one
            signal.raise_signal(number)
        assert handled == ["SIGUSR1", "SIGALRM"]


def test_a_signal_without_a_handler_stays_as_it_is():
    before = signal.getsignal(signal.SIGTERM)
    with deferred():
        assert signal.getsignal(signal.SIGTERM) is before


def test_threads_are_not_interrupted_anyway(handled):
    def raise_in_a_thread():
        with deferred():
            seen.append(signal.getsignal(signal.SIGUSR1))

    seen = []
    thread = threading.Thread(target=raise_in_a_thread)
    thread.start()
    thread.join()
    assert seen == [signal.getsignal(signal.SIGUSR1)]
