"""A rank that ends the job waits until its last output has been read."""

import contextlib
import os
import signal
import threading

import pytest

from mn_guard import abort


@pytest.fixture
def pipe():
    reading, writing = os.pipe()
    with open(reading, "rb", buffering=0) as reader, open(writing, "w") as writer:
        yield reader, writer


@pytest.fixture
def end_job(monkeypatch):
    """Return the statuses with which this process has ended the job, without ending it or ignoring signals."""
    mpi = pytest.importorskip("mpi4py.MPI", exc_type=(ImportError, RuntimeError))
    ended = []

    class World:
        Abort = staticmethod(ended.append)

    monkeypatch.setattr(mpi, "COMM_WORLD", World)
    monkeypatch.setattr(abort.os, "_exit", lambda status: None)
    monkeypatch.setattr(abort, "ignore_handlers", lambda: None)
    return ended


def test_the_job_ends_when_the_launcher_has_read_the_last_words(pipe, end_job, monkeypatch):
    reader, writer = pipe
    paused, read = threading.Event(), []
    monkeypatch.setattr(abort.time, "sleep", lambda _: paused.set())
    monkeypatch.setattr(abort.sys, "stderr", writer)
    monkeypatch.setattr(abort.sys, "stdout", None)
    slow = threading.Thread(target=lambda: paused.wait() and (read.append(reader.read(100)), end_job.append("read")))
    slow.start()
    writer.write("why")
    abort.abort_when_read()
    slow.join()
    assert read == [b"why"]
    assert sorted(map(str, end_job)) == ["1", "read"]


@pytest.mark.parametrize("stream", ["none", "closed", "full", "gone"])
def test_it_says_what_it_can(stream, end_job, monkeypatch, tmp_path):
    reading, writing = os.pipe()
    os.close(reading)
    streams = {"none": None, "closed": (tmp_path / "closed").open("w"), "full": open("/dev/full", "w")}
    streams |= {"gone": open(writing, "w")}
    streams["closed"].close()
    monkeypatch.setattr(abort.sys, "stderr", streams[stream])
    monkeypatch.setattr(abort, "_PATIENCE_SECONDS", 0.05)
    abort.say("why")
    abort.abort_when_read(7)
    assert end_job == [7]
    for each in streams.values():
        with contextlib.suppress(AttributeError, OSError):
            each.close()


def test_it_ends_although_nobody_reads(pipe, end_job, monkeypatch):
    _, writer = pipe
    monkeypatch.setattr(abort, "_PATIENCE_SECONDS", 0.05)
    monkeypatch.setattr(abort.sys, "stderr", writer)
    writer.write("why")
    abort.abort_when_read()
    assert end_job == [1]


def test_handlers_that_raise_are_ignored(monkeypatch):
    """Also one that raises meanwhile."""

    def fail(number=None, frame=None):
        raise TimeoutError

    valid = signal.valid_signals()
    before = {number: signal.getsignal(number) for number in valid}
    answers = iter([fail, lambda: valid])
    monkeypatch.setattr(abort.signal, "valid_signals", lambda: next(answers)())
    try:
        signal.signal(signal.SIGUSR1, fail)
        abort.ignore_handlers()
        for number in (signal.SIGUSR1, signal.SIGINT):
            signal.raise_signal(number)
        assert next(answers, None) is None
    finally:
        for number, handler in before.items():
            if signal.getsignal(number) is not handler:
                signal.signal(number, handler)


def test_in_another_thread_no_handler_changes():
    before = signal.getsignal(signal.SIGINT)
    thread = threading.Thread(target=abort.ignore_handlers)
    thread.start()
    thread.join()
    assert signal.getsignal(signal.SIGINT) is before
