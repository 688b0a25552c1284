import contextlib
import dataclasses
import functools
import os
import sys
import threading
import time

import numpy as np
import pytest

from mn_comm import create_communicator
from mn_comm.building_blocks import operation, waiting_for
from mn_comm.ranks import watch
from mn_guard import stall, stall_report
from mn_guard.guard_thread import GuardThread
from mn_guard.stall import Monitor


class Clock:
    """A clock that stands still until it is told to go on: a busy machine does not change what these tests see."""

    def __init__(self):
        self.now = 10**12

    def monotonic_ns(self):
        return self.now

    def monotonic(self):
        return self.now / 1e9

    def go_on(self, seconds):
        self.now += round(seconds * 1e9)


class Fake:
    """A communicator whose operations take as long as the test requires."""

    def __init__(self):
        self.entered, self.release = threading.Event(), threading.Event()

    @operation
    def bcast(self, data, root=0):
        watch.activity().wait_for(self._wait, "Bcast", None)
        return data

    def _wait(self):
        self.entered.set() or self.release.wait(10)  # in one line, which the monitor shows


@pytest.fixture
def clock(monkeypatch):
    clock = Clock()
    for module in (watch, stall, stall_report):
        monkeypatch.setattr(module, "time", clock)
    return clock


@pytest.fixture
def monitor(monkeypatch, clock):
    said, ended = [], []
    monkeypatch.setattr(watch, "activities", activities := {})
    monkeypatch.setattr(stall, "activities", activities)
    found = Monitor(60, abort=True, write=said.append, end=lambda _: ended.append(True))
    found.said, found.ended = said, ended
    return found


@contextlib.contextmanager
def waiting(call=lambda comm: comm.bcast(None)):
    """Within the block, a thread waits in an operation; afterwards, it has come to an end."""
    comm = Fake()
    thread = threading.Thread(target=call, args=[comm])
    thread.start()
    comm.entered.wait()
    try:
        yield
    finally:
        comm.release.set()
        thread.join()


def test_an_operation_that_stalls_is_described_once(monitor, clock):
    with waiting(lambda comm: comm.bcast(np.zeros((2, 3), "f4"), root=0)):
        clock.go_on(59)
        monitor.poll()
        assert monitor.said == []
        clock.go_on(2)
        monitor.poll()
        monitor.poll()
        (text,) = monitor.said
        assert "has waited for 61.0 s in bcast(data=<float32 array of shape (2, 3)>, root=0), at " in text
        assert "test_stall.py" in text
        assert "self.release.wait(10)" in text  # the innermost line that does not belong to these packages
        assert text.count("\n") == 1
    (activity,) = watch.activities.values()
    assert (activity.wait, activity.calls, list(activity.finished)) == (None, [], ["bcast"])


def test_stacks_are_written_if_asked_for(monitor, clock):
    monitor._stacks = True
    with waiting():
        clock.go_on(61)
        monitor.poll()
    assert "in wait_for: " in monitor.said[0]


def test_the_job_is_ended_once_all_had_time_to_speak(monitor, clock):
    with waiting():
        clock.go_on(61)
        monitor.poll()
        clock.go_on(3)
        monitor.poll()
        assert monitor.ended == []
        clock.go_on(1)
        monitor.poll()
        assert monitor.ended == [True]
        assert "ends the job" in monitor.said[-1]


def test_an_operation_that_comes_to_an_end_ends_nothing(monitor, clock):
    with waiting():
        clock.go_on(61)
        monitor.poll()
    clock.go_on(4)
    monitor.poll()
    assert monitor.ended == []


def test_a_rank_that_has_just_ended_may_have_sent_what_this_one_waits_for(monitor, clock, monkeypatch):
    monkeypatch.setattr(stall, "_needed", lambda activity: {1})
    monitor.abort = False
    with waiting():
        clock.go_on(61)
        monitor.poll()
        clock.go_on(4)
        monitor.probe.finished[1] = clock.monotonic()
        monitor.poll()
        assert monitor.ended == []
        clock.go_on(4)
        monitor.poll()
        assert monitor.ended == [True]


def test_purposes_and_explanations_are_added(monitor, clock, monkeypatch):
    monkeypatch.setattr(stall, "explanations", explanations := [])
    explanations.append(lambda: 1 / 0)
    explanations.append(lambda: ["three of them are open"])

    def call(comm):
        with waiting_for(lambda: "the gradient"), waiting_for(lambda: "the gradient of x"):
            comm.bcast(None)

    with waiting(call):
        clock.go_on(61)
        monitor.poll()
    assert "bcast(data=None, root=0) for the gradient of x, at" in monitor.said[0]
    assert "  a function passed to explain_stalls raised ZeroDivisionError: division by zero\n" in monitor.said[0]
    assert "  three of them are open\n" in monitor.said[0]


