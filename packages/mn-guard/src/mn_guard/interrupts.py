"""Ctrl-C while the main thread is inside MPI, where Python's own handler cannot run.

Python calls a handler between two instructions of the main thread. While the main thread waits inside MPI, there are
none, and the other ranks may be waiting as well. But :mod:`mn_guard.guard_thread` learns of the signal, and ends the
job if the main thread stays in the operation in which it was waiting. The thread may look late, when KeyboardInterrupt
was raised long ago and the script waits again while it handles it; this wait is left alone.

Only rank 0 does so. On other ranks the script decides: rank 0 may be saving its state while the others wait for it.
"""

from __future__ import annotations

import math
import signal
import sys
import threading
import time
from collections.abc import Callable
from typing import Any

from mn_comm.ranks.watch import activities
from mn_guard import guard_thread, patience

_PATIENCE_SECONDS = patience.CTRL_C
_PAUSE_SECONDS = 0.1


class Interrupts:
    """Ends the job after SIGINT, if the main thread stays where it waits.

    Args:
        end: Ends the job.
        patience: For how many seconds the main thread has to stay where it was.

    Attributes:
        due: When to check next whether it is still there; infinite if no signal has arrived.
    """

    def __init__(self, end: Callable[[], object], patience: float = _PATIENCE_SECONDS) -> None:
        self.due = math.inf
        self._end = end
        self._patience = patience
        self._deadline = 0.0
        self._main = threading.main_thread().ident or 0
        self._waited_in: object = None
        self._handled = 0  # the exception that the main thread was handling at the last look

    def attend(self, signals: bytes) -> None:
        """Begin to look where the main thread is, if SIGINT has arrived; end the job if it has stayed there."""
        is_pressed = self._waited_in is None and signal.SIGINT in signals
        if is_pressed:
            self._deadline = time.monotonic() + self._patience
        elif math.isinf(self.due):
            return
        before, self._handled = self._handled, self._handles()
        if is_pressed and self._handled in (0, before):
            self._waited_in = self._wait()
        is_pythons = signal.getsignal(signal.SIGINT) is signal.default_int_handler  # not the script's own handler
        if not is_pythons or self._wait() is not self._waited_in:
            self._waited_in = None
        if time.monotonic() <= self._deadline:
            self.due = time.monotonic() + _PAUSE_SECONDS
            return
        self.due = math.inf
        if self._waited_in is not None:
            self._end()

    def _handles(self) -> int:
        """Return the identity of the KeyboardInterrupt that the main thread is handling, or 0."""
        found: Any = sys._current_exceptions().get(self._main)  # noqa: SLF001 - documented
        error = found[1] if isinstance(found, tuple) else found  # before Python 3.12, a tuple
        while error is not None and not isinstance(error, KeyboardInterrupt):
            error = error.__context__
        return 0 if error is None else id(error)

    def _wait(self) -> object:
        activity = activities.get(self._main)
        return None if activity is None else activity.wait


def watch_interrupts(end: Callable[[], object]) -> None:
    """From now on, let SIGINT end the job if it comes while the main thread waits for other ranks.

    Does nothing if the program has its own handler for SIGINT, or reads signal numbers itself (as asyncio does). A
    second call does nothing either.

    Args:
        end: A function that ends the job; called in a thread.
    """
    thread = guard_thread.thread
    if thread.find(Interrupts) is not None or threading.current_thread() is not threading.main_thread():
        return  # only the main thread may set the descriptor
    if signal.getsignal(signal.SIGINT) is not signal.default_int_handler:
        return
    if thread.receive_signals():
        thread.add(Interrupts(end))
