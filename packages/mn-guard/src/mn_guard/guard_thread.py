"""The one thread of this package, which sleeps until a duty is due or a signal arrives.

When a signal arrives, Python immediately writes its number to a descriptor (:func:`signal.set_wakeup_fd`), also while
the main thread is inside MPI, where Python's own handlers cannot run. The thread waits on this descriptor.

It ends before a fork, and starts again after it: see :mod:`mn_guard.forks`.
"""

from __future__ import annotations

import contextlib
import functools
import math
import os
import select
import signal
import threading
import time
import traceback
from typing import Protocol, TypeVar

from mn_comm.basis.thread import Thread
from mn_guard.forks import around_forks, one_fork

_WAKE = b"\0"  # no signal has this number


class Duty(Protocol):
    """What the thread does, again and again.

    Attributes:
        due: When it is to be called next, as :func:`time.monotonic` counts, at the latest.
    """

    due: float

    def attend(self, signals: bytes) -> None:
        """Do what is due.

        Args:
            signals: The numbers of the signals that have arrived.
        """


_Duty = TypeVar("_Duty", bound=Duty)


class GuardThread:
    """A thread with duties, which starts with the first one. After :meth:`end`, it does not start again.

    Attributes:
        runner: The thread, while it runs.
    """

    def __init__(self) -> None:
        self._duties: list[Duty] = []
        self._pipe: tuple[int, int] | None = None
        self._pausing = threading.Event()  # of this runner
        self._has_ended = self._receives = False
        self.runner: Thread | None = None

    def find(self, kind: type[_Duty]) -> _Duty | None:
        """Return its duty of this class, if it has one."""
        return next((duty for duty in self._duties if isinstance(duty, kind)), None)

    def add(self, duty: Duty) -> None:
        """Add a duty, and start the thread if it does not run yet.

        Raises:
            OSError: The process has no descriptors left; the duty is not added.
        """
        with one_fork:
            self._open()
            self._duties.append(duty)
            self._wake()
            self.resume()

    def resume(self) -> None:
        """Start the thread, unless it runs, has ended or has no duties."""
        if self._pausing.is_set() or (self.runner is not None and self.runner.ident is None):
            self.pause()  # a signal handler has raised in the last pause, or before the start
        if self.runner is None and self._duties and not self._has_ended:
            self._pausing = threading.Event()
            self.runner = Thread(functools.partial(self._run, self._pausing), "chainermn-guard")
            self.runner.start()

    def pause(self) -> None:
        """Stop the thread, and wait until it has stopped; signals are kept."""
        if self.runner is not None:
            self._pausing.set()
            self._wake()
            if self.runner.ident is not None:
                self.runner.await_end()
            self.runner = None

    def end(self) -> None:
        """Stop the thread for good: it must not be inside MPI when MPI is finalized."""
        with one_fork:  # another thread may fork, and resume it
            self._has_ended = True
            self.pause()

    def receive_signals(self) -> bool:
        """Let Python write the numbers of signals to this thread; return whether nothing else receives them."""
        _, writing = self._open()
        there = signal.set_wakeup_fd(writing, warn_on_full_buffer=False)
        self._receives = there in (-1, writing)
        if not self._receives:
            signal.set_wakeup_fd(there)
        return self._receives

    def forget(self) -> None:
        """Begin again, in a child process, which is not a rank, and has the descriptors but not the thread."""
        if self._receives:
            with contextlib.suppress(ValueError):  # not the main thread
                signal.set_wakeup_fd(-1)
        for descriptor in self._pipe or ():
            os.close(descriptor)
        self._pipe = None
        self._pausing = threading.Event()
        self._duties.clear()
        self._has_ended = self._receives = False
        self.runner = None

    def _open(self) -> tuple[int, int]:
        """Return the descriptors on which it learns of signals, for reading and for writing."""
        if self._pipe is None:
            self._pipe = os.pipe()
            for descriptor in self._pipe:
                os.set_blocking(descriptor, False)
        return self._pipe

    def _wake(self) -> None:
        with contextlib.suppress(BlockingIOError):  # it is full, so the thread is about to wake up
            os.write(self._open()[1], _WAKE)

    def _run(self, pausing: threading.Event) -> None:
        reading, _ = self._open()
        poll = select.poll()
        poll.register(reading, select.POLLIN)
        while not pausing.is_set():
            due = min(duty.due for duty in self._duties)
            seconds = max(0.0, due - time.monotonic())
            poll.poll(None if math.isinf(seconds) else math.ceil(seconds * 1000))
            if not pausing.is_set():  # otherwise, what has arrived is for the next thread
                self._attend(self._arrived())

    def _arrived(self) -> bytes:
        with contextlib.suppress(BlockingIOError):
            return os.read(self._open()[0], 4096)
        return b""

    def _attend(self, signals: bytes) -> None:
        for duty in list(self._duties):
            try:
                duty.attend(signals)
            except Exception:  # a script's explanation failed, or stderr is closed
                with contextlib.suppress(Exception):
                    traceback.print_exc()


thread = GuardThread()
around_forks(
    before=lambda: thread.pause(), after_in_parent=lambda: thread.resume(), after_in_child=lambda: thread.forget()
)
