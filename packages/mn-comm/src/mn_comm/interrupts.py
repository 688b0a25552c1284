"""Ctrl-C while the main thread is inside MPI, where Python's own handler cannot run.

Python calls a handler between two instructions of the main thread. Inside MPI there are none until the other ranks
come, who may be waiting as well. The signal itself is noticed at once: Python writes its number to a descriptor
(:func:`signal.set_wakeup_fd`). The stall monitor's thread looks there, and ends the job if no handler runs.

Only rank 0 does so. If it is not inside MPI, the script decides: rank 0 may be saving what there is, while the others
wait for it.
"""

from __future__ import annotations

import functools
import os
import signal
import threading
import time
from collections.abc import Callable
from types import FrameType
from typing import Any

from mn_comm.watch import polled

__all__ = ["Interrupts", "watch_interrupts"]

_PATIENCE_SECONDS = 2.5


class Interrupts:
    """Knows of SIGINT that came, and whether Python's handler has run since.

    Args:
        signals: A descriptor to read the numbers of signals from, without waiting.
        patience: How many seconds Python's handler is given.
        end: Ends the job; called in the thread that polls.
    """

    def __init__(self, signals: int, patience: float, end: Callable[[], object]) -> None:
        self._signals = signals
        self._patience = patience
        self._end = end
        self._polled_at = time.monotonic()
        self._handled_at = 0.0
        self._pressed_after = self._noticed_at = 0.0
        self._is_pending = False

    def handle(self, number: int, frame: FrameType | None) -> None:
        """Do what Python does on SIGINT, and remember it: a handler for :func:`signal.signal`."""
        self._handled_at = time.monotonic()
        signal.default_int_handler(number, frame)

    def poll(self) -> None:
        """End the job if SIGINT came and the main thread has not noticed it for too long."""
        before, self._polled_at = self._polled_at, time.monotonic()
        if signal.SIGINT in self._read() and not self._is_pending:
            self._is_pending = True
            self._pressed_after, self._noticed_at = before, self._polled_at
        if self._handled_at >= self._pressed_after or signal.getsignal(signal.SIGINT) != self.handle:
            self._is_pending = False
        if self._is_pending and self._polled_at - self._noticed_at > self._patience:
            self._end()

    def _read(self) -> bytes:
        try:
            return os.read(self._signals, 4096)
        except BlockingIOError:
            return b""


def watch_interrupts(end: Callable[[], object]) -> None:
    """From now on, let SIGINT end the job if it comes while the main thread is inside MPI.

    Where the program has a handler of its own for it, or reads the numbers of signals itself (as asyncio does), nothing
    is done.

    Args:
        end: Ends it; called in the stall monitor's thread.
    """
    if threading.current_thread() is not threading.main_thread():
        return  # only the main thread may install handlers
    # Not the default one either if this was called before.
    if signal.getsignal(signal.SIGINT) is not signal.default_int_handler:
        return
    reading, writing = os.pipe()
    os.set_blocking(reading, False)
    os.set_blocking(writing, False)
    there = signal.set_wakeup_fd(writing, warn_on_full_buffer=False)
    if there != -1:
        signal.set_wakeup_fd(there)
        os.close(reading)
        os.close(writing)
        return
    interrupts = Interrupts(reading, _PATIENCE_SECONDS, end)
    signal.signal(signal.SIGINT, interrupts.handle)
    polled.append(lambda: interrupts.poll)
    os.register_at_fork(after_in_child=functools.partial(_forget, interrupts))


def _forget(interrupts: Interrupts) -> None:
    """Leave the descriptor to the parent: a child of a rank is none."""
    handler: Any = signal.getsignal(signal.SIGINT)
    if handler == interrupts.handle:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.set_wakeup_fd(-1)
