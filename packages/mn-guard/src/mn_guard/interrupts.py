"""Ctrl-C while the main thread is inside MPI, where Python's own handler cannot run.

Python calls a handler between two instructions of the main thread. While the main thread waits inside MPI, there are
none, and the other ranks may be waiting as well. But when the signal arrives, Python immediately writes its number to a
descriptor (:func:`signal.set_wakeup_fd`). A thread reads this descriptor, and ends the job if the main thread stays in
the operation in which it was waiting.

Only rank 0 does so. On other ranks the script decides: rank 0 may be saving its state while the others wait for it.
"""

from __future__ import annotations

import contextlib
import functools
import os
import signal
import threading
import time
from collections.abc import Callable

from mn_comm.ranks.watch import activities
from mn_guard.forks import around_forks

__all__ = ["Interrupts", "watch_interrupts"]

_PATIENCE_SECONDS = 2.5
_PAUSE_SECONDS = 0.1
_STOP = b"\0"


class Interrupts:
    """A thread that waits for SIGINT.

    end: A function that ends the job.
        end: Ends the job.
        patience: For how many seconds the main thread has to stay where it was.
    """

    def __init__(self, end: Callable[[], object], patience: float = _PATIENCE_SECONDS) -> None:
        self._end = end
        self._patience = patience
        self._main = threading.main_thread().ident or 0
        self._reading, self.writing = os.pipe()
        os.set_blocking(self.writing, False)
        self._runner: threading.Thread | None = None

    def start(self) -> None:
        """Start the thread."""
        self._runner = threading.Thread(target=self._run, name="chainermn-interrupts", daemon=True)
        self._runner.start()

    def stop(self) -> None:
        """Stop the thread, and wait until it has ended."""
        if self._runner is not None:
            os.write(self.writing, _STOP)
            self._runner.join()
            self._runner = None

    def close(self) -> None:
        """Close the descriptors; the thread must not be running, or must be in another process."""
        self._runner = None
        os.close(self._reading)
        os.close(self.writing)

    def _run(self) -> None:
        numbers = b""
        while _STOP not in numbers:
            numbers = os.read(self._reading, 4096)
            if signal.SIGINT in numbers and self._stays_in_mpi():
                self._end()

    def _stays_in_mpi(self) -> bool:
        """Whether the main thread stays where it waits for other ranks."""
        if signal.getsignal(signal.SIGINT) is not signal.default_int_handler:
            return False  # the script has installed its own handler
        wait = self._wait()
        deadline = time.monotonic() + self._patience
        while wait is not None and self._wait() is wait:
            if time.monotonic() > deadline:
                return True
            time.sleep(_PAUSE_SECONDS)
        return False

    def _wait(self) -> object:
        activity = activities.get(self._main)
        return None if activity is None else activity.wait


_watching: Interrupts | None = None


def watch_interrupts(end: Callable[[], object]) -> None:
    """From now on, let SIGINT end the job if it comes while the main thread waits for other ranks.

    Does nothing if the program has its own handler for SIGINT, or reads signal numbers itself (as asyncio does). A
    second call does nothing either.

    Args:
        end: A function that ends the job; called in a thread.
    """
    global _watching
    if _watching is not None or threading.current_thread() is not threading.main_thread():
        return  # only the main thread may set the descriptor
    if signal.getsignal(signal.SIGINT) is not signal.default_int_handler:
        return
    interrupts = Interrupts(end)
    there = signal.set_wakeup_fd(interrupts.writing, warn_on_full_buffer=False)
    if there != -1:
        signal.set_wakeup_fd(there)
        interrupts.close()
        return
    _watching = interrupts
    interrupts.start()
    _see_to_forks()


@functools.cache
def _see_to_forks() -> None:
    around_forks(before=_stop, after_in_parent=_start, after_in_child=_forget)


def _stop() -> None:
    if _watching is not None:
        _watching.stop()


def _start() -> None:
    if _watching is not None:
        _watching.start()


def _forget() -> None:
    """Leave the descriptors to the parent: a child process is not a rank."""
    global _watching
    if _watching is not None:
        with contextlib.suppress(ValueError):  # not the main thread
            signal.set_wakeup_fd(-1)
        _watching.close()
        _watching = None
