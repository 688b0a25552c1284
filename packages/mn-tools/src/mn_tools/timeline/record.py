"""The spans of one rank, kept in memory."""

from __future__ import annotations

import threading
import time
from types import TracebackType
from typing import Any

Event = tuple[str, int, int, int, "dict[str, Any] | None"]
"""Name, begin and end in nanoseconds of this process's clock, the thread, and what else there is to say."""

_MOST_EVENTS = 200_000


class Recorder:
    """The spans of one process.

    Args:
        most: The maximum number of spans to keep.

    Attributes:
        events: The spans, in the order in which they ended.
        threads: The names of the spans' threads.
        dropped: The number of spans that were not kept.
        full_at: When the first of these ended, in nanoseconds.
        started: This process's clock and the wall clock at the same moment, in nanoseconds.
    """

    __slots__ = ("dropped", "events", "full_at", "most", "started", "threads")

    def __init__(self, most: int = _MOST_EVENTS) -> None:
        self.events: list[Event] = []
        self.threads: dict[int, str] = {}
        self.dropped = 0
        self.full_at = 0
        self.most = most
        self.started = (time.perf_counter_ns(), time.time_ns())

    def span(self, name: str, details: dict[str, Any]) -> _Span:
        """Return a context whose duration is recorded as a span."""
        return _Span(self, name, details or None)

    def add(self, name: str, begin: int, end: int, details: dict[str, Any] | None) -> None:
        """Record a span of the calling thread."""
        if len(self.events) >= self.most:
            self.full_at = self.full_at or end
            self.dropped += 1
            return
        thread = threading.get_native_id()  # get_ident() gives a new thread the number of one that has ended
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
