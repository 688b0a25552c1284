"""How a rank ends the job: its launcher may discard output that it has not read yet, so the rank waits for it."""

from __future__ import annotations

import array
import contextlib
import fcntl
import os
import signal
import stat
import sys
import termios
import threading
import time
from typing import TextIO

from mn_guard import death_reporter, patience
from mn_guard.job import LAUNCHERS, is_tolerant, name_and_parent

_PATIENCE_SECONDS = patience.UNREAD_OUTPUT
_PAUSE_SECONDS = 0.01


def say(text: str) -> None:
    """Write to stderr, and continue if that fails: the job must still end."""
    with contextlib.suppress(Exception):
        sys.stderr.write(text)
        sys.stderr.flush()


def ignore_handlers() -> None:
    """From now on, call no signal handler of the script: one that raises would keep this process from ending the job.

    In threads other than the main one, where Python calls no handlers, this does nothing.
    """
    while True:
        with contextlib.suppress(BaseException):  # raised by a handler just now
            if threading.current_thread() is threading.main_thread():
                for number in signal.valid_signals():
                    if callable(signal.getsignal(number)):
                        signal.signal(number, lambda *_: None)
            return


def abort_when_read(status: int = 1, summary: str = "") -> None:
    """End the job by ``MPI_Abort``, once the launcher has read what this rank wrote, or after two seconds.

    With ``--with-ft ulfm``, Open MPI 5 leaves the other ranks alone after ``MPI_Abort``, and they may wait forever. In
    this case, the launcher itself is ended.

    Args:
        status: The exit status of the job; with ``--with-ft ulfm``, the job's status is 1.
        summary: The reason, in one line.
    """
    from mpi4py import MPI  # not at import: a script may install the hook before it chooses how MPI is initialised

    ignore_handlers()
    flush_until_read()
    death_reporter.has_spoken(summary)
    with contextlib.suppress(OSError):  # no descriptor is left to open the file with
        from mn_guard.supervised import report  # not at import: that module imports this one

        report.has_failed(status, summary)
    launcher = _launcher() if is_tolerant() else None
    if launcher is not None:
        os.kill(launcher, signal.SIGTERM)
    try:
        MPI.COMM_WORLD.Abort(status)
    finally:
        # MPICH's returns. The launcher then ends this process, but sometimes not if several ranks have called it. Until
        # then, this process must do nothing else, such as collect the timeline, or wait in MPI_Finalize.
        time.sleep(_PATIENCE_SECONDS)
        os._exit(status)


def _launcher() -> int | None:
    """Return the process ID of Open MPI's launcher on this node, an ancestor of this process; ``None`` if unknown."""
    process = os.getppid()
    with contextlib.suppress(OSError, ValueError):
        while process > 1:
            name, parent = name_and_parent(process)
            if name in LAUNCHERS:
                return process
            process = parent
    return None


def flush_until_read() -> None:
    """Wait until the launcher has read what this rank wrote, two seconds at most."""
    for stream in (sys.stderr, sys.stdout):
        with contextlib.suppress(Exception):  # no stream, no file descriptor, or closed: there is nothing to wait for
            _wait_until_read(stream)


def _wait_until_read(stream: TextIO) -> None:
    stream.flush()
    deadline = time.monotonic() + _PATIENCE_SECONDS
    while is_unread(stream.fileno()) and time.monotonic() < deadline:
        time.sleep(_PAUSE_SECONDS)


def is_unread(descriptor: int) -> bool:
    """Return whether a descriptor is that of a pipe, and its reader has not read all of it.

    Raises:
        OSError: It is closed.
    """
    if not stat.S_ISFIFO(os.fstat(descriptor).st_mode):
        return False
    unread = array.array("i", [0])
    fcntl.ioctl(descriptor, termios.FIONREAD, unread)
    return unread[0] > 0
