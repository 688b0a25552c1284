"""The stall monitor: a rank that has waited too long makes every rank say what it is waiting for.

A mistake in a program of several ranks shows as silence: all wait, for each other or for what never comes. A thread of
each process looks after the operations that are under way. Once one has taken longer than ``CHAINERMN_STALL_SECONDS``
(default 60; 0 switches the monitor off) the rank writes to stderr what it waits for and where, and asks the other ranks
of that communicator to do the same. With ``CHAINERMN_STALL_ABORT=1`` the job then ends.

While nothing stalls, an operation costs one object and two entries in a dictionary, and the thread wakes up to look for
questions at most ten times within the limit. It talks on the communicators' private duplicates, under a tag of its own,
which needs MPI_THREAD_MULTIPLE; without that each rank speaks for itself only.
"""

from __future__ import annotations

import atexit
import functools
import inspect
import os
import sys
import threading
import time
import traceback
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, ParamSpec, TypeVar

import numpy as np
from mpi4py import MPI

from mn_comm.timeline import record

__all__ = ["Monitor", "explain_stalls", "join", "leave", "waiting_for", "watched"]

_QUESTION_TAG = 32767 - 1  # on the private duplicates; collectives use 0
_SLOWEST_POLL = 1.0

_P = ParamSpec("_P")
_R = TypeVar("_R")

_explanations: list[Callable[[], Sequence[str]]] = []
_thread = threading.local()


def explain_stalls(explanation: Callable[[], Sequence[str]]) -> None:
    """Have lines added to what this rank says when something stalls.

    Args:
        explanation: Returns the lines; called in the monitor's thread, so it must not communicate.
    """
    _explanations.append(explanation)


@contextmanager
def waiting_for(what: Callable[[], str]) -> Iterator[None]:
    """Name what the operations in this block are for, in case one stalls.

    Args:
        what: Returns a few words; called only if it is needed.
    """
    outer = getattr(_thread, "purpose", None)
    _thread.purpose = what
    try:
        yield
    finally:
        _thread.purpose = outer


class Wait:
    """One operation that is under way.

    Args:
        method: The communicator's method.
        arguments: What it was called with, the communicator first.
        keywords: What it was called with by name.
    """

    __slots__ = ("arguments", "began", "keywords", "method", "purpose", "reported", "thread")

    def __init__(self, method: Callable[..., Any], arguments: tuple[Any, ...], keywords: dict[str, Any]) -> None:
        self.method = method
        self.arguments = arguments
        self.keywords = keywords
        self.began = time.monotonic()
        self.thread = threading.get_ident()
        self.purpose: Callable[[], str] | None = getattr(_thread, "purpose", None)
        self.reported = 0.0

    @property
    def communicator(self) -> Any:
        """The communicator that waits."""
        return self.arguments[0]

    def named(self) -> dict[str, Any]:
        """Return the arguments by name, those left to their defaults included."""
        bound = inspect.signature(self.method).bind(*self.arguments, **self.keywords)
        bound.apply_defaults()
        return dict(list(bound.arguments.items())[1:])

    def __str__(self) -> str:
        arguments = ", ".join(f"{name}={_describe(value)}" for name, value in self.named().items())
        purpose = f" for {self.purpose()}" if self.purpose else ""
        return f"{self.method.__name__}({arguments}){purpose}"


