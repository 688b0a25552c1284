"""The one thread of this package, which sleeps until a duty is due or a signal arrives.

When a signal arrives, Python immediately writes its number to a descriptor (:func:`signal.set_wakeup_fd`), also while
the main thread is inside MPI, where Python's own handlers cannot run. The thread waits on this descriptor.

It ends before a fork, and starts again after it: see :mod:`mn_guard.forks`.
"""

from __future__ import annotations

import contextlib
import math
import os
import select
import signal
import threading
import time
import traceback
from typing import Protocol

from mn_guard.forks import around_forks

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


class GuardThread:
    """A thread with duties. After :meth:`end`, it does not start again.

    Attributes:
        writing: The descriptor on which it learns of signals.
        runner: The thread, while it runs.
    """

    def __init__(self) -> None:
        self._reading, self.writing = os.pipe()
        os.set_blocking(self._reading, False)
        os.set_blocking(self.writing, False)
        self._duties: list[Duty] = []
        self._is_pausing = self._has_ended = self._receives = False
        self.runner: threading.Thread | None = None

    def add(self, duty: Duty) -> None:
        """Add a duty, and start the thread if it does not run yet."""
        self._duties.append(duty)
        self._wake()
        self.resume()

    def resume(self) -> None:
        """Start the thread, unless it runs, has ended or has no duties."""
        if self.runner is None and self._duties and not self._has_ended:
            self._is_pausing = False
            self.runner = threading.Thread(target=self._run, name="chainermn-guard", daemon=True)
            self.runner.start()

    def pause(self) -> None:
        """Stop the thread, and wait until it has stopped; signals are kept."""
        if self.runner is not None:
            self._is_pausing = True
            self._wake()
            self.runner.join()
            self.runner = None

    def end(self) -> None:
        """Stop the thread for good."""
        self._has_ended = True
        self.pause()

    def receive_signals(self) -> bool:
        """Let Python write the numbers of signals to this thread; return whether nothing else receives them."""
        there = signal.set_wakeup_fd(self.writing, warn_on_full_buffer=False)
        self._receives = there in (-1, self.writing)
        if not self._receives:
            signal.set_wakeup_fd(there)
        return self._receives

    def close(self) -> None:
        """Close the descriptors; the thread must not be running, or must be in another process."""
        self.runner = None
        if self._receives:
            with contextlib.suppress(ValueError):  # not the main thread
                signal.set_wakeup_fd(-1)
        os.close(self._reading)
        os.close(self.writing)

    def _wake(self) -> None:
        with contextlib.suppress(BlockingIOError):  # it is full, so the thread is about to wake up
            os.write(self.writing, _WAKE)

    def _run(self) -> None:
        poll = select.poll()
        poll.register(self._reading, select.POLLIN)
        while not self._is_pausing:
            due = min(duty.due for duty in self._duties)
            seconds = max(0.0, due - time.monotonic())
            poll.poll(None if math.isinf(seconds) else math.ceil(seconds * 1000))
            if not self._is_pausing:  # otherwise, what has arrived is for the next thread
                self._attend(self._arrived())

    def _arrived(self) -> bytes:
        with contextlib.suppress(BlockingIOError):
            return os.read(self._reading, 4096)
        return b""

    def _attend(self, signals: bytes) -> None:
        for duty in list(self._duties):
            try:
                duty.attend(signals)
            except Exception:  # a script's explanation failed, or stderr is closed
                with contextlib.suppress(Exception):
                    traceback.print_exc()


_threads: list[GuardThread] = []


def this_thread() -> GuardThread:
    """Return the thread of this process, which starts with its first duty."""
    if not _threads:
        _threads.append(GuardThread())
    return _threads[0]


def end() -> None:
    """End the thread of this process, if there is one: it must not be inside MPI when MPI is finalized."""
    for thread in _threads:
        thread.end()


def _pause() -> None:
    for thread in _threads:
        thread.pause()


def _resume() -> None:
    for thread in _threads:
        thread.resume()


def _forget() -> None:
    """Leave the descriptors to the parent: a child process is not a rank."""
    while _threads:
        _threads.pop().close()


around_forks(before=_pause, after_in_parent=_resume, after_in_child=_forget)