def test_an_exception_passes_through(monitor):
    class Failing(Fake):
        @operation
        def send(self, data, dest):
            raise ValueError("no such rank")

    with pytest.raises(ValueError, match="no such rank"):
        Failing().send(1, dest=3)
    assert all(activity.calls == [] for activity in watch.activities.values())


@pytest.mark.parametrize("text", ["-1", "soon", "inf", "nan", ""])
def test_a_limit_that_is_no_number_of_seconds(monkeypatch, text):
    from mpi4py import MPI

    monkeypatch.setenv("CHAINERMN_STALL_SECONDS", text)
    own = MPI.COMM_SELF.Dup()
    with pytest.raises(ValueError, match="expected a number of seconds, 0 or more, in CHAINERMN_STALL_SECONDS"):
        create_communicator("naive", own)
    own.Free()


def test_watching_costs_next_to_nothing(monitor):
    class Quick(Fake):
        def plain(self, data):
            return data

        @operation
        def watched(self, data):
            return data

    def seconds(call, n=20000):
        begin = time.thread_time()
        for _ in range(n):
            call(None)
        return (time.thread_time() - begin) / n

    comm = Quick()
    cost = min(seconds(comm.watched) for _ in range(3)) - min(seconds(comm.plain) for _ in range(3))
    assert cost < 20e-6  # an operation takes some 10 microseconds at the very least; seen: 1


@pytest.mark.skipif(not hasattr(os, "fork") or sys.platform == "darwin", reason="needs fork")
def test_the_thread_pauses_while_the_process_forks():
    before = set(threading.enumerate())  # there may be another one
    thread = GuardThread()
    thread.add(Monitor(60, abort=False))
    for _ in range(2):
        (runner,) = set(threading.enumerate()) - before
        assert runner.name == "chainermn-guard"
        thread.pause()
        assert not runner.is_alive()
        thread.resume()
    thread.end()
    thread.forget()


def test_the_monitor_goes_on_after_an_exception(monkeypatch):
    polls = []
    done = threading.Event()

    def poll(self):
        polls.append(self)
        if len(polls) > 2:
            done.set()
        raise ValueError("an explanation that cannot be had")

    monkeypatch.setattr(Monitor, "poll", poll)
    thread = GuardThread()
    thread.add(Monitor(0.05, abort=False))
    assert done.wait(10)
    thread.end()
    thread.forget()


class Group:
    def Translate_ranks(self, ranks, group):
        return [4, 6, 8]


class Peers:
    group = Group()


def send_obj(comm, obj, dest, tag=0):
    """Stand in for the method."""


def recv(comm, source, tag=0):
    """Stand in for the method."""


@pytest.mark.parametrize(
    ("function", "arguments", "keywords", "partner"),
    [
        (send_obj, ("text",), {"dest": 2}, {8}),
        (send_obj, ("text", 0, 5), {}, {4}),
        (recv, (1,), {}, {6}),
        (recv, (None,), {}, set()),
    ],
)
def test_whom_a_message_goes_to_or_comes_from(function, arguments, keywords, partner):
    from mpi4py import MPI

    comm = type("Comm", (), {"ranks": Peers()})()
    arguments = tuple(MPI.ANY_SOURCE if value is None else value for value in arguments)
    assert stall._partner(watch.Call(function, (comm, *arguments), keywords)) == partner


def test_a_function_that_python_generates_is_not_the_place():
    here = functools.partial(stall_report._place, threading.get_ident())
    made = dataclasses.make_dataclass("Made", [("place", str, dataclasses.field(default_factory=here))])
    assert made().place.startswith(f"at {__file__}:")


class EndsSoon(watch.Activity):
    """The activity of a thread whose wait ends as soon as someone has looked at it."""

    @property
    def wait(self):
        self.looks += 1
        return ("Recv", None, 0) if self.looks == 1 else None

    @wait.setter
    def wait(self, _):
        self.looks = 0


def test_a_wait_may_end_while_it_is_looked_at(monitor):
    (line,) = stall_report.describe([EndsSoon()], "", [], stacks=False)
    assert " in Recv, at " in line
    assert stall._needed(EndsSoon()) == set()
    monitor._ask_neighbor(EndsSoon())


def test_a_wait_that_has_ended_is_not_given_up(monitor):
    """Another one may have begun: it is not so old."""
    activity, now = watch.Activity(), 10**12
    monitor._reported[now] = -60.0
    activity.wait = "Recv", None, now
    assert monitor._why_hopeless(activity, now)
    activity.wait = "Recv", None, now + 1
    assert monitor._why_hopeless(activity, now) == ""
    activity.wait = None
    assert monitor._why_hopeless(activity, now) == ""