class Monitor:
    """Looks after the operations of one process.

    Args:
        limit: Seconds after which an operation counts as stalled, above 0.
        abort: Whether the job then ends.
        write: Takes what is to be said; called in the monitor's thread.
        end: Ends the job.
    """

    def __init__(
        self,
        limit: float,
        abort: bool,
        write: Callable[[str], object] = lambda text: (sys.stderr.write(text), sys.stderr.flush()),
        end: Callable[[], object] = lambda: MPI.COMM_WORLD.Abort(1),
    ) -> None:
        self.limit = limit
        self.abort = abort
        self.interval = min(limit / 10, _SLOWEST_POLL)
        self.waits: dict[int, Wait] = {}
        self.finished: deque[str] = deque(maxlen=5)
        self.total = 0
        self._write = write
        self._end = end
        self._communicators: list[MPI.Intracomm] = []
        self._can_ask = MPI.Query_thread() >= MPI.THREAD_MULTIPLE
        self._questions: list[MPI.Request] = []
        self._said: object = None
        self._lock = threading.Lock()
        self._stop = threading.Event()
        self._runner: threading.Thread | None = None

    def start(self) -> None:
        """Start the thread."""
        self._stop.clear()
        self._runner = threading.Thread(target=self._run, name="chainermn-stall-monitor", daemon=True)
        self._runner.start()

    def stop(self) -> None:
        """Stop the thread, and wait until it has ended."""
        self._stop.set()
        if self._runner is not None:
            self._runner.join()
            self._runner = None

    def join(self, mpi_comm: MPI.Intracomm) -> None:
        """Answer, from now on, what is asked on a private communicator."""
        with self._lock:
            self._communicators.append(mpi_comm)

    def leave(self, mpi_comm: MPI.Intracomm) -> None:
        """Stop answering on a communicator, which is about to be freed."""
        with self._lock:
            self._communicators = [other for other in self._communicators if other != mpi_comm]

    def poll(self) -> None:
        """Look once for what has stalled, and for what others ask."""
        with self._lock:
            now = time.monotonic()
            for wait in list(self.waits.values()):
                if not wait.reported and now - wait.began > self.limit:
                    wait.reported = now
                    self._say(f"has waited for more than {self.limit:g} s")
                    self._ask(wait.communicator)
            self._answer()
            if self.abort and any(self._is_hopeless(wait, now) for wait in list(self.waits.values())):
                self._write(f"[chainermn] rank {MPI.COMM_WORLD.rank} ends the job: CHAINERMN_STALL_ABORT is set\n")
                self._end()

    def _run(self) -> None:
        while not self._stop.wait(self.interval):
            self.poll()

    def _is_hopeless(self, wait: Wait, now: float) -> bool:
        """Whether an operation still waits, long enough after it was reported for all ranks to have spoken."""
        return wait.reported > 0 and now - wait.reported > 3 * self.interval + 0.5

    def _ask(self, communicator: Any) -> None:
        private = communicator._private  # noqa: SLF001 - the same package
        if self._can_ask and any(private == other for other in self._communicators):
            others = [rank for rank in range(private.size) if rank != private.rank]
            self._questions += [private.Isend(np.zeros(1, np.uint8), rank, _QUESTION_TAG) for rank in others]

    def _answer(self) -> None:
        if not self._can_ask:
            return
        for mpi_comm in self._communicators:
            status = MPI.Status()
            while mpi_comm.Iprobe(MPI.ANY_SOURCE, _QUESTION_TAG, status):
                mpi_comm.Recv(np.zeros(1, np.uint8), status.source, _QUESTION_TAG)
                asking = mpi_comm.group.Translate_ranks([status.source], MPI.COMM_WORLD.group)[0]
                self._say(f"is asked by rank {asking}, which has waited for more than {self.limit:g} s")

    def _say(self, occasion: str) -> None:
        """Write what this rank is doing, unless it has written just that already."""
        waits = list(self.waits.values())
        doing = ([id(wait) for wait in waits], self.total)
        if doing == self._said:
            return
        self._said = doing
        world = MPI.COMM_WORLD
        lines = [f"rank {world.rank} of {world.size} on {MPI.Get_processor_name()} {occasion}"]
        for wait in waits:
            lines += _report(wait)
        if not waits:
            lines += ["  it is not communicating; it is at", *_stack(threading.main_thread().ident)]
        lines.append(f"  operations it has finished last: {', '.join(self.finished) or 'none'}")
        for explanation in _explanations:
            lines += [f"  {line}" for line in explanation()]
        self._write("".join(f"[chainermn] {line}\n" for line in lines))


