"""The record that one rank keeps: spans, in memory."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from types import TracebackType
from typing import Any, TypeVar, cast

__all__ = ["Event", "Recorder", "is_recording", "recorded", "span"]

_F = TypeVar("_F", bound=Callable[..., Any])
Event = tuple[str, int, int, int, "dict[str, Any] | None"]
"""Name, begin and end in nanoseconds of this process's clock, the thread, and what else there is to say."""

_MOST_EVENTS = 200_000

active: Recorder | None = None
"""This process's record; ``None`` without ``CHAINERMN_TIMELINE``."""


class Recorder:
    """The spans of one process.

    Args:
        most: How many to keep.

    Attributes:
        events: The spans, in the order in which they ended.
        threads: The names of the threads that they are of.
        dropped: How many there were beyond those that are kept.
        full_at: When the first of them ended, in nanoseconds.
        started: This process's clock and the wall clock at the same moment, in nanoseconds.
        label: What the communication that is being launched is of.
    """

    __slots__ = ("dropped", "events", "full_at", "label", "most", "started", "threads")

    def __init__(self, most: int = _MOST_EVENTS) -> None:
        self.events: list[Event] = []
        self.threads: dict[int, str] = {}
        self.dropped = 0
        self.full_at = 0
        self.most = most
        self.started = (time.perf_counter_ns(), time.time_ns())
        self.label: dict[str, Any] = {}

    def add(self, name: str, begin: int, end: int, details: dict[str, Any] | None) -> None:
        """Keep a span of the calling thread."""
        if len(self.events) >= self.most:
            self.full_at = self.full_at or end
            self.dropped += 1
            return
        thread = threading.get_ident()
        if thread not in self.threads:
            self.threads[thread] = threading.current_thread().name
        self.events.append((name, begin, end, thread, details))


class _Span:
    __slots__ = ("_begin", "_details", "_name", "_recorder")

    def __init__(self, recorder: Recorder, name: str, details: dict[str, Any] | None) -> None:
        self._recorder = recorder
        self._name = name
        self._details = details

    def __enter__(self) -> None:
        self._begin = time.perf_counter_ns()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._recorder.add(self._name, self._begin, time.perf_counter_ns(), self._details)


class _Nothing:
    __slots__ = ()

    def __enter__(self) -> None:
        pass

    def __exit__(self, *error: object) -> None:
        pass


_NOTHING = _Nothing()


def span(name: str, details: dict[str, Any] | None = None) -> AbstractContextManager[None]:
    """Return a context whose duration is recorded in the timeline, if one is kept; not collective.

    ::

        with mn_comm.span("augment", {"images": len(batch)}):
            ...

    Args:
        name: What it is called there.
        details: What is shown of it when it is selected: anything that ``json`` can write.
    """
    return _NOTHING if active is None else _Span(active, name, details)


def recorded(name: str, function: _F, details: dict[str, Any] | None = None) -> _F:
    """Return a function that does the same as another and is a span; the other itself if no timeline is kept."""
    if active is None:
        return function

    def run(*args: Any, **kwargs: Any) -> Any:
        with span(name, details):
            return function(*args, **kwargs)

    return cast(_F, run)


def is_recording() -> bool:
    """Return whether a timeline is kept: whether there is a communicator, and ``CHAINERMN_TIMELINE`` was set."""
    return active is not None
