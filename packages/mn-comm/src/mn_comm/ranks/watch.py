"""The activities of all threads of this process, for the stall monitor, which reports a rank that waits too long.

All waiting for other ranks goes through :meth:`Activity.wait_for`; :func:`operation` names what the script called.
"""

from __future__ import annotations

import functools
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, NamedTuple, ParamSpec, TypeAlias, TypeVar

from mn_comm.ranks.spans import span

if TYPE_CHECKING:
    from mpi4py import MPI

_P = ParamSpec("_P")
_R = TypeVar("_R")
_NONE: dict[str, Any] = {}


class Call(NamedTuple):
    """An operation that the script called."""

    function: Callable[..., Any]
    arguments: tuple[Any, ...]
    keywords: dict[str, Any]


Wait: TypeAlias = "tuple[str, MPI.Intracomm | None, int]"
"""The MPI call in which a thread waits, the ranks it waits for, and the start in nanoseconds of the monotonic clock."""


class Activity:
    """What one thread is doing."""

    __slots__ = ("calls", "count", "finished", "polls", "purpose", "thread", "wait", "waited")

    def __init__(self) -> None:
        self.thread = threading.get_ident()  # the thread's number
        self.calls: list[Call] = []  # the operations that it is executing, the outermost first
        self.finished: deque[str] = deque(maxlen=5)  # the names of the last operations that it has finished
        self.count = 0  # how many it has finished
        self.purpose: Callable[[], str] | None = None  # describes what it waits for
        self.wait: Wait | None = None
        self.polls = False  # whether it waits with pauses, and so leaves its core to a computation
        self.waited = 0  # how many nanoseconds it has waited for other ranks

    def wait_for(
        self, call: Callable[..., _R], what: str, ranks: MPI.Intracomm | None, args: Any = (), kwargs: Any = _NONE
    ) -> _R:
        """Call a function that waits for other ranks in an MPI operation, ``what``, and return its result."""
        began = time.monotonic_ns()
        self.wait = (what, ranks, began)
        try:
            return call(*args, **kwargs)
        finally:
            self.wait = None
            self.waited += time.monotonic_ns() - began

    def wait_for_thread(self, call: Callable[[], object]) -> None:
        """Call a function that waits for another thread of this process, which waits for other ranks."""
        began = time.monotonic_ns()
        call()
        self.waited += time.monotonic_ns() - began


_local = threading.local()
activities: dict[int, Activity] = {}
"""The activity of every thread that ever waited, by the thread's number; and of devices, by numbers of their own."""
polled: list[Callable[[], Callable[[], None] | None]] = []
"""Weak references to the functions that update the activities of devices."""
explanations: list[Callable[[], Sequence[str]]] = []
"""Functions that return lines for the message about a rank that waits too long."""


def explain_stalls(explanation: Callable[[], Sequence[str]]) -> None:
    """Add lines to the message of this rank when something stalls, if something watches: the package mn-guard does.

    ``explanation`` returns the lines. It is called in the monitor's thread, so it must not communicate.
    """
    explanations.append(explanation)


def activity() -> Activity:
    """Return the activity of the calling thread."""
    try:
        return _local.activity  # type: ignore[no-any-return]
    except AttributeError:
        made = _local.activity = activities[threading.get_ident()] = Activity()
        return made


def operation(function: Callable[_P, _R]) -> Callable[_P, _R]:
    """Decorate a function, so that the reports of stalled ranks name it, and the timeline has a span for it."""

    @functools.wraps(function)
    def call(*args: _P.args, **kwargs: _P.kwargs) -> _R:
        doing = activity()
        doing.calls.append(Call(function, args, kwargs))
        try:
            with span(function.__name__):
                return function(*args, **kwargs)
        finally:
            doing.calls.pop()
            if not doing.calls:
                doing.finished.append(function.__name__)
                doing.count += 1

    return call


@contextmanager
def waiting_for(what: Callable[[], str]) -> Iterator[None]:
    """Describe the purpose of the operations in this block, in case one stalls; ``what`` is called only then."""
    doing = activity()
    outer, doing.purpose = doing.purpose, what
    try:
        yield
    finally:
        doing.purpose = outer