def _report(wait: Wait) -> list[str]:
    communicator = wait.communicator
    lines = [
        f"  for {time.monotonic() - wait.began:.1f} s it has been waiting in {wait}",
        f"  as rank {communicator.rank} of a communicator of {communicator.size}; called at",
        *_stack(wait.thread),
    ]
    if wait.method.__name__ == "recv" and MPI.Query_thread() >= MPI.THREAD_MULTIPLE:
        lines += _other_messages(communicator.mpi_comm, wait.named()["source"])
    return lines


def _other_messages(mpi_comm: MPI.Intracomm, source: int) -> list[str]:
    """Say what has arrived under another tag than the one that a ``recv`` waits for."""
    status = MPI.Status()
    if not mpi_comm.Iprobe(source, MPI.ANY_TAG, status):
        return []
    return [f"  a message from rank {status.source} has arrived, but with tag {status.tag}, which nobody receives"]


def _stack(thread: int | None) -> list[str]:
    frame = sys._current_frames().get(thread or 0)  # noqa: SLF001 - the documented way to another thread's stack
    entries = [entry for entry in traceback.extract_stack(frame) if entry.filename != __file__]
    return [f"    {entry.filename}:{entry.lineno} in {entry.name}: {entry.line}" for entry in entries]


def _describe(value: Any) -> str:
    if isinstance(value, np.ndarray):
        return f"<{value.dtype} array of shape {value.shape}>"
    if isinstance(value, (tuple, list)):
        return f"({', '.join(map(_describe, value[:4]))}{', ...' if len(value) > 4 else ''})"
    if value is None or isinstance(value, (int, np.integer)):
        return repr(value)
    return f"<{type(value).__name__}>"


_monitor: Monitor | None = None


def watched(method: Callable[_P, _R]) -> Callable[_P, _R]:
    """Let the monitor look after a method of a communicator."""

    @functools.wraps(method)
    def call(*args: _P.args, **kwargs: _P.kwargs) -> _R:
        monitor = _monitor
        run = method if record.active is None else record.recorded(method.__name__, method)
        if monitor is None:
            return run(*args, **kwargs)
        wait = Wait(method, args, kwargs)
        monitor.waits[id(wait)] = wait
        try:
            return run(*args, **kwargs)
        finally:
            del monitor.waits[id(wait)]
            monitor.finished.append(method.__name__)
            monitor.total += 1

    return call


def join(mpi_comm: MPI.Intracomm) -> None:
    """Watch over a new communicator, and start the monitor with the first one.

    Args:
        mpi_comm: Its private duplicate.

    Raises:
        ValueError: ``CHAINERMN_STALL_SECONDS`` is not a number of seconds.
    """
    global _monitor
    limit = _limit()
    if not limit:
        return
    if _monitor is None:
        _monitor = Monitor(limit, os.environ.get("CHAINERMN_STALL_ABORT", "") not in ("", "0"))
        _monitor.start()
        # The thread must not be inside MPI when that is finalised; that happens after this.
        atexit.register(_monitor.stop)
        # Since 3.12 Python warns of a fork while threads run, and rightly: the child would not have them.
        os.register_at_fork(before=_monitor.stop, after_in_parent=_monitor.start, after_in_child=_forget)
    _monitor.join(mpi_comm)


def leave(mpi_comm: MPI.Intracomm) -> None:
    """Stop watching over a communicator, before it is freed."""
    if _monitor is not None:
        _monitor.leave(mpi_comm)


def _forget() -> None:
    global _monitor
    _monitor = None


def _limit() -> float:
    text = os.environ.get("CHAINERMN_STALL_SECONDS", "60")
    try:
        limit = float(text)
    except ValueError:
        limit = -1.0
    if not 0 <= limit < float("inf"):
        raise ValueError(f"expected a number of seconds, 0 or more, in CHAINERMN_STALL_SECONDS, got {text!r}")
    return limit
